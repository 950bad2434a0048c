"""Export: a trained model as one file, from the bytes of images to probabilities, for ONNX Runtime or torch.export."""

import copy
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from smallvit.data import Preprocess
from smallvit.data.decode import MODES, fit_floats
from smallvit.storage import write_atomic
from smallvit.train.trained_model import ImageClassifier, TrainedModel

from .resize import bicubic_weights, linear_weights, pil_orders_passes, resize_bytes, resize_floats

LARGEST_DIFFERENCE = 1e-5  # between the probabilities of the exported file and those of the model in PyTorch
CHECKED_BATCHES = (1, 2, 5, 16)
SUFFIXES = (".onnx", ".pt2")


class PixelsToProbabilities(nn.Module):
    """A PyTorch module that is exported: it turns the pixels of images into the probabilities of the classes. Resizing,
    normalization and softmax are part of it. `classifier` is a trained model or an ensemble, of which the probabilities are
    averaged. With `resize`, images of any size are resized to that of the model, as PIL does it.

    The input has the shape (images, height, width, channels), as PIL, OpenCV and web browsers give pixels: bytes (uint8), or
    float32 for a model of float pixels.
    """

    pixel_mean: Tensor  # not "mean", a name that the exporter gives to results
    pixel_std: Tensor

    def __init__(self, classifier: ImageClassifier, resize: bool):
        super().__init__()
        trained = members(classifier)
        self.models = nn.ModuleList(each.model for each in trained)
        for name in ("mean", "std"):
            values = torch.tensor([getattr(each.preprocess, name) for each in trained])[..., None, None]
            self.register_buffer(f"pixel_{name}", values, persistent=False)
        self.size, self.resize, self.floats = classifier.preprocess.size, resize, takes_floats(classifier.preprocess)
        self.tall_first = pil_orders_passes()

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.permute(0, 3, 1, 2)
        if self.resize and self.floats:
            low, high = pixels.amin((2, 3), keepdim=True), pixels.amax((2, 3), keepdim=True)
            pixels = torch.minimum(torch.maximum(resize_floats(pixels, self.size), low.double()), high.double())
        elif self.resize:
            pixels = resize_bytes(pixels, self.size, self.tall_first)
        pixels = pixels.float() if self.floats else pixels.float() / 255
        numbers = zip(self.models, self.pixel_mean, self.pixel_std)
        return torch.stack([model((pixels - mean) / std).softmax(-1) for model, mean, std in numbers]).mean(0)


def members(classifier: ImageClassifier) -> list[TrainedModel]:
    """Return the trained models of an ensemble as a list. For a single trained model, the list contains only this model."""
    return [classifier] if isinstance(classifier, TrainedModel) else classifier.models  # pyright: ignore[reportAttributeAccessIssue]


def takes_floats(preprocess: Preprocess) -> bool:
    """Return whether a model was trained on float pixels, such as 16-bit images, and not on bytes."""
    return preprocess.dtype != "uint8"


def export(classifier: ImageClassifier, path: str | Path, *, resize: bool | None = None) -> float:
    """Write a trained model to one file for use without smallvit. Return the largest difference between the probabilities of
    this file and those of the model in PyTorch, on random images. The file computes in float32, also for a model of another
    precision; it is compared with a float32 copy of such a model on the CPU. The model itself is left unchanged.

        smallvit.export(smallvit.load("runs/..."), "model.onnx")

    The input is the pixels of one or more images, shape (images, height, width, channels), as bytes (uint8), or as float32 for
    a model of float pixels. The output is the probabilities of the classes, shape (images, classes). Resizing, normalization
    and softmax are part of the file. The names of the classes, the preprocessing and the fingerprint of the run are in its
    metadata.

    classifier  a `TrainedModel`, or an `Ensemble`, of which the probabilities are averaged
    path        the file: `.onnx` for ONNX Runtime and other programs, `.pt2` for `torch.export.load`
    resize      True: images of any height and width, which are resized like files in `predict`. False: only images of the size
                of the model. None: True, except for images with transparency (4 channels) and other numbers of channels

    Raises ValueError for another suffix, for missing packages, for a model without a trained head, for a model that cannot be
    exported, and if a difference is above 1e-5.
    """
    if not isinstance(classifier, ImageClassifier):
        raise ValueError(
            f"got a {type(classifier).__name__}; expected a trained model, such as smallvit.load(folder); a SmallViTClassifier "
            "cannot be exported: save it with joblib, or train its run with smallvit.fit and load that"
        )
    path, preprocess = Path(path).expanduser(), classifier.preprocess
    check_target(path)
    can_resize = preprocess.channels in (1, 3)
    if resize and not can_resize:
        raise ValueError(f"images with {preprocess.channels} channels cannot be resized inside the file; use fixed-size input")
    classifier.check_classes()
    classifier = copy.deepcopy(classifier)
    for each in members(classifier):
        each.model.float().cpu()
    module = PixelsToProbabilities(classifier, can_resize if resize is None else resize).eval()
    with torch.no_grad(), quiet():
        content, run = (onnx_file if path.suffix == ".onnx" else program_file)(module, description(classifier, module.resize))
        difference = largest_difference(classifier, run, module.resize)
    if not difference <= LARGEST_DIFFERENCE:
        raise ValueError(
            f"{path} was not written: its probabilities differ from those of the model by up to {difference:.1e}; expected at "
            f"most {LARGEST_DIFFERENCE:.0e}"
        )
    write_atomic(path, lambda new: new.write_bytes(content))
    return difference


def check_target(path: str | Path):
    """Raise ValueError if no model can be written to the file `path`: if it has another suffix than `.onnx` or `.pt2`, if it is
    a folder, and if a package that the export needs is missing.
    """
    path = Path(path).expanduser()
    if path.suffix not in SUFFIXES:
        raise ValueError(f"got the file {path}; expected a name that ends in .onnx or .pt2")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; expected the name of a file to write")
    if path.suffix == ".onnx":
        check_packages()


def check_packages():
    """Raise ValueError if a package that the export to ONNX needs is missing."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401  torch.onnx.export needs it
    except ImportError as error:
        raise ValueError(f"export to ONNX needs the package {error.name}: pip install 'smallvit[export]'") from error


Runner = Callable[[Tensor], Tensor]  # computes probabilities from pixels with the exported file


def onnx_file(module: PixelsToProbabilities, metadata: dict[str, str]) -> tuple[bytes, Runner]:
    """Return the content of an ONNX file that computes what `module` computes, and a function that runs it in ONNX Runtime.
    `metadata` are texts that are stored in the file.

    Raises ValueError if a package is missing or the model cannot be exported.
    """
    check_packages()
    import onnx
    import onnxruntime

    example, shapes = example_input(module)
    options = {"input_names": ["images"], "output_names": ["probabilities"], "verbose": False}
    try:
        program: Any = torch.onnx.export(
            module, (example,), dynamo=True, dynamic_shapes=(shapes,), custom_translation_table=translations(), **options
        )
        proto = program.model_proto
        onnx.helper.set_model_props(proto, metadata)
        proto.doc_string = metadata["description"]
        content = proto.SerializeToString()
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    except Exception as error:  # torch, onnx and ONNX Runtime each raise their own classes
        message = not_exported(module, "ONNX", error)
        raise ValueError(message) from error
    return content, lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def program_file(module: PixelsToProbabilities, metadata: dict[str, str]) -> tuple[bytes, Runner]:
    """Return the content of a file for `torch.export.load` that computes what `module` computes, and a function that runs it.
    `metadata` are texts that are stored in the file, as `smallvit.json`.

    Raises ValueError if the model cannot be exported.
    """
    example, shapes = example_input(module)
    file = BytesIO()
    try:
        program = torch.export.export(module, (example,), dynamic_shapes=(shapes,))
        torch.export.save(program, file, extra_files={"smallvit.json": json.dumps(metadata)})
        file.seek(0)
        loaded = torch.export.load(file).module()
    except Exception as error:  # torch raises many classes
        message = not_exported(module, "torch.export", error)
        raise ValueError(message) from error
    return file.getvalue(), loaded


def example_input(module: PixelsToProbabilities) -> tuple[Tensor, dict[int, Any]]:
    """Return an example input for the export of `module`, and which of its axes may have another length later, as a dict from
    the axis to its name.
    """
    margin = 3 if module.resize else 0
    shape = (2, module.size[0] + margin, module.size[1] + 2 * margin, module.pixel_mean.shape[1])
    axes = {0: "n", 1: "h", 2: "w"} if module.resize else {0: "n"}
    dtype = torch.float32 if module.floats else torch.uint8
    return torch.zeros(shape, dtype=dtype), {axis: torch.export.Dim(name) for axis, name in axes.items()}


def not_exported(module: nn.Module, target: str, error: Exception) -> str:
    """Return an error message for a model that cannot be exported. It names the classes of its parts, and `target`, such as
    "ONNX". The end of the text of `error` gives the reason.
    """
    parts = sorted({type(part).__name__ for part in module.modules() if type(part).__module__.split(".")[0] != "torch"})
    reason = " ".join(str(error).split())[-300:]
    return f"the model cannot be exported to {target} ({type(error).__name__}: ...{reason}); its parts: {', '.join(parts)}"


def translations() -> dict[Any, Callable]:
    """Return how operators of PyTorch that its exporter does not know are written in ONNX, as a dict from the operator to a
    function. These are stable sorting, which token merging and pruning use, and resizing with antialiasing, which ONNX Runtime
    computes differently at the borders of an image.
    """
    import onnx
    from onnxscript import opset18

    op: Any = opset18

    def sort(self: Any, *, stable: Any = None, dim: int = -1, descending: bool = False) -> Any:
        # TopK gives equal values in the order of their indices, as a stable sort does
        length = op.Gather(op.Shape(self), op.Constant(value_ints=[dim]))
        return op.TopK(self, length, axis=dim, largest=int(descending), sorted=1)

    def resize_with(weights: Callable[[int, int], Tensor]) -> Callable:
        def constant(before: Any, after: Any) -> Any:
            return op.Constant(value=onnx.numpy_helper.from_array(weights(int(before), int(after)).float().numpy()))

        def resize(self: Any, output_size: Any, align_corners: bool = False, *scales: Any) -> Any:
            (rows, columns), (h, w) = self.shape[-2:], output_size
            return op.MatMul(op.MatMul(constant(rows, h), self), op.Transpose(constant(columns, w), perm=[1, 0]))

        return resize

    aten = torch.ops.aten
    return {
        aten.sort.stable: sort,
        aten._upsample_bicubic2d_aa.default: resize_with(bicubic_weights),
        aten._upsample_bilinear2d_aa.default: resize_with(linear_weights),
    }


def description(classifier: ImageClassifier, resize: bool) -> dict[str, str]:
    """Return what an exported file says about its model, as a dict of texts: classes, preprocessing, fingerprints of the runs,
    and a description of input and output. `resize` says whether the file takes images of any size.
    """
    from smallvit import __version__

    trained, preprocess = members(classifier), classifier.preprocess
    (h, w), channels = preprocess.size, preprocess.channels
    models = f"the mean of {len(trained)} models" if len(trained) > 1 else "one model"
    size = f"any height and width; they are resized to {h} x {w}" if resize else f"height {h}, width {w}"
    floats = "float32 as in training (8 bits divided by 255, 16 bits by 65535; floats and DICOM units as they are)"
    kind = floats if takes_floats(preprocess) else "bytes from 0 to 255 (uint8)"
    return {
        "description": (
            f"Image classifier, trained with smallvit {__version__}: {trained[0].record.arm}, {models}. Input: images (n, "
            f"height, width, {channels}), {kind}, {size}. Output: probabilities (n, {len(classifier.classes)}) in the order of "
            "the entry classes beside this description. Normalization is part of the model."
        ),
        "classes": json.dumps(list(classifier.classes), ensure_ascii=False),
        "preprocess": json.dumps([each.preprocess.to_dict() for each in trained] if len(trained) > 1 else preprocess.to_dict()),
        "fingerprint": ",".join(each.record.fingerprint for each in trained),
        "seed": ",".join(str(each.record.seed) for each in trained),
    }


def largest_difference(classifier: ImageClassifier, run: Runner, resize: bool) -> float:
    """Return the largest difference between the probabilities that `run` computes with an exported file and those of
    `classifier` in PyTorch. The images are random, in batches of several sizes. If the file resizes images (`resize`), images
    of three other sizes are compared, too: they are resized by PIL for `classifier`.
    """
    generator, preprocess = torch.Generator().manual_seed(0), classifier.preprocess
    (h, w), c, floats = preprocess.size, preprocess.channels, takes_floats(preprocess)

    def draw(*shape: int) -> Tensor:
        if floats:
            return torch.rand(shape, generator=generator)
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)

    batches = [draw(n, h, w, c) for n in CHECKED_BATCHES]
    pairs: list[tuple[Tensor, Any]] = [(images, images.numpy()) for images in batches]
    for shape in ((3 * h, 2 * w), (h // 2 + 1, w), (4 * h, w // 2 + 1)) if resize else ():
        images = draw(1, *shape, c)
        same = fit_floats(images[0].numpy(), (h, w), MODES[c], "the image") if floats else as_pil(images[0])
        pairs.append((images, same))
    return max((run(images) - classifier.predict_proba(same)).abs().max().item() for images, same in pairs)


def as_pil(image: Tensor) -> Any:
    """Return a PIL image with the pixels of a uint8 tensor (height, width, channels), with 1 channel (gray) or 3 (RGB)."""
    from PIL import Image

    return Image.fromarray((image[..., 0] if image.shape[-1] == 1 else image).numpy())


@contextmanager
def quiet() -> Iterator[None]:
    """Context manager that hides the messages of PyTorch's exporter, which are for its developers."""
    names = ("torch.onnx", "torch.export", "torch.utils._sympy", "onnxscript", "onnx_ir")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)
