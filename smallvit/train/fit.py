"""`fit(run, folder)` trains and evaluates a run and writes its record. It can be killed at any moment and continued later."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from torch import nn

from smallvit import record as records
from smallvit.components import function
from smallvit.data import Dataset, DataSpec, HeldOut, Images, Subset, sealed_test_images
from smallvit.evaluate import PerImage, Splits, cached_features, declaration
from smallvit.flops import reduces
from smallvit.numerics import DEFAULT, Numerics
from smallvit.record import Record
from smallvit.run import Run, describe, fingerprint

from .loop import Training, Watch, train
from .stack import NotStackable, Stack
from .test_reads import log_test_read
from .trained_model import save_weights


class Tags(NamedTuple):
    """The place of a run in a comparison: the recipe file, the arm (one variant in the comparison), its role (such as
    "baseline" or "technique"), its baseline, and the condition. They do not change the training.

    The record of the run contains them; its fields `length`, `tuning` and `looks` explain the last three.
    """

    recipe: str = ""
    arm: str = "run"
    role: str = "technique"
    baseline: str = ""
    length: int | None = None
    tuning: dict | None = None
    looks: list[int] | None = None


NO_TAGS = Tags()


def fit(
    run: Run,
    folder: str | Path,
    *,
    tags: Tags = NO_TAGS,
    device: str = "cpu",
    watch: Watch = lambda step, accuracy: None,
    init: str | Path | None = None,
    teacher: str | Path | None = None,
    numerics: Numerics = DEFAULT,
    validation_only: bool = False,
    reads: str | Path | None = None,
) -> Record:
    """Train and evaluate a run, and return its record (settings, results and costs). The record and the trained weights are
    also saved in `folder`.

    A run that has finished in this folder is not trained again. A run that was interrupted continues from its checkpoint and
    ends with bitwise the same weights as an uninterrupted one (on the same machine, with the same number of threads).

    tags       the names of recipe, arm, role and baseline in the record
    device     "cpu", "cuda", "mps" or "auto"
    watch      called after each step with the step and, at the 12 checks, the validation accuracy (otherwise None)
    init       the folder of the finished run that `run.init` names; None trains that run first, in `folder/init`
    teacher    the same for `run.teacher`
    numerics   precision, attention kernel and compilation; a resumed run keeps those it began with
    validation_only  True: score the run on the validation images only, for tuning and exploring. `test` of the record is then
               None. Earlier runs that must be trained first are scored in the same way.
    reads      path of a file to which each read of the test images is appended. The record then says how many settings of this
               arm have been scored on these test images (`test_settings`).

    Raises     ValueError for settings that do not fit the data, for a folder that holds another run, for a full disk, and if
               anything but the final scoring of a run reads the test images; FloatingPointError if the loss is not finite;
               filelock.Timeout if another process trains this run.
    """
    if done := finished_record(run, Path(folder), validation_only):
        return done
    options = numerics, validation_only, reads
    with prepare_training(run, Path(folder), tags, device, init, teacher, *options) as (training, close):
        if training is not None:
            train([training], training.train_step, watch)
        return close()


def fit_stacked(
    runs: Sequence[Run],
    folders: Sequence[Path],
    *,
    tags: Sequence[Tags] = (),
    device: str = "cpu",
    watch: Watch = lambda step, accuracy: None,
    dependencies: Sequence[dict[str, Path]] = (),
    numerics: Numerics = DEFAULT,
    validation_only: bool = False,
    reads: str | Path | None = None,
) -> list[Record]:
    """Train several runs that differ only in their seed at the same time, as one model. Return the list of their records
    (settings, results and costs). Each run has its own folder in `folders`.

    The tensors of this model have an additional first axis, the run.

    The weights agree with those of `fit` up to rounding, and each record says how many runs were stacked. Runs that cannot be
    stacked, or that resume from different steps, are trained one after another. `dependencies` are the folders of the runs that
    each run depends on, by field ("init", "teacher"); see `fit` for the other parameters.
    """
    tags, dependencies = tags or [NO_TAGS] * len(runs), dependencies or [{}] * len(runs)
    options = numerics, validation_only, reads
    with ExitStack() as stack:
        opened_runs = [
            stack.enter_context(
                prepare_training(run, Path(folder), tag, device, places.get("init"), places.get("teacher"), *options)
            )
            for run, folder, tag, places in zip(runs, folders, tags, dependencies)
        ]
        members = [training for training, _ in opened_runs if training is not None]
        with suppress(NotStackable):
            if len(members) > 1:
                train(members, Stack(members).train_step, watch)
        for member in members:
            train([member], member.train_step, watch)  # returns at once for runs that the stack has finished
        return [close() for _, close in opened_runs]


@contextmanager
def prepare_training(
    run: Run,
    folder: Path,
    tags: Tags,
    device: str,
    init: str | Path | None,
    teacher: str | Path | None,
    numerics: Numerics = DEFAULT,
    validation_only: bool = False,
    reads: str | Path | None = None,
) -> Iterator[tuple[Training | None, Callable[[], Record]]]:
    """Context manager that prepares the training of a run in `folder` and locks this folder. Earlier runs that the run needs,
    such as pretraining, are trained first. If there is a checkpoint, the training resumes from it.

    The parameters are those of `fit`.

    Yields the training (None if the run has already finished) and a function `close()` that evaluates the trained model, writes
    the record and returns it.
    """
    from filelock import FileLock

    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / records.CHECKPOINT
    reason = "this run is scored on validation images only" if validation_only else "a run reads them only when it is scored"
    with FileLock(folder / ".lock", timeout=0), sealed_test_images(reason):
        if done := finished_record(run, folder, validation_only):
            yield None, lambda: done
            return
        for unfinished in folder.glob(".*.new"):  # left by a kill during writing
            unfinished.unlink()
        places: dict[str, Path] = {}
        trained: list[Record] = []
        for field, place in (("init", init), ("teacher", teacher)):
            if field in run.dependencies:
                places[field] = Path(place or folder / field)
                dependency_tags = Tags(tags.recipe, f"{field} of {tags.arm}", "dependency", tags.baseline)
                options = {"numerics": numerics, "validation_only": validation_only, "reads": reads}
                trained.append(fit(run.dependencies[field], places[field], tags=dependency_tags, device=device, **options))
            elif place is not None:
                raise ValueError(f"got the folder {str(place)!r} for {field}, but the run has none; expected a run in {field}=")
        record = new_record(run, tags)  # first, so that it names the code that is running
        data, subset = load_data(run)
        check_evaluation(run, subset)
        if validation_only and not len(subset.val):
            raise ValueError(f"val={run.val} leaves no validation images to score a validation-only run on; set val > 0")
        training = Training(run, data, subset, device, places.get("init"), places.get("teacher"), numerics)
        training.resume(checkpoint, "".join([records.code()["sha256"], data.sha256, *training.init_hashes]))

        def close() -> Record:
            test = None if validation_only else data.test
            settings = log_test_read(Path(reads), run, tags.arm, data.test.sha256) if test is not None and reads else None
            done = replace(
                record,
                **training.facts(),
                **evaluate(run, training.model, subset, test),
                test_settings=settings,
                pretraining=pretraining_cost(list(run.dependencies.values()), trained) if trained else None,
                picture=reduction_picture(training.model, subset),
                subset_sha256=subset.sha256,
                drawn_share=drawn_share(run, data, subset),
                data_sha256=data.sha256,
                test_repeats=None if validation_only else data.repeats,
                **save_weights(folder / records.WEIGHTS, training.model, run, data.spec),
                status="finished",
            )
            records.write_record(folder, done)
            checkpoint.unlink(missing_ok=True)
            return done

        yield training, close


def load_data(run: Run) -> tuple[Dataset, Subset]:
    """Return the data set of a run and a `Subset` with the training and validation images of the run. Raises ValueError if the
    data set contains digits and a transform would change them, such as a flip.
    """
    data = run.data()
    check_transforms(run, data.spec)
    return data, data.subset(labels=run.labels, val=run.val, seed=run.seed)


def drawn_share(run: Run, data: Dataset, subset: Subset) -> float:
    """Return the share of the training images of a class that the run uses as labelled images. The classes may differ; the
    largest share is returned. It is 1 if the run uses all images (`labels=None`).

    The labelled images of two seeds overlap by this share, so results over seeds vary less than over new images.
    """
    if run.labels is None:
        return 1.0
    drawn, all_images = (images.labels.bincount(minlength=len(data.spec.classes)) for images in (subset.train, data.train))
    return (drawn / all_images.clamp(min=1).double()).max().item()


def check_transforms(run: Run, spec: DataSpec):
    """Raise ValueError if the data set contains digits and a transform of the run would change one digit to another, such as a
    flip. `spec` describes the data set.
    """
    for transform in run.augment if spec.digits else ():
        reason = getattr(transform, "unsafe_for_digits", None)
        if reason:
            raise ValueError(
                f"{type(transform).__name__} on {spec.name}: {reason}; remove it from augment, or set force=True in it"
            )


def check_evaluation(run: Run, subset: Subset):
    """Raise ValueError if images are missing that the evaluation or early stopping of the run needs, such as validation images.
    `subset` holds the training and validation images. The check is made before training.
    """
    if run.early_stop and not len(subset.val):
        raise ValueError(f"early_stop={run.early_stop} needs validation images and there are none; set val > 0")
    for evaluator in run.evaluators:
        if needs := declaration(evaluator).needs:
            needs(Splits(subset.train, subset.val, subset.val), **getattr(evaluator, "keywords", {}))


def finished_record(run: Run, folder: Path, validation_only: bool = False) -> Record | None:
    """Return the record (settings, results and costs) of a run from its folder if the run has finished, otherwise None.
    `validation_only` says whether a record without test results is expected, or one with test results.

    Raises ValueError if the folder holds another run, a run that was scored on other images, or damaged files.
    """
    done = records.read_record(folder)
    if done is None:
        return None
    if done.fingerprint != fingerprint(run):
        raise ValueError(f"{folder} holds run {done.fingerprint}, not {fingerprint(run)}; use another folder for each run")
    if done.finished and (problem := records.damaged_weights(folder, done)):
        raise ValueError(f"{problem}; delete the folder and train the run again")
    if done.finished and (done.test is None) != validation_only:
        found, expected = ("validation", "test") if done.test is None else ("test", "validation")
        raise ValueError(
            f"{folder} holds this run scored on {found} images, and it is now to be scored on {expected} images; use another "
            "folder"
        )
    return done if done.finished else None


def reduction_picture(model: nn.Module, subset: Subset) -> dict | None:
    """Return the data of a picture that shows which patches of three images a token reduction merges or removes, as a dict.
    Return None if the model has no token reduction. `subset` holds the training and validation images.

    The images are validation images, or training images if there are no validation images.
    """
    from smallvit import explain

    if not reduces(model):
        return None
    shown = subset.val if len(subset.val) else subset.train
    try:
        return explain.token_map_data(model, shown.take(slice(3)))
    except ValueError as error:  # a reduction that cannot be traced must not fail the run
        return {"error": str(error)}


def evaluate(run: Run, model: nn.Module, subset: Subset, test: HeldOut | None) -> dict:
    """Measure a trained model with all evaluators of its run, on the validation images in `subset` and then on the test images
    in `test`. Return the results as a dict. If `test` is None, only the validation images are used.

    Returns fields of the record. Raises ValueError if two numbers have the same name, or if the first is not between 0 and 1.
    """
    probes: dict[str, None] = {}

    def measure(images: Images) -> tuple[dict[str, float], str | None]:
        splits, numbers, correct = Splits(subset.train, subset.val, images), {}, None
        for evaluator in run.evaluators if len(images) else ():
            title = function(evaluator).__name__
            for name, value in evaluator(model, splits):
                if name in numbers:
                    raise ValueError(f"{title} reports {name!r}, as another evaluator does; expected another name")
                if not numbers and not 0 <= value <= 1:
                    raise ValueError(f"{title} reports {name}={value:.4g} first; expected a number from 0 to 1 to judge it")
                if not numbers and isinstance(value, PerImage):
                    correct = packed(value, len(images), f"{title} reports {name}")
                numbers[name] = float(value)
                if declaration(evaluator).probe and re.fullmatch(rf"{title}(_\d+)?", name):
                    probes[name] = None
        return numbers, correct

    on_test: dict = {"test": None, "test_reads": 0}
    with cached_features():
        numbers, correct = val_numbers, _ = measure(subset.val)
        if test is not None:
            with sealed_test_images(None):
                reads, images = test.reads, test.open()
            numbers, correct = measure(images)
            majority = images.labels.bincount().max().item() / len(images)
            on_test = {"test": numbers, "test_images": len(images), "test_majority": majority, "test_reads": test.reads - reads}
    chosen = [what for e in run.evaluators if (what := declaration(e).chooses)] + (["early stop"] if run.early_stop else [])
    return {
        "score": next(iter(numbers)),
        "val": val_numbers,
        "val_images": len(subset.val),
        "probes": list(probes),
        "correct": correct,
        "chosen_on_val": {"what": ", ".join(chosen), "labels": len(subset.val)} if chosen and len(subset.val) else None,
    } | on_test


def packed(score: PerImage, count: int, source: str) -> str | None:
    """Return the values of a score for the single images as text, one bit for each image, or None if they are not all 0 or 1.
    `count` is the number of images, and `source` names the score in error messages.

    Raises ValueError if the number of values is not the number of images.
    """
    values = score.values
    if len(values) != count:
        raise ValueError(f"{source} with {len(values)} values for {count} images; expected one for each, in their order")
    return records.pack_bits(values) if ((values == 0) | (values == 1)).all() else None


def new_record(run: Run, tags: Tags, status: str = "failed", error: str | None = None, traceback: str | None = None) -> Record:
    """Return the record of a run before its training: the settings, the machine and the library versions, without results.
    `tags` are its names in the comparison. `status` is, for example, "failed" (with `error` and `traceback`) or "missing".

    For a run that failed, `error` and `traceback` say why.
    """
    return Record(
        **tags._asdict(),
        labels=run.labels,
        seed=run.seed,
        status=status,
        error=error,
        traceback=traceback,
        fingerprint=fingerprint(run),
        run=describe(run),
        cpu=records.cpu(),
        code=records.code(),
        versions=records.versions(),
    )


COSTS = ("images_seen", "steps", "seconds")


def pretraining_cost(runs: list[Run], trained: list[Record]) -> dict:
    """Return the total cost of the earlier runs that a run needs, such as pretraining, as a dict. `runs` are these earlier
    runs, and `trained` are their records (results and costs). Each run is counted once.

    `runs` are the runs that the run needs directly. The runs that they need are found in the records.

    The dict also has the largest number of labels, of labels used for choices, and of unlabelled images among these runs.
    """
    costs: dict[str, dict] = {}
    labels = chosen = unlabelled = 0
    for run, record in zip(runs, trained):
        earlier = record.pretraining or {}
        costs |= earlier.get("runs") or ({earlier["fingerprint"]: {name: earlier[name] for name in COSTS}} if earlier else {})
        costs[record.fingerprint] = {name: getattr(record, name) or 0 for name in COSTS}
        labels = max(labels, label_count(run) if run.reads_labels else 0, earlier.get("labels") or 0)
        by_choice = (record.chosen_on_val or {}).get("labels", 0) if run.early_stop else 0
        chosen = max(chosen, by_choice, earlier.get("chosen_labels") or 0)
        unlabelled = max(unlabelled, record.unlabelled or 0, earlier.get("unlabelled") or 0)
    total = {name: sum(cost[name] for cost in costs.values()) for name in COSTS}
    counts = {"labels": labels or None, "chosen_labels": chosen or None, "unlabelled": unlabelled or None}
    return total | counts | {"fingerprint": trained[0].fingerprint, "runs": costs}


def label_count(run: Run) -> int:
    """Return how many labelled training images a run uses. If the run sets no number, the training images in its data set are
    counted.
    """
    return len(load_data(run)[1].train) if run.labels is None else run.labels
