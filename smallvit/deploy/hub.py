"""Sharing: a folder with the weights, the record and a model card, for other people or for the Hugging Face Hub."""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from smallvit.components import describe_value, described_name
from smallvit.data import Preprocess
from smallvit.record import RECORD, WEIGHTS, Record, format_labels, only_copies_are_grouped, write_record
from smallvit.storage import file_sha256, write_text
from smallvit.train.trained_model import CONFIG, HUB, TrainedModel, custom_components, load
from smallvit.words import how_many

README, ONNX = "README.md", "model.onnx"
LEFT_OUT = ("picture", "test_groups", "traceback")  # fields of a record that may show images or patients


def share(
    run: str | Path,
    target: str | Path,
    *,
    records: Sequence[Record] = (),
    license: str | None = None,
    onnx: bool = False,
    private: bool = False,
) -> str:
    """Write a folder with which other people can use a trained model, or upload it to the Hugging Face Hub. Return the path of
    the folder, or the address of the page on the hub.

        smallvit.share("runs/quickstart/50/+SPT/seed0-1a2b3c4d", "hf:user/name", license="mit")

    The folder holds the weights (`model.safetensors`), the settings and results (`record.json`), a model card (`README.md`) and
    `config.json` with the hashes of these files. `smallvit.load` loads it. Pictures of training images, group numbers of test
    images and error texts are left out of the record.

    run      the folder of a finished run
    target   a new or empty folder, or "hf:user/name" for the hub, where you must be logged in
    records  records of runs that differ only in the seed, for the accuracy over seeds in the model card
    license  the license of the model in the hub's notation, such as "mit"; None: unknown
    onnx     True: also write `model.onnx`, see `export`
    private  True: only you can see the model on the hub

    Raises   ValueError for a run that cannot be loaded, for a model without a trained head, for components that are not part of
             smallvit, for a folder that is not empty, for `private` with a folder, if a package for `onnx` is missing, and if
             the upload fails.
    """
    with written_files(run, target, records, license, onnx, private) as folder:
        return deliver(folder, target, private)


@contextmanager
def written_files(
    run: str | Path, target: str | Path, records: Sequence[Record], license: str | None, onnx: bool, private: bool
) -> Iterator[Path]:
    """Check that a trained model can be shared, and write its files into a temporary folder, whose path is the value of the
    `with` statement. `deliver` then brings them to the target. The parameters and errors are those of `share`.
    """
    if str(run).startswith(HUB):
        raise ValueError(f"{run} is shared already; expected the folder of a run")
    if private and not str(target).startswith(HUB):
        raise ValueError(f"private (--private) hides a model on the Hugging Face Hub, and {target} is a folder; leave it out")
    if onnx:
        from .onnx import check_packages

        check_packages()
    run = Path(run).expanduser()
    trained = load(run)
    trained.check_classes()
    if foreign := custom_components(trained.record.run):
        raise ValueError(
            f"the run uses code that is not part of smallvit: {', '.join(foreign)}; others could not load the model; share the "
            "recipe file instead, or export the model to ONNX (smallvit export)"
        )
    if not str(target).startswith(HUB):
        folder = Path(target).expanduser()
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"{folder} exists and is not an empty folder; choose another name, or remove it")
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".", dir=folder) as temporary:  # an error leaves the folder empty
            write_folder(trained, run, Path(temporary), records, license, onnx, f"path/to/{folder.name}")
            yield Path(temporary)
        return
    name = str(target).removeprefix(HUB)
    if name.count("/") != 1 or not all(name.split("/")) or "@" in name:
        raise ValueError(f"got the address {str(target)!r}; expected {HUB}user/name")
    with TemporaryDirectory() as temporary:
        folder = Path(temporary, "shared")
        write_folder(trained, run, folder, records, license, onnx, str(target))
        yield folder


def deliver(folder: Path, target: str | Path, private: bool) -> str:
    """Bring the files in `folder` to the target of `share`: move them, or upload them to the hub. Return the path of the folder
    or the address of the page. `private` is that of `share`.
    """
    if str(target).startswith(HUB):
        return upload(folder, str(target).removeprefix(HUB), private)
    target = Path(target).expanduser()
    for file in folder.iterdir():
        file.replace(target / file.name)
    return str(target)


def upload(folder: Path, name: str, private: bool) -> str:
    """Upload the files of a folder to the Hugging Face Hub as the model `name`, such as "user/name". Return the address of its
    page. A new model is visible for everybody unless `private` is True. Raise ValueError if the upload fails.
    """
    import huggingface_hub

    api = huggingface_hub.HfApi()
    try:
        page = api.create_repo(name, repo_type="model", private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Share a model trained with smallvit")
    except Exception as error:  # network, hub and login: each library raises its own class
        raise ValueError(
            f"{HUB}{name} could not be uploaded ({type(error).__name__}: {error}); check the name, the network and your login "
            "(hf auth login)"
        ) from error
    return str(page)


def write_folder(
    trained: TrainedModel, run: Path, folder: Path, records: Sequence[Record], license: str | None, onnx: bool, address: str
):
    """Write the files of a shared model into `folder`. `trained` is the model and `run` is the folder of its run; see `share`
    for the other parameters. `address` is what the model card tells other people to load.
    """
    from smallvit import __version__

    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(run / WEIGHTS, folder / WEIGHTS)
    record = replace(trained.record, **dict.fromkeys(LEFT_OUT))
    write_record(folder, record)
    if onnx:
        from .onnx import export

        export(trained, folder / ONNX)
    files = [name for name in (RECORD, WEIGHTS, ONNX) if (folder / name).exists()]
    config = {
        "library_name": "smallvit",
        "smallvit_version": __version__,
        "classes": list(trained.classes),
        "preprocess": trained.preprocess.to_dict(),
        "fingerprint": record.fingerprint,
        "files": {name: file_sha256(folder / name) for name in files},
    }
    write_text(folder / CONFIG, json.dumps(config, indent=1, ensure_ascii=False) + "\n")
    write_text(folder / README, model_card(trained, records, license, onnx, address))


def model_card(trained: TrainedModel, records: Sequence[Record], license: str | None, onnx: bool, address: str) -> str:
    """Return the model card of a trained model as text in Markdown: what it was trained on, its results, its classes and the
    limits of its use. `records` are those of runs that differ only in the seed; see `share` for the other parameters. `address`
    is what other people load.
    """
    record, preprocess = trained.record, trained.preprocess
    data = data_name(record)
    front = {
        "library_name": "smallvit",
        "pipeline_tag": "image-classification",
        "license": license or "unknown",
        "tags": ["smallvit", "image-classification", "vision-transformer", *["onnx"] * onnx],
        "datasets": [data],
        "metrics": [record.score or "accuracy"],
    }
    scaled = "scaled to [0, 1]" if preprocess.dtype == "uint8" else "kept as floats (16-bit values divided by 65535)"
    (h, w), gray = preprocess.size, {1: "gray", 3: "RGB", 4: "RGBA"}.get(preprocess.channels, f"{preprocess.channels} channels")
    counted = f"{record.params:,} parameters" if record.params else "an unknown number of parameters"
    lines = [
        "---",
        *(f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in front.items()),
        "---",
        "",
        f"# {record.arm}, trained on {data}",
        "",
        f"An image classifier with {len(trained.classes)} classes and {counted}, trained with smallvit.",
        "",
        "## Use",
        "",
        "```python",
        "import smallvit",
        f"model = smallvit.load({json.dumps(address)})",
        'print(model.predict(["image.png"]), model.predict_proba(["image.png"]))',
        "```",
        "",
        "Loading reads only safetensors and JSON files and runs no code of this folder."
        + onnx_text(trained.preprocess) * onnx,
        "",
        "## Training",
        "",
        f"- Data: {data}, {format_labels(record.labels)}" + unlabelled_text(record),
        *fold_lines(record),
        f"- Model: `{shortened(described_text(record.run.get('model')))}`",
        f"- Objective: `{shortened(described_text(record.run.get('objective')))}`, {record.steps or 0:,} steps of "
        f"{record.run.get('batch')} images",
        *[f"- Initial weights: {start}" for start in [initial_weights(record)] if start],
        "",
        "## Results",
        "",
        *result_lines(record, records),
        "",
        "## Classes",
        "",
        ", ".join(trained.classes),
        "",
        "## Preprocessing",
        "",
        f"Images are turned upright, converted to {gray}, resized to {h} x {w} pixels (bicubic, antialiased), {scaled} "
        f"and normalized with mean {numbers(preprocess.mean)} and standard deviation {numbers(preprocess.std)}. "
        "`smallvit.load` does all this.",
        "",
        "## Limits",
        "",
        "- The model was trained on few images. Its accuracy on images from another camera or place is unknown.",
        "- It always answers with one of its classes, also for an image that shows none of them.",
        "- A probability is the output of a softmax. It was not calibrated unless the results say so.",
        "- It must not be the only basis of a decision about a person's health, safety or rights.",
        "",
    ]
    return "\n".join(lines)


def onnx_text(preprocess: Preprocess) -> str:
    """Return a sentence about the ONNX file beside a model, which says what the file computes. `preprocess` says how the images
    of the model are made.
    """
    if preprocess.dtype == "uint8":
        return f" `{ONNX}` computes the same in ONNX Runtime, from bytes to probabilities."
    resized = "" if preprocess.channels == 4 else "; resized 8-bit images differ slightly from those of smallvit"
    return f" `{ONNX}` computes the probabilities in ONNX Runtime, from pixels as float32 in [0, 1]{resized}."


def data_name(record: Record) -> str:
    """Return the name of the data set of a run, from its record: the name of the loader, such as "mnist", or for your own
    images the name of the folder or file, without its path.
    """
    data: Any = record.run.get("data")
    path = data.get("path") if isinstance(data, dict) else None
    return Path(path).name if path else described_text(data).partition("(")[0]


def described_text(plain: Any) -> str:
    """Return a short text in the form of Python code for a component, from its description in a record."""
    return describe_value(plain) if described_name(plain) else str(plain)


def shortened(text: str) -> str:
    """Return `text`, cut to at most 300 characters."""
    return text if len(text) <= 300 else f"{text[:297]}..."


def unlabelled_text(record: Record) -> str:
    """Return a text about the images that the run used without their labels, or an empty text if there are none."""
    return f", {record.unlabelled:,} images without labels" if record.unlabelled else ""


def fold_lines(record: Record) -> list[str]:
    """Return which images a model of a cross-validation was trained without, and which images were kept together, as lines of a
    Markdown list. The list is empty without cross-validation.
    """
    if not record.folds:
        return []
    number, fold = divmod(record.seed, record.folds)
    together = "Images of one group, such as a patient, were kept together: no group is both in training and in the test."
    if only_copies_are_grouped(record.run.get("data") or {}):
        together = "Images with identical pixels were kept together: none is both in training and in the test."
    return [
        f"- Cross-validation: this is the model of fold {fold} of pass {number} (both from 0). A pass divides the images into "
        f"{record.folds} folds. The model was trained without the images of its fold, which are its test images.",
        *[f"- {together}"] * bool(record.test_groups),
    ]


def initial_weights(record: Record) -> str:
    """Return where the initial weights of a run come from, as text. It is empty if they were random."""
    if name := (record.init_weights or {}).get("name"):
        return f"{name}, pretrained on other images; their license holds, too"
    return "an earlier run on the same data" if record.run.get("init") else ""


def result_lines(record: Record, records: Sequence[Record]) -> list[str]:
    """Return the results of a model as lines of a Markdown list. With three or more `records` of runs that differ only in the
    seed, there is also their mean with a 95% interval. In a cross-validation, complete passes over all folds count as seeds.
    """
    images = f"{record.test_images:,} test images" if record.test_images else "the test images"
    lines = [f"- {name} of this model on {images}: {value:.4g}" for name, value in (record.test or {}).items()]
    if not lines:
        lines = ["- This model was not scored on test images."]
    elif record.folds:
        seeds = {other.seed for other in records if other.finished} | {record.seed}
        passes, folds = len({seed // record.folds for seed in seeds}), record.folds
        whole = f"{len(seeds)} models ({folds} folds x {how_many(passes, 'pass', 'passes')})"
        models = whole if len(seeds) == folds * passes else f"the {folds} models of a pass"
        lines.append(f"- This is the result of one of {models}, on the images of its fold. Other folds give other results.")
    if record.test_majority is not None:
        lines.append(f"- Share of the most frequent class: {record.test_majority:.4g}")
    scores = seed_scores([other for other in records if other.finished and other.test and other.score == record.score])
    if len(scores) > 2:
        import numpy as np
        from scipy.stats import t

        mean, half = np.mean(scores), t.ppf(0.975, len(scores) - 1) * np.std(scores, ddof=1) / len(scores) ** 0.5
        what, unit = f"{len(scores)} models that differ in the seed", "seeds, for these test images"
        if record.folds:
            what, unit = f"{len(scores)} passes over all images, each with {record.folds} models", "passes, for these images"
        lines.append(f"- {record.score} of {what}: {mean:.4g} ± {half:.2g} (95% interval of the mean over {unit})")
    return lines


def seed_scores(records: Sequence[Record]) -> list[float]:
    """Return the score of each of the finished runs `records`, which differ only in the seed. In a cross-validation, return the
    score of each complete pass over all folds instead: the mean over all images, each of which is a test image once.
    """
    passes: dict[int, dict[int, Record]] = {}
    for record in records:
        passes.setdefault(record.seed // (record.folds or 1), {})[record.seed] = record
    scores = []
    for by_seed in passes.values():
        runs = list(by_seed.values())
        if len(runs) == (runs[0].folds or 1):
            scores.append(fmean([run.result for run in runs], weights=[run.test_images or 1 for run in runs]))
    return scores


def numbers(values: Sequence[float]) -> str:
    """Return numbers as text, with commas between them."""
    return ", ".join(f"{value:.4g}" for value in values)
