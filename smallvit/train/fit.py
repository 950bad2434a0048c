"""`fit(run, folder)` turns a run into a record, and can be killed at any moment."""

from collections.abc import Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from torch import nn

from smallvit import record as records
from smallvit.components import function
from smallvit.data import Dataset, DataSpec, Images, Subset
from smallvit.evaluate import Splits, remembering
from smallvit.flops import reduces
from smallvit.numerics import DEFAULT, Numerics
from smallvit.run import NAMING, Run, describe, fingerprint, rebuild

from .initialize import weights
from .loop import Training, Watch, train
from .stack import NotStackable, Stack


def fit(
    run: Run,
    folder: str | Path,
    *,
    recipe: str = "",
    device: str = "cpu",
    watch: Watch = lambda step, accuracy: None,
    start: str | Path | None = None,
    teacher: str | Path | None = None,
    numerics: Numerics = DEFAULT,
) -> dict:
    """Train and evaluate `run`, leave its record and weights in `folder`, and return the record.

    `start` is the folder of the run that `run.init` asks for, `teacher` that of `run.teacher`; without them those are trained
    first, in `folder/init` and `folder/teacher`. `numerics` is how the steps are computed; what
    was put down goes on as it began.

    A finished run is not repeated; a started one goes on from its checkpoint and ends bitwise equal to an uninterrupted one
    (same machine, same number of threads). `watch(step, validation accuracy)` is called at every check.

    Raises   ValueError for choices that do not fit the data, for the folder of another run, and when the disk is full;
             FloatingPointError when the loss is not finite; filelock.Timeout when another process is at this run.
    """
    if done := finished(run, Path(folder)):
        return done
    with opened(run, Path(folder), recipe, device, start, teacher, numerics) as (training, close):
        if training is not None:
            train([training], training.train_step, watch)
        return close()


def fit_stacked(
    runs: Sequence[Run],
    folders: Sequence[Path],
    *,
    recipe: str = "",
    device: str = "cpu",
    watch: Watch = lambda step, accuracy: None,
    dependencies: Sequence[dict[str, Path]] = (),
    numerics: Numerics = DEFAULT,
) -> list[dict]:
    """`fit` for runs that differ only in their seed, trained as one model with a leading axis; their records, in order.

    Their weights agree with those of `fit` to rounding, and their records say how many were stacked. Those that cannot be, and
    those that were put down at different steps, are trained one after another. `before` are the folders of `start` and
    `teacher` of each, by the fields that ask for them.
    """
    with ExitStack() as held:
        works = [
            held.enter_context(opened(run, Path(at), recipe, device, places.get("init"), places.get("teacher"), numerics))
            for run, at, places in zip(runs, folders, dependencies or [{}] * len(runs))
        ]
        members = [training for training, _ in works if training is not None]
        with suppress(NotStackable):
            if len(members) > 1:
                train(members, Stack(members).train_step, watch)
        for member in members:
            train([member], member.train_step, watch)  # no step is left to those that were stacked
        return [close() for _, close in works]


@contextmanager
def opened(
    run: Run,
    folder: Path,
    recipe: str,
    device: str,
    start: str | Path | None,
    teacher: str | Path | None,
    numerics: Numerics = DEFAULT,
):
    """A run under its lock: its training, taken up where it was put down (None if it has finished), and `close()`, which
    evaluates it, leaves its record and returns that. Trains first what the run starts from or is taught by."""
    from filelock import FileLock

    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / records.CHECKPOINT
    with FileLock(folder / ".lock", timeout=0):
        if done := finished(run, folder):
            yield None, lambda: done
            return
        for stray in folder.glob(".*.new"):  # what a kill left half written
            stray.unlink()
        places, before = {"init": start, "teacher": teacher}, []
        for field, place in places.items():
            if field in run.dependencies:
                places[field] = Path(place or folder / field)
                before.append(fit(run.dependencies[field], places[field], recipe=recipe, device=device, numerics=numerics))
            elif place is not None:
                raise ValueError(f"got the folder {str(place)!r} for a run without {field}; expected it to have {field}=a run")
        record = blank(run, recipe)  # first of all, so that it names the code that runs
        data, subset = drawn(run)
        if run.early_stop and not len(subset.val):
            raise ValueError(
                f"early_stop={run.early_stop} chooses on validation images and there are none; give the run val > 0"
            )
        for evaluator in run.evaluators:  # what cannot be evaluated is not trained
            if hasattr(function(evaluator), "needs"):
                known = Splits(subset.train, subset.val, subset.val)
                function(evaluator).needs(known, **getattr(evaluator, "keywords", {}))
        training = Training(run, data, subset, device, *places.values(), numerics)
        training.resume(checkpoint, "".join([record["code"]["sha256"], data.sha256, *training.made_of]))

        def close() -> dict:
            record.update(training.facts() | evaluations(run, training.model, subset, data.test))
            record.update({"pretraining": spent(list(run.dependencies.values()), before)} if before else {})
            record["picture"] = picture(training.model, subset)
            record.update({"subset_sha256": subset.sha256, "data_sha256": data.sha256, "test_repeats": data.repeats})
            record["status"] = "finished"
            save_weights(folder / records.WEIGHTS, training.model, record)
            records.write_record(folder, record)
            checkpoint.unlink(missing_ok=True)
            return record

        yield training, close


def drawn(run: Run) -> tuple[Dataset, Subset]:
    """The data of a run and its part of them. Raises ValueError for augmentations that change what a digit is."""
    data = run.data()
    refuse_unsafe(run, data.spec)
    return data, data.subset(labels=run.labels, val=run.val, seed=run.seed)


def load(folder: str | Path) -> tuple[Run, nn.Module]:
    """The run that has finished in `folder`, and the model that it left, in evaluation mode.

    Its data are `run.data()`. Components of a recipe of your own are found once that has been loaded, `load_recipe(path)`.

    Raises   ValueError where no run has finished, or the weights are not that run's.
    """
    folder = Path(folder)
    record = records.read_record(folder)
    if record is None or record["status"] != "finished":
        raise ValueError(f"no run has finished in {folder}; expected a folder with {records.RECORD} and {records.WEIGHTS}")
    run = replace(rebuild(record["run"]), **{name: record[name] for name in NAMING})
    spec = run.data().spec
    model = run.model(spec.size, spec.channels, len(spec.classes))
    model.load_state_dict(weights(folder, record["fingerprint"]))
    return run, model.eval()


def finished(run: Run, folder: Path) -> dict | None:
    """The record of that run, if it has finished there. Raises ValueError for the folder of another run."""
    done = records.read_record(folder)
    if done is not None and done["fingerprint"] != fingerprint(run):
        raise ValueError(
            f"{folder} holds the record of run {done['fingerprint']}, not of {fingerprint(run)}; give each its own folder"
        )
    return done if done is not None and done["status"] == "finished" else None


def picture(model: nn.Module, subset: Subset) -> dict | None:
    """Where the patches of three images have gone, for the report; None where nothing is reduced. Never test images."""
    from smallvit import explain

    if not reduces(model):
        return None
    shown = subset.val if len(subset.val) else subset.train
    try:
        return explain.plain(model, shown.take(slice(3)))
    except ValueError as error:  # a reduction that cannot be followed must not cost the run
        return {"error": str(error)}


def evaluations(run: Run, model: nn.Module, subset: Subset, test) -> dict:
    """The named numbers of every evaluator, on validation images first and then, once, on the sealed test images."""
    reads = test.reads
    unseen = test.open()

    def numbers(scored: Images) -> dict[str, float]:
        splits, found = Splits(subset.train, subset.val, scored), {}
        for evaluator in run.evaluators if len(scored) else ():
            for name, value in evaluator(model, splits):
                if name in found or not (found or 0 <= value <= 1):
                    wanted = "another name" if name in found else "a share from 0 to 1 first, since that judges the run"
                    raise ValueError(f"{function(evaluator).__name__} yields {name!r}, {value:.4g}; expected {wanted}")
                found[name] = float(value)
        return found

    with remembering():
        val, final = numbers(subset.val), numbers(unseen)
    chosen = [function(e).chooses for e in run.evaluators if hasattr(function(e), "chooses")]
    chosen += ["early stop"] if run.early_stop else []
    return {
        "score": next(iter(final)),
        "val": val,
        "test": final,
        "test_reads": test.reads - reads,
        "test_images": len(unseen),
        "test_majority": unseen.labels.bincount().max().item() / len(unseen),
        "chosen_on_val": {"what": ", ".join(chosen), "labels": len(subset.val)} if chosen and len(subset.val) else None,
    }


def blank(run: Run, recipe: str, status: str = "failed", error: str | None = None) -> dict:
    """A record of `run` with all that is known before it starts; also what a failed run leaves."""
    known = {
        "recipe": recipe,
        "arm": run.arm,
        "role": run.role,
        "baseline": run.baseline,
        "labels": run.labels,
        "seed": run.seed,
        "status": status,
        "error": error,
        "fingerprint": fingerprint(run),
        "run": describe(run),
        "cpu": records.cpu(),
        "code": records.code(),
        "versions": records.versions(),
    }
    return dict.fromkeys(records.FIELDS) | known


def refuse_unsafe(run: Run, spec: DataSpec):
    """Refuse augmentations that change what a digit is."""
    for step in run.augment if spec.digits else ():
        reason = getattr(step, "unsafe_for_digits", None)
        if reason:
            raise ValueError(f"{type(step).__name__} on {spec.name}: {reason}; take it out of augment, or give it force=True")


def save_weights(path: Path, model: nn.Module, record: dict):
    """The evaluated weights as safetensors, with the fingerprint of their run."""
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    records.write_atomic(path, lambda new: save_file(tensors, new, metadata={"fingerprint": record["fingerprint"]}))


COST = ("images_seen", "steps", "seconds")


def spent(runs: list[Run], records: list[dict]) -> dict:
    """What was trained before a run, and before that, each run once: its cost, the most labels that any saw, or chose its
    weights by, and the most unlabelled images."""
    made: dict[str, dict] = {}
    labels = chosen = unlabelled = 0
    for run, record in zip(runs, records):
        earlier = record["pretraining"] or {}
        made |= earlier.get("runs") or ({earlier["fingerprint"]: {name: earlier[name] for name in COST}} if earlier else {})
        made[record["fingerprint"]] = {name: record[name] or 0 for name in COST}
        labels = max(labels, labelled(run) if run.reads_labels else 0, earlier.get("labels") or 0)
        by = record["chosen_on_val"]["labels"] if run.early_stop else 0
        chosen = max(chosen, by, earlier.get("chosen_labels") or 0)
        unlabelled = max(unlabelled, record["unlabelled"] or 0, earlier.get("unlabelled") or 0)
    cost = {name: sum(of[name] for of in made.values()) for name in COST}
    seen = {"labels": labels or None, "chosen_labels": chosen or None, "unlabelled": unlabelled or None}
    return cost | seen | {"fingerprint": records[0]["fingerprint"], "runs": made}


def labelled(run: Run) -> int:
    """How many labels a run sees."""
    return len(drawn(run)[1].train) if run.labels is None else run.labels
