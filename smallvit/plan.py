"""The plan: what a recipe would train here, in words, and how long that would take."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from smallvit.components import knobs
from smallvit.launch import cores, refuse_absent
from smallvit.pretrained import Weights
from smallvit.run import Run, difference
from smallvit.schedule import with_those_before

STEPS = 8  # timed of each arm
STACKS = (1, 2, 4, 8)


def plan(runs: Sequence[Run], jobs: int | None, device: str) -> str:
    """The arms, how they differ from the baseline, and a measured estimate of the time. Nothing is trained or downloaded.

    Raises   ValueError for an arm that cannot be trained, with its name.
    """
    runs, _ = with_those_before(runs)
    jobs = min(jobs or cores(), len(runs))
    first = {run.arm: run for run in reversed(runs)}
    tokens = schedules(runs)
    seconds, later, lines = 0.0, 0.0, []
    for arm, run in {run.arm: first[run.arm] for run in runs}.items():
        count = sum(other.arm == arm for other in runs)
        try:
            one = estimate(unstarted(run), device)  # a step takes as long from whichever weights
            absent = isinstance(run.init, Weights) and run.init.at_hand() is None
        except Exception as error:
            raise ValueError(f"arm {arm!r}: {type(error).__name__}: {error}") from error
        seconds, later = seconds + one * count * (not absent), later + one * count * absent
        note = f"; {run.init.name} is to be downloaded" if absent else ""
        lines.append(f"{arm}: {count} runs of {run.steps} steps, about {one:.0f} s each{note}")
        lines += [f"    {tokens[arm]}"] if arm in tokens else []
        baseline = next((other for other in runs if other.arm == run.against), runs[0])
        if arm != baseline.arm:
            changes = difference(baseline.vary(labels=run.labels, seed=run.seed), run)
            lines += [f"    {name}: {here} -> {there}" for name, (here, there) in changes.items()]
    more = f" (and {clock(later / jobs)} with the weights that are to be downloaded)" if later else ""
    told = f"about {clock(seconds / jobs)}{more} with {jobs} jobs on {device}, measured by a few steps of each arm"
    return "\n".join([*lines, f"{len(runs)} runs, {told}"])


def estimate(run: Run, device: str) -> float:
    """The seconds that a run takes on this machine, by the median of a few steps on one thread; evaluation left out."""
    import torch

    from smallvit.train import drawn
    from smallvit.training import Training

    torch.set_num_threads(1)
    training = Training(run, *drawn(run), device)
    training.objective.train()
    steps = min(STEPS, run.steps)
    return run.steps * a_step(training.advance, training, steps) if steps else 0.0


def a_step(advance: Callable[[], None], training: "Training", steps: int = STEPS) -> float:  # noqa: F821
    """The seconds that a step of this training takes, alone or among others: the median of so many."""
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        advance()
        training.loss.item()  # an accelerator is waited for
        times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 2]


def unstarted(run: Run) -> Run:
    """The run without weights to be found first, and without what its start would take images for: a step takes as long."""
    init = None if isinstance(run.init, Weights) else run.init  # what another run would leave is not looked for
    return replace(run, init=init, pseudo_labels=None, unlabelled=run.unlabelled and not run.pseudo_labels)


def stack_size(runs: Sequence[Run], jobs: int | None, device: str) -> tuple[int, str]:
    """How many seeds of an arm are best trained as one here, and in words why; measured by a few steps of the first arm.

    One choice for the whole recipe. It is 1 unless that many together gain a tenth, and never so many that a worker is idle.
    """
    import torch

    from smallvit.stack import Stack
    from smallvit.train import drawn
    from smallvit.training import Training

    refuse_absent(device)
    torch.set_num_threads(1)
    run = next((run for run in runs if run.steps and run.role != "floor"), None)
    if run is None:
        return 1, "nothing is trained"
    seeds = [other.seed for other in runs if (other.arm, other.labels) == (run.arm, run.labels)]
    most = min(len(seeds), sum(other.steps > 0 for other in runs) // (jobs or cores()))
    times, said = {}, []
    for size in (size for size in STACKS if size <= max(most, 1)):
        try:
            members = [Training(one, *drawn(one), device) for one in (unstarted(replace(run, seed=s)) for s in seeds[:size])]
            members[0].objective.train()
            advance = members[0].advance if size == 1 else Stack(members).advance
            times[size] = a_step(advance, members[0]) / size
        except Exception as error:  # what is wrong with a run its record will say; with a stack, that it is none
            said.append(f"{size} together: {type(error).__name__}, {str(error).splitlines()[0]}")
            break
        said.append(f"{size} together: {1e3 * times[size]:.3g} ms a step of each")
    best = min(times, key=times.get, default=1)
    return best if times and times[best] < 0.9 * times[1] else 1, "; ".join(said)


def schedules(runs: Sequence[Run]) -> dict[str, str]:
    """For each arm that reduces tokens, how many are left behind which block."""
    # where the slot is seen to be empty, as in most recipes, no model is built to find that out
    reducing = [run for run in {run.arm: run for run in runs}.values() if run.role != "floor" and may_reduce(run.model)]
    if not reducing:
        return {}
    import torch

    from smallvit.compute import in_words, reduces

    found = {}
    for run in reducing:
        spec = run.data().spec
        with suppress(Exception), torch.device("meta"):  # what is wrong with a model is for its run to say
            model = run.model(spec.size, spec.channels, len(spec.classes))
            found |= {run.arm: in_words(model)} if reduces(model) else {}
    return found


def may_reduce(model: Callable) -> bool:
    """Whether something stands in the model's slot of that name; where it has none, nobody knows."""
    slot = knobs(model).get("reduction")
    return slot is None or slot.default is not None


def clock(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
