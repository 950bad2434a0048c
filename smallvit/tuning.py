"""Equal tuning: which runs are tuned, the file with the chosen values, and the tuned runs of a comparison.

A recipe states the ranges with `ablate(..., tune=Tune({"lr": (3e-4, 6e-3)}))`. `smallvit tune R` trains the trials (see
`launch/tune.py`) and writes the choice to `R.tuned.json` beside the recipe. `apply` then returns the tuned runs.
"""

import json
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from smallvit.ablation import longest
from smallvit.components import check_option, options
from smallvit.ranges import TUNABLE, Range, Tune
from smallvit.record import format_labels
from smallvit.run import Run, fingerprint
from smallvit.shapes import SHAPES, shape_problem
from smallvit.storage import parse_json, write_text

if TYPE_CHECKING:
    from smallvit.ablation import ArmRun

FORMAT = 1  # of the file R.tuned.json
FIRST_SEED = 2_000  # trials use the seeds from this one on, which no comparison may use

# Which runs are tuned, and in what


def runs_to_tune(runs: Iterable["ArmRun"]) -> list["ArmRun"]:
    """Return the runs of a comparison that are tuned, as a list. These are the runs with the longest training of all arms
    (variants) that have a `Tune` (the hyperparameters to tune and their ranges). `runs` are all runs of the comparison.

    Raises ValueError if there are none, if they have different `Tune` options, or if one uses a seed of the trials.
    """
    common = longest(entry for entry in runs if entry.tune is not None and entry.tuning is None)
    if not common:
        raise ValueError("this recipe has nothing to tune; pass tune=Tune({'lr': (3e-4, 6e-3)}) to ablate")
    tune = common[0].tune
    if any(entry.tune != tune for entry in common):
        raise ValueError("the runs have different Tune(...); expected the same one for the whole recipe")
    trial_seeds = range(FIRST_SEED, FIRST_SEED + tune.seeds)
    if used := sorted({entry.seed for entry in common} & set(trial_seeds)):
        raise ValueError(f"the comparison uses seed {used[0]}, which the trials use; expected seeds below {FIRST_SEED}")
    return common


def one_per_cell(runs: Iterable["ArmRun"]) -> dict[tuple[str, int | None], "ArmRun"]:
    """Return the first run of each arm (variant) at each number of labels, as a dict with keys (arm, labels). `runs` are the
    runs that are tuned. Runs with the same key differ only in their seed, and all seeds get the same tuned settings, so one of
    them is enough.
    """
    first: dict[tuple[str, int | None], ArmRun] = {}
    for entry in runs:
        first.setdefault((entry.arm, entry.labels), entry)
    return first


def arm_ranges(runs: Sequence["ArmRun"]) -> dict[str, dict[str, Range]]:
    """Return which hyperparameters are tuned in each arm (variant), as a nested dict: `result[arm][name]` is the range of a
    hyperparameter. The dict of an arm without anything to tune is empty. `runs` are the runs that are tuned, and each of them
    has a `Tune` with the ranges.

    Raises ValueError for a name that no arm has.
    """
    tune = runs[0].tune
    first = {entry.arm: entry for entry in reversed(runs)}
    for arm, ranges in tune.own.items():
        check_option(arm, first, "own of Tune")
        for name in ranges:
            check_option(name, hyperparameters(first[arm].run), f"arm {arm!r}")
    found = {arm: ranges_of(entry, first.get(entry.baseline, entry)) for arm, entry in first.items()}
    known = sorted({name for entry in first.values() for name in hyperparameters(entry.run)})
    for name in tune.ranges:
        check_option(name, known, "this recipe")
    return found


def ranges_of(entry: "ArmRun", baseline: "ArmRun") -> dict[str, Range]:
    """Return which hyperparameters are tuned in one arm (variant), as a dict from name to range. `entry` is a run of this arm,
    and `baseline` is a run of its baseline. If the two differ only in hyperparameters that could be tuned, these are left out,
    because the comparison is about them.

    A run without training steps has none.
    """
    if not entry.run.steps:
        return {}
    own = entry.tune.own.get(entry.arm, {})
    mine = hyperparameters(entry.run)
    shared = {name: values for name, values in entry.tune.ranges.items() if name in mine and name not in own}
    if entry.role == "technique":
        theirs = hyperparameters(baseline.run)
        differing = {name: theirs[name] for name in shared if name in theirs and theirs[name] != mine[name]}
        if entry.run.vary(**differing).at_seed(0) == baseline.run.at_seed(0):
            shared = {name: values for name, values in shared.items() if name not in differing}
    return shared | own


def hyperparameters(run: Run) -> dict[str, Any]:
    """Return all hyperparameters of a run that may be tuned, as a dict from name to value: settings of the run, and options of
    its model and its optimizer.
    """
    of_parts = {name: p.default for part in (run.optimizer, run.model) for name, p in options(part).items()}
    return of_parts | {name: getattr(run, name) for name in TUNABLE}


# The file with the chosen values


@dataclass(frozen=True, kw_only=True)
class TunedArm:
    """The result of tuning one arm (variant) at one number of labels: the chosen values, all trials with their scores, and what
    the trials cost.

    arm, labels  the arm and the number of labelled images (None: all)
    fingerprint  the hash of the settings of the arm before tuning, with seed 0
    settings     the chosen values, from name to value; empty if there was nothing to tune
    accuracy     mean validation accuracy with the chosen values; None without trials
    edge         names of the hyperparameters whose chosen value lies at the edge of its range, or is the smallest or the
                 largest that was tried
    loss         expected loss of accuracy, as a fraction, because the trials are scored with noise; None if it is unknown
    cost         what all trials together took: numbers of different labelled images ("labels"), of images seen and of runs,
                 and seconds of training. Images and seconds of runs whose loss became infinite are not known and not counted
    trials       for each trial a dict with its "settings" and its "scores", one validation accuracy for each seed. A trial with
                 the settings of an earlier one, as in a range with few values, was not trained and has no scores
    note         why there are no trials
    """

    arm: str
    labels: int | None
    fingerprint: str
    settings: dict = field(default_factory=dict)
    accuracy: float | None = None
    edge: list = field(default_factory=list)
    loss: float | None = None
    cost: dict = field(default_factory=lambda: {"labels": 0, "images_seen": 0, "runs": 0, "seconds": 0.0})
    trials: list = field(default_factory=list)
    note: str = ""

    def tuning(self) -> dict[str, Any]:
        """Return how this arm (variant) was tuned, as a dict for the field `tuning` of the records (results of a run): the
        chosen values, the cost of the trials, and a list of all trials. An item of this list contains the settings, the mean
        validation accuracy and the number of seeds. If there were no trials, `note` says why.
        """
        tried = [(trial["settings"], trial["scores"]) for trial in self.trials if trial["scores"]]
        return {
            "settings": self.settings,
            "trials": len(self.trials),
            **{name: self.cost[name] for name in ("labels", "images_seen", "seconds")},
            "loss": self.loss,
            "edge": self.edge,
            "curve": [[settings, sum(scores) / len(scores), len(scores)] for settings, scores in tried if None not in scores],
        } | ({"note": self.note} if self.note else {})


def is_extreme(value: Any, tried: Iterable[Any]) -> bool:
    """Return whether `value` is the smallest or the largest of the numbers in `tried`. With fewer than three different numbers
    the result is False, because there is no value between them. What is not a number is left out.
    """
    numbers = {one for one in tried if type(one) in (int, float)}
    return len(numbers) >= 3 and value in (min(numbers), max(numbers))


def tuned_file(recipe: str | Path) -> Path:
    """Return the path of the file with the chosen values of a recipe: `R.tuned.json` beside the recipe file `R.py`."""
    return Path(recipe).with_suffix(".tuned.json")


def tune_command(path: Path) -> str:
    """Return the command that writes the file `R.tuned.json` at `path` anew, such as `smallvit tune R.py`."""
    return f"smallvit tune {shlex.quote(str(path.with_name(path.name.removesuffix('.tuned.json') + '.py')))}"


def write(path: Path, tune: Tune, arms: Sequence[TunedArm]):
    """Write the chosen values of all arms (variants) to the file `R.tuned.json`. `tune` holds the ranges and the number of
    trials.
    """
    plain = {"format": FORMAT, **tune.plain(), "arms": [asdict(arm) for arm in arms]}
    text = json.dumps(plain, indent=1, allow_nan=False, ensure_ascii=False)
    for inside in (r"[^\[\]{}]*", r"\n[^\n]*\n[^\n]*\n\s*"):  # innermost lists and dicts, and then trials, in one line each
        text = re.sub(rf"[\[{{]{inside}[\]}}]", lambda found: re.sub(r"\n\s*", " ", found[0]), text)
    write_text(path, text + "\n")


def read(path: Path) -> tuple[dict[str, Any], list[TunedArm]]:
    """Read the file `R.tuned.json` at `path`. Return a dict and a list. The dict holds the options with which the file was
    made, such as the ranges and the number of trials. The list holds one `TunedArm` (chosen values and trials) for each arm
    (variant) and number of labels.

    Raises ValueError, with the name of the file, if it is damaged or was written by another version.
    """
    command = f"delete it and run {tune_command(path)} again"
    try:
        plain = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged or is not JSON ({error}); {command}") from error
    if not isinstance(plain, dict) or plain.get("format") != FORMAT:
        found = plain.get("format") if isinstance(plain, dict) else None
        raise ValueError(f"{path} has format {found!r:.20}, and this version of smallvit reads format {FORMAT}; {command}")
    arms = plain.pop("arms", None)
    names = {f.name for f in fields(TunedArm)}
    if not isinstance(arms, list) or not all(isinstance(arm, dict) and arm.keys() == names for arm in arms):
        raise ValueError(f"{path} is not a list of tuned arms as smallvit wrote it; {command}")
    tuned = [TunedArm(**arm) for arm in arms]
    for arm in tuned:
        if problem := damage(arm):
            raise ValueError(f"{path}, arm {arm.arm!r}: {problem}; {command}")
    return {name: value for name, value in plain.items() if name != "format"}, tuned


def damage(arm: TunedArm) -> str:
    """Return what is wrong with the result of tuning one arm (variant), as text, such as a field of another type, a score above
    1, or chosen settings that are not those of the best trial. The text is empty if nothing is wrong. `arm` is this result, as
    it was read from a file.
    """
    types = {"arm": str, "labels": int | None, "settings": dict, "cost": dict, "trials": list, "fingerprint": str, "note": str}
    for name, expected in types.items():
        if not isinstance(getattr(arm, name), expected):
            return f"{name} is {getattr(arm, name)!r:.60}"
    if any(not isinstance(arm.cost.get(name), int | float) for name in ("labels", "images_seen", "runs", "seconds")):
        return f"cost is {arm.cost!r:.120}"
    earlier = []  # settings
    for trial in arm.trials:
        settings, scores = (trial.get("settings"), trial.get("scores")) if isinstance(trial, dict) else (None, None)
        if not isinstance(settings, dict) or not isinstance(scores, list) or not (scores or settings in earlier):
            return f"a trial is {trial!r:.60}"
        earlier.append(settings)
        if any(not (s is None or (isinstance(s, int | float) and 0 <= s <= 1)) for s in scores):
            return f"the scores of a trial are {scores!r:.60}"
    if wrong := shape_problem(arm.tuning(), SHAPES["tuning"], "tuning"):
        return wrong
    if not arm.trials:
        return f"the chosen settings {arm.settings} have no trials" if arm.settings else ""
    if arm.settings not in [trial["settings"] for trial in arm.trials]:
        return f"the chosen settings {arm.settings} are those of no trial"
    scores = [trial["scores"] for trial in arm.trials]
    (best,) = best_trials(scores, 1)
    if arm.settings != arm.trials[best]["settings"]:
        return f"the chosen settings {arm.settings} are not those of the best trial, {arm.trials[best]['settings']}"
    if arm.accuracy != round(mean(scores[best]), 6):
        return f"accuracy is {arm.accuracy!r:.60}, but the mean of the scores of the best trial is {mean(scores[best]):.6g}"
    return ""


def best_trials(scores: Sequence[Sequence[float | None]], count: int) -> list[int]:
    """Return the positions of the `count` best trials (settings to try) of an arm (variant), best first. `scores` has for each
    trial the list of its validation accuracies, one for each seed. The best trial has the largest mean; of equal trials the
    earlier one comes first. Trials with fewer seeds than others are left out.
    """
    most = max(map(len, scores))
    trained = [index for index, values in enumerate(scores) if len(values) == most]
    return sorted(trained, key=lambda index: (-mean(scores[index]), index))[:count]


def mean(scores: Sequence[float | None]) -> float:
    """Return the mean of the validation accuracies of a trial (settings to try). `scores` has one accuracy for each seed, or
    None where the loss became infinite; the mean is then minus infinity. The mean of an empty list is 0.
    """
    known = [score for score in scores if score is not None]
    return fmean(known or [0.0]) if len(known) == len(scores) else float("-inf")


def same_options(plain: dict[str, Any], tune: Tune | None) -> bool:
    """Return whether a file with tuned settings was made with the same options (ranges, number of trials and so on) as the
    recipe has now. `plain` are the options in the file as JSON data, and `tune` is the `Tune` object of the recipe.
    """
    return tune is not None and plain == json.loads(json.dumps(tune.plain()))


def with_tuned(runs: Sequence["ArmRun"], recipe: str | Path, old_options: bool = False) -> list["ArmRun"]:
    """Return the runs of a comparison, followed by copies with tuned settings if the file `R.tuned.json` lies beside the recipe
    file. With `Tune(common=False)` a copy takes the place of its run. `runs` are the runs without tuning, and `recipe` is the
    path of the recipe file. Raises ValueError if the file is damaged or does not fit the recipe; see `apply`, also for
    `old_options`.

    Arms (variants) that have not been tuned yet at some number of labels have no copy there: see `untuned_cells`.
    """
    path = tuned_file(recipe)
    if not path.exists():
        return list(runs)
    copies = apply(runs, path, old_options)
    instead = {(entry.arm, entry.labels, entry.seed): entry for entry in copies if entry.tune and not entry.tune.common}
    found = [instead.pop((entry.arm, entry.labels, entry.seed), entry) for entry in runs]
    return [*found, *(entry for entry in copies if entry.tune is None or entry.tune.common)]


def untuned_cells(runs: Iterable["ArmRun"]) -> list[tuple[str, int | None]]:
    """Return the arms (variants) of a recipe that have not been tuned yet, as a list of pairs (arm, number of labels). `runs`
    are all runs of the recipe, with the tuned ones. Arms for which the recipe does not ask for tuning are left out.
    """
    asked = [entry for entry in runs if entry.tune is not None]
    tuned = one_per_cell(entry for entry in asked if entry.tuning is not None)
    return [cell for cell in one_per_cell(longest(asked)) if cell not in tuned]


def apply(runs: Sequence["ArmRun"], path: str | Path, old_options: bool = False) -> list["ArmRun"]:
    """Return a tuned copy of each run of a comparison, at the longest training length, with the settings that the file
    `R.tuned.json` gives. `runs` are the untuned runs, and `path` is the path of this file.

    The copies have the field `tuning`, with the chosen values and the cost of the trials. An arm (variant) with nothing to tune
    has a copy with unchanged settings and 0 trials. An arm that the file lacks at some number of labels, because
    `smallvit tune R --only ...` tuned others, has no copy there.

    Raises ValueError if the file is damaged, if a setting, a range or an arm has changed since it was written, and if two arms
    have equal settings after tuning. With `old_options=True`, ranges and other options of `Tune` may have changed.
    """
    path = Path(path)
    again = f"run {tune_command(path)} again"
    plain, arms = read(path)
    common = runs_to_tune(runs)
    if not old_options and not same_options(plain, common[0].tune):
        raise ValueError(f"{path.name} was made with other options of Tune than the recipe has now; {again}")
    chosen = {(arm.arm, arm.labels): arm for arm in arms}
    fingerprints: dict[str, str] = {}
    for (arm, labels), entry in one_per_cell(common).items():
        found, place = chosen.get((arm, labels)), f"arm {arm!r} at {format_labels(labels)}"
        if found is None:
            continue
        if found.fingerprint != fingerprint(entry.run.at_seed(0)):
            raise ValueError(f"{path.name}: the settings of {place} have changed since it was tuned; {again}")
        other = fingerprints.setdefault(fingerprint(entry.run.vary(**found.settings).at_seed(0)), arm)
        if other != arm:
            raise ValueError(
                f"{path.name}: {other!r} and {arm!r} have equal settings after tuning; fix what they differ in, for example "
                f"with Tune(..., own={{{arm!r}: {{'depth': [4]}}}}), and {again}"
            )
    copies = []
    for entry in common:
        if found := chosen.get((entry.arm, entry.labels)):
            copies.append(replace(entry, run=entry.run.vary(**found.settings), tuning=found.tuning()))
    return copies
