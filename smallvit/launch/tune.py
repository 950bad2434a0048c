"""Equal tuning: the loop over the trials of all arms, which `smallvit tune` runs.

Every arm (variant) gets the same trials. They are compared by successive halving over seeds: all trials are trained with one
seed, the better half with two seeds, the better quarter with four, and so on; the last two get all seeds. With 8 trials and 4
seeds these are 16 runs in place of 32. Each stage waits until all its runs have ended, so the choice depends neither on the
number of workers nor on a kill. Optuna's own `SuccessiveHalvingPruner` compares a trial with those that happened to end before
it, so its choice would depend on the order in which runs end; therefore only the states that follow are reported to Optuna.
"""

import functools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from smallvit.ablation import ArmRun
from smallvit.data import Dataset
from smallvit.record import Record, format_labels
from smallvit.run import Run, describe, fingerprint
from smallvit.storage import locked, rename_damaged
from smallvit.tuning import (
    FIRST_SEED,
    Range,
    Tune,
    TunedArm,
    arm_ranges,
    best_trials,
    hyperparameters,
    is_extreme,
    mean,
    one_per_cell,
    runs_to_tune,
)
from smallvit.words import how_many

from .launcher import launch
from .scheduler import unavailable_weights
from .suggest import at_edge, is_logarithmic, suggestions

HALVING = 1.16  # loss by halving, divided by the loss if all trials had all seeds: 0.50 / 0.43, the largest of a simulation


@dataclass(eq=False)
class Candidates:
    """All trials of one arm (variant) at one number of labels: their settings, and their scores so far.

    entry     a run of the arm
    ranges    the hyperparameters to tune
    settings  the values of each trial
    runs      the run of each trial, for any seed
    scores    for each trial its validation accuracies, one for each seed; None for a run whose loss became infinite
    records   the records (results) of all runs of these trials, by fingerprint
    trials    the trials in Optuna's study, if Optuna is installed
    """

    entry: ArmRun
    ranges: dict[str, Range]
    settings: list[dict]
    runs: list[Run]
    scores: list[list[float | None]]
    records: dict[str, Record] = field(default_factory=dict)
    trials: list[Any] = field(default_factory=list)

    @property
    def place(self) -> str:
        """The name of the arm and its number of labels, as text."""
        return f"{self.entry.arm}, {format_labels(self.entry.labels)}"

    @property
    def different(self) -> int:
        """The number of trials with different settings. A range with few values has fewer of them than trials."""
        return len({repr(values) for values in self.settings})

    def best(self, count: int) -> list[int]:
        """Return the positions of the `count` best trials (settings to try) of this arm, best first. The best trial has the
        largest mean validation accuracy; of equal trials the earlier one comes first. Trials that were stopped at fewer seeds
        than the others are left out, and so are trials with the settings of an earlier one: a range with few values has such.
        """
        first = {repr(values): index for index, values in reversed([*enumerate(self.settings)])}
        ranked = best_trials(self.scores, len(self.scores))
        return [index for index in ranked if first[repr(self.settings[index])] == index][:count]


def stages(trials: int, seeds: int) -> list[tuple[int, int]]:
    """Return the stages of successive halving, which trains fewer and fewer trials (settings to try) with more and more seeds.
    The result is a list of pairs: the number of trials that are left, and the number of seeds of each. `trials` is the number
    of trials in the first stage, and `seeds` the number of seeds in the last stage.
    """
    found = [(trials, 1)]
    while found[-1][1] < seeds:
        left, used = found[-1]
        found.append((max(2, -(-left // 2)), min(2 * used, seeds)))
    return found


def run_count(tune: Tune, different: int | None = None) -> int:
    """Return the number of runs that are trained to tune one arm (variant) at one number of labels. `tune` is the `Tune` object
    of the recipe: ranges, number of trials and seeds. Only the better trials are trained with all seeds. `different` is the
    number of trials with different settings; None: all of them. Trials with the settings of an earlier one are not trained.
    """
    most, steps = different or tune.trials, stages(tune.trials, tune.seeds)
    earlier = [0, *(used for _, used in steps)]
    return sum(min(left, most) * (used - before) for (left, used), before in zip(steps, earlier))


def candidates(runs: Sequence[ArmRun], selected: Iterable[tuple[str, int | None]]) -> tuple[list[Candidates], list[TunedArm]]:
    """Return the trials (settings to try) of the selected arms (variants) as a list of `Candidates`, and the arms that cannot
    be tuned as a list of `TunedArm`, each with the reason. `runs` are all runs of the comparison. `selected` are pairs of an
    arm and a number of labels.

    Arms without training steps or without a hyperparameter to tune have no trials, and neither have arms whose pretrained
    weights are unavailable.

    Raises ValueError for wrong ranges, and if the data set has too few validation images.
    """
    common = runs_to_tune(runs)
    ranges, cells = arm_ranges(common), one_per_cell(common)
    entries = [cells[cell] for cell in cells if cell in set(selected)]
    unavailable = unavailable_weights(entry.run for entry in entries if ranges[entry.arm])
    found, left_out = [], []
    for entry in entries:
        run, tune = entry.run.at_seed(FIRST_SEED), entry.tune
        note = f"left as it is: {unavailable[run.init]}" if run.init in unavailable else ""
        note = note if ranges[entry.arm] else "nothing to tune"
        if note:
            left_out.append(TunedArm(arm=entry.arm, labels=entry.labels, fingerprint=fingerprint(run.at_seed(0)), note=note))
            continue
        check_validation_images(run, tune)
        settings = suggestions(tune, ranges[entry.arm], hyperparameters(run))
        short = max(1, round(run.steps * tune.steps))
        trials = [with_validation(run.vary(**values, steps=short), tune.val) for values in settings]
        found.append(Candidates(entry, ranges[entry.arm], settings, trials, [[] for _ in settings]))
    return found, left_out


def with_validation(run: Run, val: int) -> Run:
    """Return a run with `val` validation images. The earlier runs that it needs on the same data set, such as pretraining, get
    at least as many. So no validation image of the run is a training image of an earlier run.
    """
    earlier = {
        name: with_validation(other, max(val, other.val or 0))
        for name, other in run.dependencies.items()
        if describe(other.data) == describe(run.data)
    }
    return replace(run, val=val, **earlier)


def check_validation_images(run: Run, tune: Tune):
    """Raise ValueError if the data set of a run has too few validation images for tuning. `run` is the run. `tune` is the
    `Tune` object of the recipe: ranges, number of trials, seeds and validation images. The error message says how many
    validation images are possible.
    """

    def possible(val: int) -> bool:
        with suppress(ValueError):
            return bool(trial_images(run.data, run.labels, val, tune.seeds))
        return False

    if possible(tune.val):
        return
    data = run.data()
    low, high = 0, min(tune.val, len(data.train if data.val is None else data.val))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if possible(middle) else (low, middle - 1)
    raise ValueError(
        f"Tune has val={tune.val}, but {data.spec.name} has at most {low} validation images besides "
        f"{format_labels(run.labels)}; set val={low} or less"
    )


@functools.cache
def trial_images(load: Callable[[], Dataset], labels: int | None, val: int, seeds: int) -> list[tuple[Tensor, Tensor]]:
    """Return which images the trials use, as a list with one pair for each seed: the positions of the labelled training images
    and those of the validation images. The function `load` loads the data set. `labels` and `val` are the numbers of labelled
    and of validation images (`labels=None`: all), and `seeds` is the number of seeds.

    Raises ValueError if the data set has too few images.
    """
    subsets = (load().subset(labels=labels, val=val, seed=seed) for seed in range(FIRST_SEED, FIRST_SEED + seeds))
    return [(subset.index, subset.val_index) for subset in subsets]


# Trials


def tune_arms(
    todo: Sequence[Candidates],
    out: str | Path,
    *,
    recipe: str,
    source: str | Path | None = None,
    jobs: int | None = None,
    show: Callable[[Record], None] | None = None,
    **options: Any,
) -> list[TunedArm]:
    """Train the trials (settings to try) of several arms (variants), and return the chosen settings of each as a list of
    `TunedArm`. `todo` is a list of `Candidates`, one for each arm and number of labels, as `candidates` returns them. The runs
    lie in the folder `out/tuning/recipe`. `source` is the recipe file, `jobs` the number of worker processes, and `show` is
    called with each new record. The `options` are `stack`, `device` and `numerics`; see `launch`.

    Runs that have finished in this folder are not trained again.

    If Optuna is installed, the trials are also written to a file of Optuna, `journal.log` in this folder, with one study for
    each arm and number of labels. The test images are not read.

    Raises   ValueError if a run fails for another reason than an infinite loss, if all trials of an arm have an infinite loss,
             and if another process tunes this recipe.
    """
    folder = Path(out, "tuning")
    options |= {"recipe": recipe, "source": source, "jobs": jobs, "show": show}
    with open_journal(folder / recipe) as storage:
        for arm in todo:
            arm.trials = new_study(storage, arm)
        for left, seeds in stages(todo[0].entry.tune.trials, todo[0].entry.tune.seeds) if todo else ():
            alive = [(arm, arm.best(left)) for arm in todo]
            train(alive, range(FIRST_SEED, FIRST_SEED + seeds), folder, options)
            for arm, trained in alive:
                report_trials(arm, trained, seeds)
        for arm in todo:
            close_study(arm)
    return [result(arm) for arm in todo]


def train(alive: Sequence[tuple[Candidates, list[int]]], seeds: range, out: Path, options: dict[str, Any]):
    """Train trials (settings to try) of several arms (variants), and store their validation accuracies in the `Candidates`
    objects. `alive` has pairs: the `Candidates` object of an arm, and the positions of the trials to train. `seeds` are the
    random seeds of each trial, `out` is the results folder, and `options` go to `launch`.

    If trials of different arms have equal settings, their runs are trained once.
    """
    runs: dict[str, ArmRun] = {}
    for arm, trained in alive:
        for index in trained:
            for seed in seeds:
                run = arm.runs[index].at_seed(seed)
                runs.setdefault(fingerprint(run), replace(arm.entry, run=run, length=arm.entry.length and run.steps))
    records = launch(list(runs.values()), out, validation_only=True, curves=False, retry=may_succeed, **options)
    found = {record.fingerprint: record for record in records}
    if missing := len(runs) - len(found):
        trials_are = how_many(missing, "trial is", "trials are")
        raise ValueError(f"{trials_are} being trained by another process; start the command again when it has ended")
    failed = [record for record in records if not record.finished and may_succeed(record)]
    if failed:
        raise ValueError(
            f"{how_many(len(failed), 'trial')} failed; the first is of {failed[0].arm!r}: {failed[0].error}; correct the "
            "cause, and start the command again"
        )
    for arm, trained in alive:
        for index in trained:
            mine = [found[fingerprint(arm.runs[index].at_seed(seed))] for seed in seeds]
            arm.scores[index] = [record.val_result if record.finished else None for record in mine]
            arm.records |= {record.fingerprint: record for record in mine}
        if all(None in arm.scores[index] for index in trained):
            raise ValueError(f"all trials of {arm.place} had an infinite loss; lower the learning rates")


def may_succeed(record: Record) -> bool:
    """Return whether a failed run is worth another attempt. With an infinite loss it is not: it would fail in the same way.
    `record` holds its results.
    """
    return not str(record.error).startswith("FloatingPointError")


def result(arm: Candidates) -> TunedArm:
    """Return the chosen settings of an arm (variant) as a `TunedArm` object, with all its trials and their cost. `arm` is the
    `Candidates` object of the arm, which has its trials and their validation accuracies. Of the trials with all seeds, the one
    with the best mean accuracy is chosen.
    """
    (best,) = arm.best(1)
    tune, settings = arm.entry.tune, arm.settings[best]
    costs = {
        key: cost
        for record in arm.records.values()
        for key, cost in {
            **((record.pretraining or {}).get("runs") or {}),
            record.fingerprint: {"images_seen": record.images_seen, "seconds": record.seconds},
        }.items()
    }
    return TunedArm(
        arm=arm.entry.arm,
        labels=arm.entry.labels,
        fingerprint=fingerprint(arm.entry.run.at_seed(0)),
        settings=settings,
        accuracy=round(mean(arm.scores[best]), 6),
        edge=[
            name
            for name, value in settings.items()
            if at_edge(arm.ranges[name], value) or is_extreme(value, [tried.get(name) for tried in arm.settings])
        ],
        loss=expected_loss(arm),
        cost={
            "labels": label_count(arm.runs[0], tune),
            "images_seen": sum(cost["images_seen"] or 0 for cost in costs.values()),
            "runs": len(arm.records),
            "seconds": round(sum(cost["seconds"] or 0 for cost in costs.values()), 1),
        },
        trials=[{"settings": values, "scores": scores} for values, scores in zip(arm.settings, arm.scores)],
    )


def label_count(run: Run, tune: Tune) -> int:
    """Return how many different labelled images the trials of an arm (variant) use together, for training and for validation.
    `run` is the run of any trial, because all trials use the same images. `tune` is the `Tune` object of the recipe: ranges,
    number of trials, seeds and validation images.

    The images of all seeds are counted, each image once.
    """
    drawn = zip(*trial_images(run.data, run.labels, tune.val, tune.seeds))
    train, validation = ({i for one in indices for i in one.tolist()} for indices in drawn)
    return len(train | validation) if run.data().val is None else len(train) + len(validation)


def expected_loss(arm: Candidates) -> float | None:
    """Return how much of the score tuning is expected to lose, as a fraction, because noise in the scores can hide the best
    trial of an arm (variant). It is the expected difference between the best trial and the chosen one. `arm` is the
    `Candidates` object with the trials. Only those that were trained with all seeds are used.

    The result is None if it cannot be estimated: with a single seed, or if the records do not say what each image adds to the
    score.

    Departs  from the loss when all trials have all seeds: successive halving loses 1.16 times as much, which was simulated for
             8 trials and 4 seeds.
    """
    import numpy as np

    from smallvit.verdicts.statistics import tuning_loss

    run, tune = arm.runs[0], arm.entry.tune
    seeds, tables = range(FIRST_SEED, FIRST_SEED + tune.seeds), []
    for index in arm.best(tune.trials):
        values = [arm.records[fingerprint(arm.runs[index].at_seed(seed))].per_image for seed in seeds]
        if None not in arm.scores[index] and all(one is not None for one in values):
            tables.append(values)
    drawn = [validation.numpy() for _, validation in trial_images(run.data, run.labels, tune.val, tune.seeds)]
    pairs = [
        on_all_images([np.subtract(mine, its) for mine, its in zip(one, other)], drawn)
        for number, one in enumerate(tables)
        for other in tables[:number]
    ]
    return round(HALVING * tuning_loss(pairs), 6) if pairs and tune.seeds > 1 else None


def on_all_images(differences: Sequence[Any], drawn: Sequence[Any]) -> Any:
    """Fill a table of differences between two trials, so that seeds with different validation images can be compared. Return it
    with shape (seeds, all images). `differences` has an array for each seed, one number for each of its images: what the image
    adds to the score of the first trial minus what it adds to that of the second, for example 1 if only the first is right.
    `drawn` has the positions of each seed's images, whose number may differ. Other images get the seed's mean.

    All images are those that at least one seed has drawn. An image that a seed has not drawn gets the mean of the seed, and the
    deviations of the drawn images from this mean are multiplied by (all images) / (drawn images). The means over seeds and the
    covariances between them are then those of the drawn images, so the formulas for seeds that share all images can be used.
    """
    import numpy as np

    images = np.unique(np.concatenate(drawn))
    table = np.repeat([[one.mean()] for one in differences], len(images), axis=1)
    for row, one, positions in zip(table, differences, drawn):
        row[np.searchsorted(images, positions)] += (one - one.mean()) * len(images) / len(positions)
    return table


# Optuna's file of the trials


@contextmanager
def open_journal(folder: Path) -> Iterator[Any]:
    """Context manager that opens Optuna's file of the trials in `folder`, and yields it as an Optuna storage, or None if Optuna
    is not installed. The folder is locked, so that only one process tunes there. If an earlier process was killed while it
    wrote a line, this incomplete last line is removed. A file with another damaged line is renamed to `journal.log.damaged`:
    all results are in the records, from which the studies are written again.

    Raises ValueError if another process has locked the folder.
    """
    from filelock import Timeout

    path = folder / "journal.log"
    with ExitStack() as held:
        try:
            held.enter_context(locked(folder / ".lock"))
        except Timeout:
            reason = f"another process is tuning in {folder}; wait until it has ended, or choose another --out"
            raise ValueError(reason) from None
        if find_spec("optuna") is None:
            yield None
            return
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

        def opened() -> JournalStorage:
            for line in path.read_bytes().splitlines() if path.exists() else ():
                json.loads(line)  # Optuna would notice a damaged last line only when another one follows it
            return JournalStorage(JournalFileBackend(str(path), lock_obj=JournalFileOpenLock(str(path))))

        if path.exists() and not (content := path.read_bytes()).endswith(b"\n"):
            path.write_bytes(content[: content.rfind(b"\n") + 1])
        Path(f"{path}.lock").unlink(missing_ok=True)  # left by a kill
        try:
            storage = opened()
        except OSError:
            raise
        except Exception:  # Optuna has no class of its own for a damaged file
            rename_damaged(path)
            print(f"note: {path} is damaged; renamed to *.damaged, and written again from the records", file=sys.stderr)
            storage = opened()
        yield storage


def new_study(storage: Any, arm: Candidates) -> list[Any]:
    """Create the Optuna study of one arm (variant) at one number of labels, and return its Optuna trials. `storage` is the
    Optuna storage, and `arm` is the `Candidates` object with the settings to try. An earlier study of the same name is deleted;
    no result is lost, because each finished run has a record (saved results). Without a storage there are no Optuna trials.
    """
    if storage is None:
        return []
    import optuna
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    def distribution(values: Range) -> Any:
        if isinstance(values, list):
            return CategoricalDistribution(values)
        kind = IntDistribution if all(isinstance(end, int) for end in values) else FloatDistribution
        return kind(*values, log=is_logarithmic(values))  # type: ignore[arg-type]

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with suppress(KeyError):
        optuna.delete_study(study_name=arm.place, storage=storage)
    study = optuna.create_study(study_name=arm.place, storage=storage, direction="maximize", pruner=optuna.pruners.NopPruner())
    for settings in arm.settings:
        study.enqueue_trial(settings)
    space = {name: distribution(values) for name, values in arm.ranges.items()}
    return [study.ask(space) for _ in arm.settings]


def report_trials(arm: Candidates, trained: Sequence[int], seeds: int):
    """Report mean validation accuracies to Optuna. `arm` is the `Candidates` object with all trials of an arm (variant),
    `trained` are the positions of the trials that were just trained, and `seeds` is their number of seeds, which Optuna gets as
    the step number. All other trials that are not yet closed are marked as pruned.

    Trials whose loss became infinite are not reported, and are marked as failed instead of pruned.
    """
    if not arm.trials:
        return
    import optuna

    for index, trial in enumerate(arm.trials):
        if index in trained and None not in arm.scores[index]:
            trial.report(mean(arm.scores[index]), step=seeds)
        elif index not in trained and not is_closed(trial):
            state = optuna.trial.TrialState
            trial.study.tell(trial, state=state.FAIL if None in arm.scores[index] else state.PRUNED)


def close_study(arm: Candidates):
    """Mark the trials that were trained with all seeds as complete in Optuna, or as failed if their loss was infinite."""
    if not arm.trials:
        return
    import optuna

    for index, trial in enumerate(arm.trials):
        if not is_closed(trial):
            if None in arm.scores[index]:
                trial.study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                trial.study.tell(trial, mean(arm.scores[index]))


def is_closed(trial: Any) -> bool:
    """Return whether an Optuna trial is complete, pruned or failed."""
    return trial.study.trials[trial.number].state.is_finished()
