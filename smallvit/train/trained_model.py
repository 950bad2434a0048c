"""The trained model of a finished run: loading, and predicting the classes of new images."""

import copy
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from numbers import Integral
from pathlib import Path
from stat import S_IMODE
from typing import Any

import torch
from torch import Tensor, nn

from smallvit import record as records
from smallvit.components import function, options
from smallvit.data import DataSpec, Preprocess
from smallvit.data.images import Images, normalize
from smallvit.evaluate import frozen
from smallvit.evaluate.hooks import feature_reader
from smallvit.flops import without_memory
from smallvit.numerics import torch_defaults
from smallvit.random_weights import is_builtin
from smallvit.record import Record
from smallvit.run import Run, fingerprint, rebuild
from smallvit.shapes import printable
from smallvit.storage import failures_named, file_sha256, flush_to_disk, parse_json, read_bounded

from .initialize import WeightsFile, shapes_of
from .own_numbers import numbers_of, own_parts, restore_numbers

HUB = "hf:"  # an address on the Hugging Face Hub begins with it: hf:user/name or hf:user/name@revision
CONFIG = "config.json"  # in a shared folder: a short description of the model, and the hashes of the other files
MOST_VALUES, MOST_BLOCKS = 2**24, 64  # of an image, and blocks of a model, whatever the weights say
MOST_BYTES = 2**24  # of config.json
CHECKED = 8  # images on which a trained model and the one that is loaded from its weights must agree
RELOADED = 1e-3  # of the largest output: how much they may differ


class ImageClassifier(ABC):
    """Base class of objects that predict the classes of images: one trained model, or several that predict together. A subclass
    has the attribute `preprocess`, which turns images into pixels, and the method `probabilities`.
    """

    preprocess: Preprocess

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes as a tuple, in the order of the probabilities."""
        return self.preprocess.classes

    @abstractmethod
    def probabilities(self, pixels: Tensor) -> Tensor:
        """Return the probability of each class for each image of one batch, as a tensor of shape (images, classes). `pixels` is
        what `preprocess.pixels` returns, shape (images, channels, height, width).
        """

    @abstractmethod
    def check_classes(self):
        """Raise ValueError if a head was not trained on labels, so that its outputs have no meaning."""

    @torch.no_grad()
    def predict_proba(self, images: Any, batch: int = 256) -> Tensor:
        """Return the probability of each class for each image, as a tensor of shape (images, classes). `batch` is the number of
        images in one forward pass.

        A list of files is read batch by batch, so its length is not limited by the memory.

        Raises ValueError for images that cannot be read or do not fit, for a batch that is no whole number of at least 1, and
        for a model whose head was not trained on labels.
        """
        self.check_classes()
        return torch.cat([self.probabilities(pixels) for pixels in split_images(images, self.preprocess, batch)])

    def predict(self, images: Any) -> list[str]:
        """Return the name of the most probable class of each image, as a list. The images are paths, PIL images, arrays or
        tensors, or a list or generator of them, such as `sorted(Path("scans").glob("*.png"))`.
        """
        return [self.classes[index] for index in self.predict_proba(images).argmax(-1).tolist()]


class TrainedModel(ImageClassifier):
    """A trained model together with the preprocessing of its images. It predicts the classes of new images. The function `load`
    creates this object from the folder of a finished run.

        trained = smallvit.load("runs/quickstart/50/scratch/seed0-1a2b3c4d")
        trained.predict(["one.png", "two.png"])         # names of classes
        trained.predict_proba(pixels)                   # probabilities, shape (images, classes)

    Images are paths, PIL images, or arrays and tensors with pixels as bytes or in [0, 1]; see `Preprocess`. The attribute
    `model` is the bare PyTorch module in evaluation mode. Its input is `preprocess(images)`: it gives wrong results for raw
    pixels.

    model        the PyTorch module; input (images, channels, height, width), normalized
    classes      the names of the classes, in the order of the outputs
    preprocess   turns images into the input of `model`
    run, record  the settings and the record of the run
    """

    def __init__(self, model: nn.Module, preprocess: Preprocess, run: Run, record: Record):
        self.model, self.preprocess, self.run, self.record = model.eval(), preprocess, run, record

    def __repr__(self) -> str:
        """Return the class of the model, its classes, and the first score on test images, if there is one."""
        names = ", ".join(self.classes[:3]) + f" and {len(self.classes) - 3} more" * (len(self.classes) > 3)
        scores = [f", {name} {value:.4g}" for name, value in [*(self.record.test or {}).items()][:1]]
        return f"TrainedModel({type(self.model).__name__}, classes {names}{''.join(scores)})"

    def check_classes(self):
        new_head = not self.run.steps and any("head." in name for name in (self.record.init_weights or {}).get("missing", ()))
        if new_head or not trains_classifier(self.run):
            raise ValueError(
                "the head of this model was not trained on labels, so it has no classes; train a run with this one as init=... "
                "on labels, or use .model.features(...)"
            )

    @torch.no_grad()
    def probabilities(self, pixels: Tensor) -> Tensor:
        parameter = next(self.model.parameters(), torch.zeros(()))
        normalized = normalize(pixels, self.preprocess.mean, self.preprocess.std)
        return self.model(normalized.to(parameter)).float().softmax(-1).cpu()


def split_images(images: Any, preprocess: Preprocess, batch: int) -> Iterator[Tensor]:
    """Yield the pixels of images in batches, as tensors of shape (batch, channels, height, width). `images` are paths, PIL
    images, arrays or tensors, `preprocess` turns them into pixels, and `batch` is the largest number of images in a batch.

    Of a list or generator, only as many items as a batch has images are converted at a time.

    Raises ValueError if `batch` is no whole number of at least 1.
    """
    check_batch(batch)
    images = list(images) if isinstance(images, Iterator) else images
    is_long = isinstance(images, list | tuple) and len(images) > batch
    parts = [images[start : start + batch] for start in range(0, len(images), batch)] if is_long else [images]
    for part in parts:
        yield from preprocess.pixels(part).split(batch)


def check_batch(batch: int):
    """Raise ValueError if `batch`, the number of images in one forward pass, is no whole number of at least 1."""
    if isinstance(batch, bool) or not isinstance(batch, Integral) or batch < 1:
        raise ValueError(f"batch is {batch!r}; expected the number of images in one forward pass, 1 or more, such as batch=64")


def trains_classifier(run: Run) -> bool:
    """Return whether the classification head of a run is trained on labels, either by the run itself or by the earlier run that
    provides its initial weights.
    """
    return run.reads_labels and (run.steps > 0 or (isinstance(run.init, Run) and trains_classifier(run.init)))


def load(folder: str | Path) -> TrainedModel:
    """Return the trained model of a finished run, which is loaded from the folder of this run. The training data are not
    needed.

    `folder` may also be a folder that `smallvit share` has written, or the address of one on the Hugging Face Hub, such as
    "hf:user/name" or "hf:user/name@revision". Only safetensors and JSON files are read.

    If the run uses components of your own recipe, load the recipe first: `smallvit.load_recipe(path)`. A shared model with
    such components is refused.

    Raises ValueError if no run has finished in `folder`, for files that are damaged or of another run, and for a model on the
    hub that cannot be downloaded.
    """
    if str(folder).startswith(HUB):
        folder = download(str(folder))
    folder = Path(folder).expanduser()
    shared = (folder / CONFIG).is_file()
    if shared:
        check_shared_files(folder)
    record = records.read_record(folder)
    if record is None or not record.finished:
        raise ValueError(f"no run has finished in {folder}; expected a folder with {records.RECORD} and {records.WEIGHTS}")
    again = "download it again" if shared else "delete the folder and train the run again"
    if problem := records.damaged_weights(folder, record):
        raise ValueError(f"the model cannot be loaded: {problem}; {again}")
    if record.preprocess is None:
        raise ValueError(f"the record in {folder} does not say how images are preprocessed; train the run again")
    if shared and (foreign := custom_components(record.run)):
        raise ValueError(
            f"the shared model in {folder} needs code that is not part of smallvit: {', '.join(foreign)}; smallvit never runs "
            "code of a shared model; ask its author for the recipe and train it yourself"
        )
    own: list[str] = []
    try:
        preprocess = Preprocess.from_dict(record.preprocess)
        own = sorted({".".join(name.split(".")[:2]) for name in custom_components(record.run)})
        run = rebuild(record.run)
        changed = fingerprint(run) != record.fingerprint
    except (ValueError, AttributeError, TypeError, KeyError, OverflowError) as error:  # from settings of a stranger
        reason = printable(str(error))
        if own and isinstance(error, ValueError):
            raise ValueError(
                f"the model in {folder} needs code of {' and '.join(own)} as it was when the run was trained: load the recipe "
                "first with smallvit.load_recipe(path), or give RECIPE:ARM and --seed in place of the folder, and undo changes "
                f"of this code; nothing is lost ({reason:.300})"
            ) from error
        raise ValueError(f"the settings in {folder / records.RECORD} are not valid: {reason:.500}; {again}") from error
    if changed:
        raise ValueError(f"the settings in {folder / records.RECORD} were changed after training; {again}")
    file = WeightsFile(folder, record.fingerprint)
    if too_large(run, preprocess, file.shapes):
        raise ValueError(f"{file.path} has too few weights for the model in {records.RECORD}; {again}")
    make = partial(run.model, preprocess.size, preprocess.channels, len(preprocess.classes))
    if wrong := sorted(name for name, _ in file.shapes.items() ^ shapes_of(without_memory(make)).items()):
        raise ValueError(f"{file.path} does not fit its run: {', '.join(wrong[:5]):.200}; {again}")
    with torch_defaults():
        model = make()
        model.load_state_dict(file.read(file.shapes))
    return TrainedModel(model, preprocess, run, record)


def too_large(run: Run, preprocess: Preprocess, shapes: dict[str, tuple[int, ...]]) -> bool:
    """Return whether the model of a run must be much larger than its weights, or its images are huge. A record from a stranger
    may ask for any size. `shapes` are the shapes of the weights, and `preprocess` says how large the images are.

    No size in the options of a model exceeds its number of weights, and a model with n weights has at most n blocks. Images
    may have up to 2^24 values. The options of a model of a user's own are not checked: they may be a seed.
    """
    most = max(sum(math.prod(shape) for shape in shapes.values()), MOST_VALUES)
    limits = {"depth": len(shapes) + MOST_BLOCKS, "count": len(shapes) + MOST_BLOCKS}
    images = math.prod(preprocess.size) * preprocess.channels
    return images > MOST_VALUES or any(value > limits.get(name, most) for name, value in sizes_in(run.model))


def sizes_in(model: Callable) -> Iterator[tuple[str, int]]:
    """Yield the name and the value of each option of a model that is a whole number, also those of a model inside a model.
    Models of a user's own are left out.
    """
    own = function(model).__module__.partition(".")[0] != "smallvit"
    for name, option in options(model).items():
        if type(option.default) is int and not own:
            yield name, option.default
        elif name == "of" and callable(option.default):
            yield from sizes_in(option.default)


def download(address: str) -> Path:
    """Download a shared model from the Hugging Face Hub, and return the folder with its files. `address` is "hf:user/name",
    or "hf:user/name@revision" with a branch, a tag or a commit. Files that were downloaded before are not downloaded again.

    Raises ValueError for another form of address, and if the download fails.
    """
    import huggingface_hub

    name, _, revision = address.removeprefix(HUB).partition("@")
    if name.count("/") != 1 or not all(name.split("/")):
        raise ValueError(f"got the address {address!r}; expected {HUB}user/name or {HUB}user/name@revision")
    try:
        files = [CONFIG, records.RECORD, records.WEIGHTS]
        return Path(huggingface_hub.snapshot_download(name, revision=revision or None, allow_patterns=files))
    except Exception as error:  # network, hub and login: each library raises its own class
        raise ValueError(
            f"{address} could not be downloaded ({type(error).__name__}: {error}); check the name, the network and, for a "
            "private model, your login (hf auth login)"
        ) from error


def check_shared_files(folder: Path):
    """Raise ValueError if a file in the folder of a shared model is not the one that was shared. The hashes of the files are in
    `config.json`, which `smallvit share` writes.
    """
    try:
        hashes = parse_json(read_bounded(folder / CONFIG, MOST_BYTES))["files"]
        there = [name for name in hashes if (folder / Path(name).name).is_file()]
        wrong = [name for name in there if file_sha256(folder / Path(name).name) != hashes[name]]
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ValueError(f"{folder / CONFIG} is damaged or not of smallvit ({error!r}); download the model again") from error
    missing = [name for name in (records.RECORD, records.WEIGHTS) if name not in hashes or not (folder / name).is_file()]
    for names, problem in ((missing, "missing"), (wrong, "different from what was shared")):
        if names:
            raise ValueError(f"{folder}: {', '.join(names)} is {problem}, by {CONFIG}; download the model again")


def custom_components(described: Any) -> list[str]:
    """Return the full names of all components in the description of a run that are not part of smallvit, such as a class of a
    recipe file. `described` is the run as JSON data, or a part of it.
    """
    if isinstance(described, list):
        return sorted({name for item in described for name in custom_components(item)})
    if not isinstance(described, dict):
        return []
    names = [described.get("call"), described.get("make")]
    own = [str(name) for name in names if name is not None and not str(name).startswith("smallvit.")]
    return sorted({*own, *custom_components(list(described.values()))})


def check_reloaded(model: nn.Module, trained: nn.Module, run: Run, images: Images):
    """Raise ValueError if a trained model with classes of a user's own is not the one that `load` will make from its weights,
    because it has changed a tensor or a number that is not saved. `run` is the `Run` of the model. The outputs for some of
    `images`, the training images, are compared. `trained` is the model that the optimizer changes: the average (EMA) of its
    weights in `model` is compared with the numbers that `trained` has in the end, such as a temperature.
    """
    if not len(images) or all(map(is_builtin, model.modules())):
        return
    if trained is not model:
        model, ended = copy.deepcopy(model), own_parts(trained)
        for name, part in own_parts(model).items():
            last = ended.get(name, part)
            progress = {"progress": last.progress} if hasattr(last, "progress") else {}
            restore_numbers(part, numbers_of(last) | progress)
    spec = images.spec
    kind = "features" if not trains_classifier(run) and hasattr(model, "features") else "logits"
    found = []
    with frozen(model) as reference:
        device = reference.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):  # evaluators may draw afterwards
        with torch_defaults():
            again = run.model(spec.size, spec.channels, len(spec.classes))
        if wrong := sorted(name for name, _ in shapes_of(model).items() ^ shapes_of(again).items()):
            raise ValueError(
                "the trained model has other weights than a new one, so that load(folder) could not read them: "
                f"{', '.join(wrong[:5]):.200}; expected a model that makes all parameters and buffers in its constructor"
            )
        again.load_state_dict(model.state_dict())
        again.to(device)
        pixels = next(images.batches(CHECKED))[0].to(reference)
        for one in (model, again, model):
            torch.manual_seed(0)  # a model may draw random numbers also when it is evaluated
            with frozen(one):
                found.append((one if kind == "logits" else feature_reader(one, "head", 1, "after"))(pixels))
    scored, loaded, same = found
    limit = RELOADED * scored.abs().max()
    if not (scored - same).abs().max() <= limit:  # it changes from call to call, so nothing can be said
        return
    if not (scored - loaded).abs().max() <= limit:
        raise ValueError(
            f"the trained model gives other {kind} than the model that load(folder) makes from its weights, so its score would "
            f"be that of another model: {', '.join(unsaved(model, again)) or 'something in it'} is not saved; expected "
            "parameters, or register_buffer(name, tensor) without persistent=False"
        )


def unsaved(model: nn.Module, again: nn.Module) -> list[str]:
    """Return the names of the tensors and numbers in a model that are not in its state dict and differ from those in `again`,
    such as `Centered.center`.
    """
    names, made = [], dict(again.named_modules())
    for path, module in model.named_modules():
        present, other = (vars(one) | one._buffers for one in (module, made.get(path, again)))
        for name, value in present.items():
            before = other.get(name)
            if isinstance(value, Tensor) and isinstance(before, Tensor):
                changed = value.shape != before.shape or not torch.equal(value, before.to(value))
            else:
                changed = isinstance(value, bool | int | float) and name != "training" and value != before
            names += [f"{type(module).__name__}.{name}"] if changed else []
    return names


def save_weights(path: Path, model: nn.Module, run: Run, spec: DataSpec) -> dict:
    """Save the weights of `model` to the safetensors file at `path`, together with the preprocessing of its images and the hash
    of the settings of its run. `run` is the `Run` object with these settings, and `spec` describes the data set. Return a dict
    with the preprocessing and the hash of the file.

    The metadata of the file contain the fingerprint of the run and the preprocessing. The dict holds fields of the record.

    Equal runs give equal files: the metadata have only one key, because safetensors writes several keys in a random order.

    The file is not moved into place: `publish` does that. Raises NotWritten if it cannot be written.
    """
    from safetensors.torch import save_file

    preprocess = Preprocess.from_spec(spec).to_dict()
    description = json.dumps({"fingerprint": fingerprint(run), "preprocess": preprocess})
    # copies, because the file cannot hold two names of one tensor (tied weights)
    tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in model.state_dict().items()}
    with failures_named(path):
        path.write_bytes(b"")
        mode = S_IMODE(path.stat().st_mode)  # of an ordinary new file; safetensors lets nobody else read the file
        save_file(tensors, path, metadata={"smallvit": description})
        with suppress(OSError):  # a file system without modes
            path.chmod(mode)
        flush_to_disk(path)
    return {"preprocess": preprocess, "weights_sha256": file_sha256(path)}
