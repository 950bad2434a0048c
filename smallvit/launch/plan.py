"""The plan: what a recipe would train here, in words, and how long that would take."""

from collections.abc import Callable, Sequence
from contextlib import suppress

from smallvit.components import knobs
from smallvit.numerics import DEFAULT
from smallvit.pretrained import Weights
from smallvit.run import Run, difference

from .autotune import STEPS, a_step, begun
from .local import cores
from .scheduler import with_dependencies


def plan(runs: Sequence[Run], jobs: int | None, device: str, finished: Callable[[Run], object] = lambda run: False) -> str:
    """The arms, how they differ from the baseline, and a measured estimate of the time that those not `finished` take.

    Nothing is trained or downloaded. Raises ValueError for an arm that cannot be trained, with its name.
    """
    runs, _ = with_dependencies(runs)
    left = [run for run in runs if not finished(run)]
    jobs = max(1, min(jobs or cores(), len(left)))
    first = {run.arm: run for run in reversed(runs)}
    tokens = tokens_left(runs)
    seconds, later, lines = 0.0, 0.0, []
    for arm, run in {run.arm: first[run.arm] for run in runs}.items():
        count, still = (sum(other.arm == arm for other in some) for some in (runs, left))
        try:
            one = estimate(run, device)
            absent = isinstance(run.init, Weights) and run.init.at_hand() is None
        except Exception as error:
            raise ValueError(f"arm {arm!r}: {type(error).__name__}: {error}") from error
        seconds, later = seconds + one * still * (not absent), later + one * still * absent
        note = f"; {count - still} have finished" if still < count else ""
        note += f"; {run.init.name} is to be downloaded" if absent else ""
        lines.append(f"{arm}: {count} runs of {run.steps} steps, about {one:.0f} s each{note}")
        lines += [f"    {tokens[arm]}"] if arm in tokens else []
        baseline = next((other for other in runs if other.arm == run.baseline), runs[0])
        if arm != baseline.arm:
            changes = difference(baseline.vary(labels=run.labels, seed=run.seed), run)
            lines += [f"    {name}: {here} -> {there}" for name, (here, there) in changes.items()]
    more = f" (and {clock(later / jobs)} with the weights that are to be downloaded)" if later else ""
    told = f"about {clock(seconds / jobs)}{more} with {jobs} jobs on {device}, measured by a few steps of each arm"
    kept = f"{len(runs) - len(left)} have finished, the others take " if len(left) < len(runs) else ""
    return "\n".join([*lines, f"{len(runs)} runs, {kept}{told}"])


def estimate(run: Run, device: str) -> float:
    """The seconds that a run takes on this machine, by the median of a few steps on one thread; evaluation left out."""
    import torch

    torch.set_num_threads(1)
    training = begun(run, DEFAULT, device)  # a step takes as long from whichever weights
    steps = min(STEPS, run.steps)
    return run.steps * a_step(training.train_step, training, steps) if steps else 0.0


def tokens_left(runs: Sequence[Run]) -> dict[str, str]:
    """For each arm that reduces tokens, how many are left behind which block."""
    # where the slot is seen to be empty, as in most recipes, no model is built to find that out
    reducing = [run for run in {run.arm: run for run in runs}.values() if run.role != "reference" and may_reduce(run.model)]
    if not reducing:
        return {}
    import torch

    from smallvit.flops import describe_tokens, reduces

    found = {}
    for run in reducing:
        spec = run.data().spec
        with suppress(Exception), torch.device("meta"):  # what is wrong with a model is for its run to say
            model = run.model(spec.size, spec.channels, len(spec.classes))
            found |= {run.arm: describe_tokens(model)} if reduces(model) else {}
    return found


def may_reduce(model: Callable) -> bool:
    """Whether something stands in the model's slot of that name; where it has none, nobody knows."""
    slot = knobs(model).get("reduction")
    return slot is None or slot.default is not None


def clock(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
