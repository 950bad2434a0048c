"""`fit(run, folder)` trains and evaluates a run and writes its record. It can be killed at any moment and continued later."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from smallvit import record as records
from smallvit.augment import Batch
from smallvit.augment.check import check_labels_kept, check_own_transforms, is_of_this_package
from smallvit.components import describe_value, function
from smallvit.data import Dataset, HeldOut, Subset, sealed_test_images
from smallvit.data.dataset import current_content, loaded
from smallvit.evaluate import Splits, check_features_exist, declaration
from smallvit.flops import reduces
from smallvit.numerics import DEFAULT, Numerics, check_numerics, full_float32, torch_defaults
from smallvit.passes import check_same_fold
from smallvit.pretrained import Weights
from smallvit.record import Record
from smallvit.run import Run, describe, fingerprint
from smallvit.shapes import printable
from smallvit.storage import locked, remove_leftovers, temporary

from . import checkpoint
from .evaluation import evaluate, test_part
from .loop import Training, Watch, choose_device, train
from .publish import publish, tidy
from .read_log import log_test_read
from .stack import NotStackable, Stack
from .trained_model import check_reloaded, save_weights


class Tags(NamedTuple):
    """The place of a run in a comparison: the recipe (a Python file that lists the runs), the arm (variant), its role (such as
    "baseline" or "technique"), the arm that is its baseline, the training length, the tuning of its settings, and the looks
    (numbers of seeds at which the comparison is tested). These values do not change the training.

    The record (saved results) of the run contains them; its fields `length`, `tuning` and `looks` explain the last three.
    """

    recipe: str = ""
    arm: str = "run"
    role: str = "technique"
    baseline: str = ""
    length: int | None = None
    tuning: dict | None = None
    looks: list[int] | None = None


NO_TAGS = Tags()
MORE_VAL = "set val > 0, with training images of at least 2 groups (without groups, 2 images) in each class"  # what to do
ONE_AT_A_TIME = threading.RLock()  # a run trains its earlier runs first, inside its own training


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
    init       the folder of the earlier run that is the setting `init` of the run; None: `folder/init`. If that run has not
               finished there, it is trained first
    teacher    the same for `run.teacher`
    numerics   precision, attention kernel and compilation; a resumed run keeps those it began with
    validation_only  True: score the run on the validation images only, for tuning and exploring. `test` of the record is then
               None. Earlier runs that must be trained first are scored in the same way. With `val=0`, and data without test
               images such as `folder(path, test=0.0)`, the run trains on all images and has no score.
    reads      path of a file to which each read of the test images is appended. The record then says how many settings of this
               arm have been scored on these test images (`test_settings`).

    Raises     ValueError for settings that do not fit the data, for data without test images (unless `validation_only`), for a
               folder that holds another run or one that was trained on other images, labels or classes than the data has now or
               from another file of pretrained weights than there is now, for a full disk, and if anything but the final scoring
               of a run reads the test images;
               FloatingPointError if the loss, or what the trained model gives, is not finite;
               `Collapse` if the features of a self-supervised run collapse;
               RuntimeError if the solver of a linear probe does not converge;
               filelock.Timeout if another process trains this run.
    """
    check_numerics(numerics)
    folder = Path(folder).expanduser()
    if done := finished_record(run, folder, validation_only):
        return done
    options: dict[str, Any] = {"numerics": numerics, "validation_only": validation_only, "reads": reads}
    with training_allowed(), prepare_training(run, folder, tags, device, init, teacher, **options) as (training, close):
        if training is not None:
            checkpoint.resume([training])
            train([training], training.train_step, watch)
        return close()


@contextmanager
def training_allowed() -> Iterator[None]:
    """Context manager in which gradients are computed, in the precision of the run, also if the caller has switched gradients
    off or `torch.autocast` on, or has changed torch's default device or data type. After it, torch's global generators of
    random numbers are as before, because training seeds them. So the caller's own random numbers, such as those of a random
    search, do not repeat.

    All threads of a process share these generators. So if several threads train, one of them waits for the other.
    """
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with ONE_AT_A_TIME, ExitStack() as stack:
        for kind in ("cpu", *["cuda"] * bool(gpus)):
            stack.enter_context(torch.autocast(kind, enabled=False))
        for context in (torch_defaults(), torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(gpus)):
            stack.enter_context(context)
        yield


def fit_stacked(
    runs: Sequence[Run],
    folders: Sequence[str | Path],
    *,
    tags: Sequence[Tags] = (),
    device: str = "cpu",
    watch: Watch = lambda step, accuracy: None,
    dependencies: Sequence[Mapping[str, str | Path]] = (),
    numerics: Numerics = DEFAULT,
    validation_only: bool = False,
    reads: str | Path | None = None,
    curves: bool = True,
) -> list[Record]:
    """Train several runs that differ only in seed, learning rate and number of labels at the same time, as one model (a stack):
    each weight tensor has an additional first axis, the run. Return the list of their records (settings, results and costs).
    `folders` has one folder for each run in `runs`, and `tags` has their places in the comparison.

    The weights agree with those of `fit` up to rounding, and each record says how many runs were stacked. Runs that cannot be
    stacked, or that resume from checkpoints of their own, are trained one after another. `dependencies` are the folders of the
    runs that each run depends on, by field ("init", "teacher"). `curves=False` leaves out the validation accuracy at the checks
    during training, which saves time if only the last score counts. See `fit` for the other parameters.

    If the loss of a run in a stack is not finite, the others are trained to the end. Then a FloatingPointError that names its
    seed is raised, or `Collapse` for a run without labels whose features collapse. Call this function again without this run:
    the others are then only scored. Runs that are trained one after another stop at the first such error.

    A stack has one checkpoint, in the folder of its first run. If it is interrupted, calling this function with the same runs
    in the same order continues it, and the weights are bitwise those of an uninterrupted stack. Runs of a stack that are then
    trained alone, or with others, start again.
    """
    tags, dependencies = tags or [NO_TAGS] * len(runs), dependencies or [{}] * len(runs)
    if not len(runs) == len(folders) == len(tags) == len(dependencies):
        counts = f"{len(runs)} runs, {len(folders)} folders, {len(tags)} tags and {len(dependencies)} dependencies"
        raise ValueError(f"fit_stacked got {counts}; expected as many of each, in the order of the runs")
    paths = [Path(folder).expanduser() for folder in folders]
    options: dict[str, Any] = {"numerics": numerics, "validation_only": validation_only, "reads": reads, "curves": curves}
    with ExitStack() as stack:
        stack.enter_context(training_allowed())
        opened_runs = [
            stack.enter_context(
                prepare_training(run, folder, tag, device, places.get("init"), places.get("teacher"), **options)
            )
            for run, folder, tag, places in zip(runs, paths, tags, dependencies)
        ]
        members = [training for training, _ in opened_runs if training is not None]
        with suppress(NotStackable):
            train_together(members, watch)
        for done, member in enumerate(members):  # returns at once for runs that the stack has finished
            one_of_several = len(members) > 1 and not member.ended
            train([member], member.train_step, partial(watch_one, watch, done * member.run.steps, len(members)))
            if one_of_several:  # need not be trained again if one of the others fails
                checkpoint.save([member], member.checkpoint_file)
        return [close() for _, close in opened_runs]


def watch_one(watch: Watch, before: int, runs: int, step: int, accuracy: float | None):
    """Call `watch` for a run that is trained after others of its group, with the mean number of steps of all `runs` of the
    group. `before` are the steps of the others, and `step` that of this run.
    """
    watch((before + step) // runs, accuracy)


def train_together(members: Sequence[Training], watch: Watch):
    """Resume the checkpoints of runs that differ only in seed, learning rate and number of labels, and train those that have
    not begun as one model (a stack). `members` are the `Training` objects of the runs, and `watch` is called after each
    step. The others are only resumed.

    A checkpoint is also written before the first step, so that a stack is continued with the same runs whenever it is killed.
    After the last step, each run gets a checkpoint of its own: from there, it can be scored without the others.

    Raises NotStackable if the runs cannot be trained as one model, and after the last step the error of a run that has failed.
    """
    resumed = bool(members) and checkpoint.resume(members)
    group = members if resumed else [member for member in members if not member.ended]
    if not resumed and (len(group) < 2 or any(member.step for member in group)):
        return
    stack = Stack(group, resumed=resumed)
    if not resumed:
        checkpoint.save(group, group[0].checkpoint_file)
    try:
        train(group, stack.train_step, watch)
    finally:
        if all(member.failure for member in group):  # none of them can be continued
            group[0].checkpoint_file.unlink(missing_ok=True)
    for member in reversed(group):  # the first one last: its file is the checkpoint of the stack
        if member.failure is None:
            checkpoint.save([member], member.checkpoint_file)
        else:
            member.checkpoint_file.unlink(missing_ok=True)
    if failures := [member.failure for member in group if member.failure]:
        raise failures[0]


@contextmanager
def prepare_training(
    run: Run,
    folder: Path,
    tags: Tags,
    device: str,
    init: str | Path | None,
    teacher: str | Path | None,
    *,
    numerics: Numerics = DEFAULT,
    validation_only: bool = False,
    reads: str | Path | None = None,
    curves: bool = True,
) -> Iterator[tuple[Training | None, Callable[[], Record]]]:
    """Context manager that locks `folder` and prepares the training of `run` there. It yields the `Training` object and a
    function that evaluates the model and returns the record (results). `tags` is the place in the comparison, `init` and
    `teacher` are folders of earlier runs, `numerics` are precision, attention kernel and compilation, `validation_only=True`
    leaves out test images, `reads` is the file that counts reads of test images, and `curves=False` leaves out the validation
    accuracy during training.

    Earlier runs that the run needs, such as pretraining, are trained first, unless they have finished in `init` or `teacher`;
    see `fit` for these parameters. The training is at step 0: `checkpoint.resume` continues it. The `Training` object is None
    if the run has already finished. The yielded function also writes the record. If another process has finished the run
    meanwhile, its record stays and is returned.
    """
    choose_device(device)  # raises ValueError before an earlier run is trained
    check_numerics(numerics)
    reason = "this run is scored on validation images only" if validation_only else "a run reads them only when it is scored"
    with locked(folder / ".lock"), sealed_test_images(reason), full_float32():
        if done := finished_record(run, folder, validation_only):
            yield None, lambda: done
            return
        remove_leftovers(folder)
        places = dependency_folders(run, folder, {"init": init, "teacher": teacher})
        options = {"device": device, "numerics": numerics, "validation_only": validation_only, "reads": reads}
        trained = train_earlier_runs(run, places, tags, **options)
        record = new_record(run, tags)  # first, so that it names the code that is running
        data, subset = load_data(run)
        if not validation_only:
            data.check_test_images()
        check_evaluation(run, subset, None if validation_only else data.test)
        if validation_only or run.early_stop:  # then the validation images choose something
            check_validation_unseen(run, data, subset)
        if validation_only and not len(subset.val) and data.test.count:
            raise ValueError(f"val={run.val} leaves no validation images to score a validation-only run on; {MORE_VAL}")
        training = Training(run, data, subset, device, places.get("init"), places.get("teacher"), numerics)
        check_features_exist(training.model, run.evaluators)
        views = training.objective.unlabelled.views if training.pool is not None else ()
        for transforms in views:
            check_labels_kept(transforms, data.spec)
        check_own_augmentation(training, views)
        training.curves = curves
        training.checkpoint_file = folder / records.CHECKPOINT
        training.origin = "".join([records.code()["sha256"], data.sha256, *training.init_hashes])

        def close() -> Record:
            check_reloaded(training.model, training.objective.model, run, subset.train)
            test, weights = None if validation_only else data.test, temporary(folder / records.WEIGHTS)
            settings = None
            if test is not None and reads:
                settings = log_test_read(Path(reads).expanduser(), run, tags.arm, data.test.sha256)
            facts = training.facts()
            with training.finite_outputs():
                measured = evaluate(run, training.model, subset, test, training.numerics)
            done = replace(
                record,
                **facts,
                **measured,
                test_settings=settings,
                pretraining=pretraining_cost(list(run.dependencies.values()), trained) if trained else None,
                picture=reduction_picture(training.model, subset),
                subset_sha256=subset.sha256,
                drawn_share=drawn_share(run, data, subset),
                **({} if validation_only else test_part(data)),
                data_sha256=data.sha256,
                skipped_files=data.skipped or None,
                test_repeats=None if validation_only else data.repeats,
                status="finished",
            )
            try:
                done = publish(folder, replace(done, **save_weights(weights, training.model, run, data.spec)), weights)
            finally:
                with suppress(OSError):  # half of them, if the disk is full
                    weights.unlink()
            training.checkpoint_file.unlink(missing_ok=True)
            return done

        yield training, close


def train_earlier_runs(run: Run, places: Mapping[str, Path], tags: Tags, **options: Any) -> list[Record]:
    """Train the earlier runs that a run needs, unless they have finished, and return their records. `places` are their folders,
    by field ("init", "teacher"), `tags` is the place of the run in the comparison, and `options` are those of `fit`.
    """
    names = {field: Tags(tags.recipe, f"{field} of {tags.arm}", "dependency", tags.baseline) for field in places}
    return [fit(run.dependencies[field], place, tags=names[field], **options) for field, place in places.items()]


def dependency_folders(run: Run, folder: Path, given: dict[str, str | Path | None]) -> dict[str, Path]:
    """Return the folders of the earlier runs that a run in `folder` needs, as a dict with "init" or "teacher", or both.
    `given` has the folders that the caller wants for them, or None.

    Raises ValueError for a folder of an earlier run that the run does not need.
    """
    for field, place in given.items():
        if place is not None and field not in run.dependencies:
            raise ValueError(f"got the folder {str(place)!r} for {field}, but the run has none; expected a run in {field}=")
    return {field: Path(place or folder / field).expanduser() for field, place in given.items() if field in run.dependencies}


def load_data(run: Run) -> tuple[Dataset, Subset]:
    """Return the data set of a run, and a `Subset` object with the training images and validation images that the run uses. If
    the data set is divided into folds, the data set of the fold that the seed of the run names is returned.

    Raises ValueError if the data set contains digits and an augmentation of the run would turn one digit into another, such as
    a flip; if the number of folds is not that of the loader's option; and if an earlier run, such as pretraining, could be
    trained on test images of this run.
    """
    check_same_fold(run)
    whole = loaded(run.data)
    if whole.folds != run.folds:
        name = getattr(function(run.data), "__name__", "the data loader")
        raise ValueError(
            f"{name} returns data that are divided into {whole.folds or 'no'} folds, and its option folds is "
            f"{run.folds or 'not set'}; give {name} an option folds, pass it on to the data set, and set it in the run: "
            f"data=partial({name}, folds={whole.folds or run.folds})"
        )
    data = whole.at_seed(run.seed)
    check_labels_kept(run.augment, data.spec)
    return data, data.subset(labels=run.labels, val=run.val, seed=run.seed)


def check_own_augmentation(training: Training, views: Sequence[Sequence[Callable]]):
    """Raise ValueError if a transform that is not of this package cannot be used in the steps of a run: see
    `check_own_transforms`. It is tried on the first training images. `views` are the transforms of unlabelled images.
    """
    run, images, device = training.run, training.images, training.device
    own = [transforms for transforms in (run.augment, *views) if not all(map(is_of_this_package, transforms))]
    if own and run.steps:
        first = slice(run.batch)
        batch = Batch(images.pixels(first, device), images.targets(first, device))
        for transforms in own:
            check_own_transforms(transforms, batch)


def drawn_share(run: Run, data: Dataset, subset: Subset) -> float:
    """Return which share of the training images of a class the run draws as its labelled images, from 0 to 1. Classes may
    differ; the largest share is returned. `run` are the settings, `data` is the data set, and `subset` holds the labelled
    images. From this share, verdicts estimate how many labelled images two seeds have in common.

    The share is 1 if the run uses all images (`labels=None`). The labelled images of two seeds overlap by this share, so
    results over seeds vary less than over new images. Below 1, a larger share gives wider intervals, so the largest share is
    the careful choice.
    """
    if run.labels is None:
        return 1.0
    drawn, all_images = (images.labels.bincount(minlength=len(data.spec.classes)) for images in (subset.train, data.train))
    return (drawn / all_images.clamp(min=1).double()).max().item()


def check_evaluation(run: Run, subset: Subset, test: HeldOut | None = None):
    """Raise ValueError if images are missing that the run needs: validation images for early stopping, or enough images for its
    evaluators (functions that score the model). `subset` holds the training and validation images, and `test` the test images,
    or None if they are not used. The check is made before training. It does not read the pixels of the test images.
    """
    if run.early_stop and not len(subset.val):
        raise ValueError(f"early_stop={run.early_stop} needs validation images, and val={run.val} leaves none; {MORE_VAL}")
    for evaluator in run.evaluators:
        if needs := declaration(evaluator).needs:
            for scored in (subset.val, *([] if test is None else [test.without_pixels()])):
                needs(Splits(subset.train, subset.val, scored), **getattr(evaluator, "keywords", {}))


def check_validation_unseen(run: Run, data: Dataset, subset: Subset):
    """Raise ValueError if an earlier run, such as pretraining with labels, or a run before that one, was trained on labelled
    images that are validation images of this run: early stopping, tuning and exploring would then prefer settings that remember
    them. `data` is the data set of the run, and `subset` its training and validation images.
    """
    if data.val is not None or not len(subset.val):  # own validation images are never training images
        return
    for name, earlier in earlier_runs(run):
        if not earlier.reads_labels or describe(earlier.data) != describe(run.data):
            continue
        if count := int(torch.isin(subset.val_index, load_data(earlier)[1].index).sum()):
            raise ValueError(
                f"{count} of the {len(subset.val)} validation images of this run are labelled training images of {name}; give "
                f"both the same seed and val={len(subset.val)}"
            )


def earlier_runs(run: Run) -> Iterator[tuple[str, Run]]:
    """Yield the name and the settings of each run that a run needs, such as pretraining, and of the runs that those need."""
    for field, earlier in run.dependencies.items():
        yield f"the run in {field}=", earlier
        yield from ((f"{name} of the run in {field}=", other) for name, other in earlier_runs(earlier))


def finished_record(run: Run, folder: Path, validation_only: bool = False) -> Record | None:
    """Return the record (settings, results and costs) of a run from `folder` if the run has finished, otherwise None. Set
    `validation_only=True` for a run that is scored on validation images only, so that its record has no test results. The
    default False requires a record with test results.

    What a process left that was killed right after it wrote the record is put in order: see `damaged_weights`. The checkpoint
    of a finished run is deleted.

    Raises ValueError if the folder holds another run, a run that was scored on other images, a run that was trained on other
    images or labels than its data set has now or from another file of pretrained weights than there is now, or damaged files.
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
    if not done.finished:
        return None
    if (content := current_content(run.data)) and done.has_other_data(*content):
        raise ValueError(
            f"{folder} holds this run, trained on other images or labels than {describe_value(done.run['data'])} contains now; "
            "restore the data, also the names of its classes, or use another folder"
        )
    if isinstance(run.init, Weights) and done.has_other_weights(run.init.sha256()):
        raise ValueError(
            f"{folder} holds this run, and the file of the pretrained weights {run.init.name} that it began with has been "
            "replaced since; put the old file back, or use another folder"
        )
    tidy(folder)
    return done


def reduction_picture(model: nn.Module, subset: Subset) -> dict | None:
    """Return the data for a figure, as a dict. The figure shows for three images which patches are merged or removed by the
    token reduction of `model`. Return None if the model has no token reduction. `subset` holds the training and validation
    images.

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


def new_record(run: Run, tags: Tags, status: str = "failed", error: str | None = None, traceback: str | None = None) -> Record:
    """Return the record of a run before its training: the settings, the machine and the library versions, without results.
    `tags` is the place of the run in the comparison, such as its arm (variant) and baseline. `status` is, for example, "failed"
    (with `error` and `traceback`) or "missing".

    For a run that failed, `error` and `traceback` say why. Characters that are not safe to print are replaced there.
    """
    return Record(
        **tags._asdict(),
        labels=run.labels,
        seed=run.seed,
        status=status,
        error=error and printable(error),
        traceback=traceback and printable(traceback, lines=True),
        fingerprint=fingerprint(run),
        run=describe(run),
        folds=run.folds or None,
        cpu=records.cpu(),
        code=records.code(),
        versions=records.versions(),
    )


COSTS = ("images_seen", "steps", "seconds")


def pretraining_cost(runs: list[Run], trained: list[Record]) -> dict:
    """Return the total cost of all earlier runs that a run needs, such as pretraining, as a dict: images seen, training steps
    and seconds. Each run is counted once. `runs` are the earlier runs that are needed directly, and `trained` are their records
    (results and costs), which also contain the costs of still earlier runs.

    The dict also has the largest number of labels, of labels used for choices, and of unlabelled images among these runs, and
    "runs": for each, by its fingerprint, its costs and how many runs were trained together with it as one model.
    """
    costs: dict[str, dict] = {}
    labels = chosen = unlabelled = 0
    for run, record in zip(runs, trained):
        earlier = record.pretraining or {}
        costs |= earlier.get("runs") or ({earlier["fingerprint"]: {name: earlier[name] for name in COSTS}} if earlier else {})
        costs[record.fingerprint] = {name: getattr(record, name) or 0 for name in COSTS} | {"stacked": record.stacked}
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
