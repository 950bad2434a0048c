"""Comparisons: every arm at every number of labels and every seed, and the reference models beside them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from smallvit.components import function, python_numbers
from smallvit.evaluate import declaration
from smallvit.passes import common_folds, seeds_of
from smallvit.ranges import Tune
from smallvit.record import ROLES, condition_text
from smallvit.reference_runs import standard_references
from smallvit.run import Run, fingerprint
from smallvit.shapes import printable


@dataclass(frozen=True, kw_only=True)
class ArmRun:
    """One run of a comparison: its settings, the arm (variant in the comparison) to which the run belongs, and the role of this
    arm, such as "baseline" or "technique". Arm and role do not change the training.

    run         the settings
    arm         the name of the arm
    role        "baseline", "technique" (gets a verdict), "reference" (for orientation, without a verdict) or "dependency"
                (trained only because another run needs it)
    baseline    the arm it is compared with (its control), which may be another technique or a reference; "" if there is only
                one baseline
    length      training steps of the baseline, in a comparison over several training lengths
    tuning      how the settings of the run were chosen, as `Record.tuning` says; None if they were not tuned
    looks       numbers of seeds at which the comparison is tested; None: once, with all seeds
    tune        how `smallvit tune` chooses settings, a `Tune` object; None if the recipe does not ask for it

    Raises ValueError for an empty name or an unknown role.
    """

    run: Run
    arm: str
    role: str = "technique"
    baseline: str = ""
    length: int | None = None
    tuning: dict | None = None
    looks: tuple[int, ...] | None = None
    tune: Any = field(default=None, compare=False, repr=False)  # a Tune, or None

    def __post_init__(self):
        if not isinstance(self.run, Run):
            raise ValueError(f"run is {self.run!r:.60}; expected a smallvit.Run")
        if not isinstance(self.arm, str) or not self.arm.strip() or not isinstance(self.baseline, str):
            raise ValueError(f"arm is {self.arm!r} and baseline {self.baseline!r}; expected two names")
        if printable(self.arm + self.baseline) != self.arm + self.baseline:
            names = f"{printable(self.arm)!r} and {printable(self.baseline)!r}"
            raise ValueError(f"arm and baseline are {names}; expected names without control characters or changes of direction")
        if self.role not in ROLES:
            raise ValueError(f"role is {self.role!r}; expected one of {', '.join(map(repr, ROLES))}")

    @property
    def labels(self) -> int | None:
        """The number of labelled training images of the run. None means that all training images have labels."""
        return self.run.labels

    @property
    def seed(self) -> int:
        """The random seed of the run. It also decides which images have labels."""
        return self.run.seed

    @property
    def seed_text(self) -> str:
        """The seed of the run as text, such as `seed 3`. In a cross-validation the seed names a pass over all images and one
        fold of it, whose images are the test images: `pass 0, fold 3`.
        """
        folds = self.run.folds
        return f"pass {self.seed // folds}, fold {self.seed % folds}" if folds else f"seed {self.seed}"

    @property
    def cell(self) -> tuple:
        """The arm (variant in the comparison) and the condition of the run, as a tuple: arm, number of labelled images,
        training length, and whether the settings were tuned (chosen by `smallvit tune`). Runs with equal cells differ only in
        their seed.
        """
        return self.arm, self.labels, self.length, self.tuning is not None

    @property
    def condition(self) -> str:
        """The condition of the run as text: the number of labelled images, the training length, and whether the settings were
        tuned (chosen by `smallvit tune`). For example: `1,000 labels, 2,000 steps, tuned`.
        """
        return condition_text(self.labels, self.length, self.tuning is not None)

    def with_steps(self, change: Callable[[int], int]) -> "ArmRun":
        """Return a copy of this run with another number of training steps. The function `change` converts the old number to the
        new one. In a comparison over several training lengths, a length is identified by the steps of the baseline; this number
        is converted too.
        """
        return replace(self, run=self.run.with_steps(change), length=self.length and change(self.length))


def ablate(
    arms: dict[str, Run],
    *,
    labels: Iterable[int | None] = (None,),
    seeds: Iterable[int] = range(8),
    references: bool | Iterable[str] = True,
    extra_references: dict[str, Run] | None = None,
    steps: Iterable[int] | None = None,
    tune: Tune | None = None,
    baseline: dict[str, str] | None = None,
    match: str | None = None,
) -> list[ArmRun]:
    """Return the list of all runs of a comparison. `arms` is a dict from the name of each arm (variant) to its run, with the
    baseline first. The options `labels` and `seeds` list the numbers of labelled images and the random seeds.

    Each arm is trained with every number of labelled images and every seed. At each number of labelled images and each training
    length, the seeds are the outer loop and the arms the inner one. So a comparison that was stopped early has runs of all arms
    at the first number of labelled images.

    If the data loader of the arms has the option `folds` (cross-validation), `seeds` are the numbers of the passes. A pass is
    one run for each fold, so that every image is a test image once. With 5 folds, `range(8)` gives 40 runs of each arm.

    references        add reference models, which get no verdict: raw pixels with logistic regression and with kNN, a small CNN
                      trained like the baseline and, if an arm is judged by a probe, the same probe of an untrained model.
                      False: none; a list of names, such as ["small CNN"]: these
    extra_references  more reference models by name, such as `imagenet_vit_s(baseline)`
    steps             train at several lengths. These are the steps of the baseline, in increasing order; the steps of each
                      other arm, and of its pretraining, are scaled by the same factor
    tune              a `Tune` object: `smallvit tune` then chooses settings for each arm, with equally many trials
    baseline          the control of an arm, if it is not the first arm: a dict from the name of an arm to the name of the arm
                      or reference that it is compared with
    match             "params" or "macs": give each technique as many parameters, or multiply-adds, as its control has. If they
                      differ by more than 2%, the `mlp_ratio` of its blocks is changed, or its `dim` if there is no such option

    Raises ValueError if two arms have equal settings, if an arm has the name of a reference or another number of labels, if a
    seed or a number of labels occurs twice, if the lengths do not increase or the baseline is not trained, if a control is
    unknown or controls form a circle, if the costs cannot be matched or tuning would change them, if arms have different
    numbers of folds, if `tune` is given and the arms have folds or are judged by a score where lower is better, and if several
    lengths are asked for with `Tune(common=False)`.
    """
    labels, seeds = as_list(labels, "labels"), as_list(seeds, "seeds")
    if not arms or not isinstance(arms, dict) or not all(isinstance(run, Run) for run in arms.values()):
        raise ValueError(f"ablate got the arms {arms!r}; expected a dict from names to runs, with the baseline first")
    more = {} if extra_references is None else extra_references
    if not isinstance(more, dict) or not all(isinstance(run, Run) for run in more.values()):
        raise ValueError(f"extra_references is {extra_references!r:.60}; expected a dict from names to runs")
    for name, run in arms.items():
        if run.labels not in (None, *labels):
            raise ValueError(f"arm {name!r} has labels={run.labels}, but ablate has labels={labels}; set labels in ablate only")
    if tune is not None and not isinstance(tune, Tune):
        raise ValueError(f"tune is {tune!r:.60}; expected a smallvit.Tune, such as Tune({{'lr': (3e-4, 6e-3)}}, trials=8)")
    if tune is not None:
        check_tunable(arms)
    first = next(iter(arms))
    lengths = training_lengths(steps, arms[first])
    if tune is not None and not tune.common and len(lengths) > 1:
        raise ValueError(f"Tune(common=False) with the lengths {lengths}: lengths are compared at common settings; remove one")
    named = {name: (run, "baseline" if name == first else "technique") for name, run in arms.items()}
    standard = chosen_references(standard_references(list(arms.values())), references) if references else {}
    for kind, added in (("a standard reference", standard), ("an extra reference", more)):
        for name, run in added.items():
            if name in named:
                other = "an arm" if name in arms else "a standard reference"
                raise ValueError(f"{name!r} is the name of {kind} and of {other}; rename one, or set references=False")
            named[name] = (run, "reference")
    controls = controls_of(list(named), baseline or {})
    if match is not None:
        from smallvit.match import check_tuned_options, match_cost

        for name in by_control(controls):
            run, role = named[name]
            if role == "technique":
                named[name] = match_cost(run, named[controls[name]][0], match, name, controls[name]), role
            if tune is not None and role != "reference":
                check_tuned_options(named[name][0], tune, match, name)
    folds = common_folds({name: run for name, (run, _) in named.items()})
    equal: dict[str, str] = {}
    for name, (run, role) in named.items():
        other = equal.setdefault(fingerprint(at_cell(run, None, 0)), name)
        if other != name:
            advice = "; the second one is a reference: set references=False" if role == "reference" else ""
            raise ValueError(f"the arms {other!r} and {name!r} have equal settings; expected at least one difference{advice}")
    return [
        ArmRun(
            run=at_cell(run if length is None else scaled_steps(run, length, arms[first].steps), count, seed),
            arm=name,
            role=role,
            baseline=controls[name],
            length=length,
            tune=tune,
        )
        for count in labels
        for length in lengths
        for seed in seeds_of(seeds, folds)
        for name, (run, role) in named.items()
    ]


def chosen_references(standard: dict[str, Run], names: bool | Iterable[str]) -> dict[str, Run]:
    """Return the standard reference models that a comparison asks for, as a dict from name to run. `standard` has all of them.
    `names` is a list of names, or True for all.

    Raises ValueError for a name that is not in `standard`.
    """
    if not isinstance(names, bool | str | list | tuple | set | dict):
        raise ValueError(f"references is {names!r}; expected True, False, or names from {', '.join(standard)}")
    chosen = list(standard) if names is True else [names] if isinstance(names, str) else list(names or ())
    if unknown := [name for name in chosen if name not in standard]:
        raise ValueError(f"references names {unknown[0]!r}; expected True, False, or names from {', '.join(standard)}")
    return {name: run for name, run in standard.items() if name in chosen}


def check_tunable(arms: dict[str, Run]):
    """Raise ValueError if `smallvit tune` cannot choose settings for an arm (variant): if its data set is divided into folds,
    so that test images of one run are validation images of others, or if a lower score is better. `arms` is a dict from name to
    run.
    """
    for name, run in arms.items():
        if run.folds:
            raise ValueError(
                f"tune cannot be combined with folds={run.folds} of {name!r}: test images of one run are validation images of "
                "others, by which settings would be chosen; use a fixed test part, such as folder(..., test=0.2), without folds"
            )
        if declaration(run.evaluators[0]).lower_is_better:
            title = function(run.evaluators[0]).__name__
            raise ValueError(
                f"tune looks for the highest score, and {name!r} is judged by {title}, where lower is better; put another "
                "evaluator first, such as smallvit.accuracy"
            )


def training_lengths(steps: Iterable[int] | None, baseline: Run) -> list[int | None]:
    """Return the training lengths of a comparison as a list. `steps` holds the numbers of training steps of the baseline, in
    increasing order; they are checked and returned. None means that there is only one length: then return [None]. `baseline` is
    the run with which other runs are compared.

    Raises ValueError if the numbers do not increase or are not positive whole numbers, and if the baseline is not trained.
    """
    if steps is None:
        return [None]
    lengths = as_list(steps, "steps")
    if not all(type(n) is int and n > 0 for n in lengths) or lengths != sorted(lengths):
        raise ValueError(f"steps are {lengths}; expected positive whole numbers that increase, such as [500, 2_000, 8_000]")
    if not baseline.steps:
        raise ValueError(f"steps are {lengths}, but the baseline has steps=0; give the first arm a number of steps to scale")
    return lengths


def scaled_steps(run: Run, length: int, steps: int) -> Run:
    """Return a copy of `run` whose number of training steps is multiplied by `length / steps`: the steps of the baseline at the
    new training length, divided by its usual steps. So all runs of a comparison are scaled alike. The result is rounded, and at
    least 1; 0 stays 0. Earlier runs, such as pretraining, are changed in the same way.
    """
    return run.with_steps(lambda old: max(1, round(old * length / steps)) if old else 0)


def controls_of(names: list[str], given: dict[str, str]) -> dict[str, str]:
    """Return the control of each arm (variant), that is the arm with which it is compared, as a dict from name to name. `names`
    are all arms, then the references (models for orientation only); the first is the baseline. `given` is such a dict for some
    arms. The control of the others is the baseline.

    Raises ValueError for unknown names, an arm that is its own control, and controls that form a circle.
    """
    if not isinstance(given, dict):
        raise ValueError(f"baseline is {given!r:.60}; expected a dict from an arm to its control, such as {{'b + c': 'b'}}")
    first = names[0]
    for arm, control in given.items():
        for name in (arm, control):
            if name not in names:
                raise ValueError(f"baseline names {name!r}, which is no arm or reference; expected one of {', '.join(names)}")
        if arm == control:
            raise ValueError(f"baseline compares {arm!r} with itself; expected another arm or reference")
        if arm == first:
            raise ValueError(f"baseline gives a control to {arm!r}, the first arm, which has none; expected another arm")
    controls = {name: given.get(name, first) for name in names}
    by_control(controls)
    return controls


def only_baseline(runs: Iterable[ArmRun]) -> str:
    """Return the name of the arm that is the control of all arms that name none: the baseline of a comparison. The result is an
    empty text if there is no baseline, or several. `runs` are the runs of the comparison.
    """
    names = {entry.arm for entry in runs if entry.role == "baseline"}
    return names.pop() if len(names) == 1 else ""


def by_control(controls: dict[str, str]) -> list[str]:
    """Return all arms (variants) in an order in which each arm comes after its control, the arm with which it is compared. In
    this order, each arm can be changed to match the cost of its control. `controls` is a dict from arm to control; a baseline
    is its own control. Raises ValueError if the controls form a circle.
    """
    order: list[str] = []
    while len(order) < len(controls):
        ready = [arm for arm, control in controls.items() if arm not in order and (control == arm or control in order)]
        if not ready:
            left = " -> ".join(repr(arm) for arm in controls if arm not in order)
            raise ValueError(f"baseline has a circle among {left}; expected controls that lead back to the first arm")
        order += ready
    return order


def longest(entries: Iterable[ArmRun]) -> list[ArmRun]:
    """Return the runs with the longest training length in a comparison as a list. If the comparison has only one length, return
    all runs. `entries` are the runs.
    """
    entries = list(entries)
    most = max((entry.length or 0 for entry in entries), default=0)
    return [entry for entry in entries if (entry.length or 0) == most]


def by_cell(runs: Iterable[ArmRun]) -> dict[tuple, list[ArmRun]]:
    """Return the runs of each arm (variant) in each condition (number of labels, training length, tuned or not), as a dict from
    `ArmRun.cell` to the list of its runs. The runs of one list differ in their seed. `runs` are the runs of a comparison.
    """
    cells: dict[tuple, list[ArmRun]] = {}
    for entry in runs:
        cells.setdefault(entry.cell, []).append(entry)
    return cells


def with_dependencies(
    entries: Iterable[ArmRun], recipe: Iterable[ArmRun] = ()
) -> tuple[list[ArmRun], list[dict[str, int]]]:
    """Add to the list of runs `entries` the earlier runs that must be trained first, such as pretraining. Return the longer
    list, and for each run a dict from "init" or "teacher" to the position of the earlier run. `recipe` lists all runs of the
    recipe: an earlier run that is one of them keeps the name of its arm. Each earlier run is added once.
    """
    entries = list(entries)
    arms = {fingerprint(entry.run): entry for entry in recipe}
    position: dict[str, int] = {}
    for index, entry in enumerate(entries):  # a run that occurs in several conditions counts with its first position
        position.setdefault(fingerprint(entry.run), index)
    for entry in entries:  # grows during the loop: a dependency may have dependencies
        for name, run in entry.run.dependencies.items():
            key = fingerprint(run)
            if position.setdefault(key, len(entries)) == len(entries):
                arm = f"{'initialization' if name == 'init' else 'teacher'} of {entry.arm}"
                entries.append(arms.get(key) or ArmRun(run=run, arm=arm, role="dependency", baseline=entry.baseline))
    return entries, [{name: position[fingerprint(run)] for name, run in entry.run.dependencies.items()} for entry in entries]


def at_cell(run: Run, labels: int | None, seed: int) -> Run:
    """Return a copy of a run with `labels` labelled images (None means all) and the random seed `seed`. A comparison trains
    each arm in this way for several numbers of labels and seeds. Earlier runs that this run needs, such as pretraining, are
    changed in the same way.

    A dependency that sets its own number of labels keeps it. A dependency that uses no labels has `labels=None`, so it is the
    same run for all numbers of labels.
    """
    dependencies = {
        field: at_cell(other, other.labels or (labels if depends_on_labels(other) else None), seed)
        for field, other in run.dependencies.items()
    }
    return replace(run, labels=labels, seed=seed, **dependencies)


def depends_on_labels(run: Run) -> bool:
    """Return whether the training of a run changes with the number of labelled images. This is false for pretraining on
    unlabelled images, which uses the same images in any case. It is true if an earlier run that `run` needs depends on this
    number.
    """
    return not run.unlabelled or run.pseudo_labels is not None or any(map(depends_on_labels, run.dependencies.values()))


def as_list(values: Iterable, name: str) -> list:
    """Return several values as a list. Raise ValueError if `values` is a single value, is empty or contains a value twice.
    `name` is the name of the parameter in the error message.
    """
    if isinstance(values, str) or not isinstance(values, Iterable):
        is_count = name == "seeds" and isinstance(values, int) and values > 0
        several = f"range({values})" if is_count else "range(8)" if name == "seeds" else f"[{values!r}]"
        raise ValueError(f"{name} is {values!r}; expected several values, such as {name}={several}")
    found: list = python_numbers(list(values))
    if not found or any(found[index] in found[:index] for index in range(len(found))):
        raise ValueError(f"{name} are {found}; expected at least one, and each once")
    return found
