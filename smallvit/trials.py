"""Trials: the file `R.trials.jsonl`, which lists the settings of each arm that `smallvit explore R` has tried."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smallvit.shapes import shape_problem
from smallvit.storage import locked, parse_json, write_text

if TYPE_CHECKING:
    from smallvit.ablation import ArmRun

TRIAL = {"arm": "text", "labels": "count?", "fingerprint": "text", "seeds": "count", "val": "number", ...: "any"}


def trials_file(recipe: str | Path) -> Path:
    """Return the path of the file that lists the trials of a recipe. A trial is one choice of settings of an arm (variant in
    the comparison) that was scored on validation images. `recipe` is the path of the recipe file; the list lies beside it.
    """
    return Path(recipe).with_suffix(".trials.jsonl")


def trials(recipe: str | Path, folder: str | Path | None = None, runs: Sequence["ArmRun"] = ()) -> dict[str, int]:
    """Return how many settings of each arm (variant in the comparison) have been tried on validation images, as a dict from the
    name of the arm to this number. `recipe` is the path of the recipe file; the list of tried settings lies beside it. `folder`
    is a second folder in which the list may lie: the folder of the recipe's runs. `runs` are all runs of the recipe: an arm
    that was renamed after its present settings had been tried keeps its trials.

    They are the trials of `smallvit explore` and those of `smallvit tune`. The list lies in `folder` if the folder of the
    recipe file cannot be written. Different numbers of labels, training lengths and options count as different settings; seeds
    do not.

    Raises ValueError if a file is damaged.
    """
    from smallvit.recipe import by_settings
    from smallvit.tuning import read, tuned_file

    places = [trials_file(recipe), *([Path(folder) / trials_file(recipe).name] if folder else [])]
    found: set[tuple[str, str]] = {(trial["arm"], trial["fingerprint"]) for path in places for trial in read_trials(path)}
    arms, current = {entry.arm for entry in runs}, by_settings(runs, [0]) if found else {}
    renamed = {arm: current[settings][0].arm for arm, settings in sorted(found) if arm not in arms and settings in current}
    counts = Counter(arm for arm, _ in sorted({(renamed.get(arm, arm), settings) for arm, settings in found}))
    if tuned_file(recipe).exists():
        for tuned in read(tuned_file(recipe))[1]:
            counts[tuned.arm] += len(tuned.trials)
    return {arm: count for arm, count in counts.items() if count}


def read_trials(path: Path) -> list[dict[str, Any]]:
    """Return the trials in the file `path` as a list of dicts, one for each line of the file. A trial is one choice of settings
    of an arm (variant in the comparison) with its mean score on validation images. The list is empty if there is no file.
    Raises ValueError if a line is damaged.
    """
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            trial = parse_json(line)
        except ValueError as error:  # also bytes that are no text
            raise ValueError(f"{path}, line {number} is not JSON ({error}); restore it, so that all trials count") from error
        if wrong := shape_problem(trial, TRIAL, "it"):
            raise ValueError(f"{path}, line {number} is no trial ({wrong}); restore it, as smallvit explore wrote it")
        found.append(trial)
    return found


def add_trial(path: Path, trial: Mapping[str, Any]) -> bool:
    """Append a trial to the file `path`, unless the file has this trial already. Return whether it was appended. A trial is one
    choice of settings that was scored on validation images. `trial` is a dict with these keys: `arm` (the variant), `labels`
    (number of labelled images), `fingerprint` (hash of the settings), `seeds` (their number) and `val` (the mean score).

    A trial is in the file already if a line has the same arm and fingerprint, and at least as many seeds. Several processes may
    add trials at once: a lock file beside `path` lets one in at a time.

    Raises ValueError if the file is damaged or cannot be written.
    """
    with locked(path.with_name(f".{path.name}.lock"), timeout=-1):
        known = read_trials(path)
        same = [each for each in known if all(each[name] == trial[name] for name in ("arm", "fingerprint"))]
        if any(each["seeds"] >= trial["seeds"] for each in same):
            return False
        write_text(path, "".join(json.dumps(each) + "\n" for each in [*known, dict(trial)]))
    return True
