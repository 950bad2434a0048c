"""The trained model of a finished run: loading, and predicting the classes of new images."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from smallvit import record as records
from smallvit.data import DataSpec, Preprocess
from smallvit.record import Record
from smallvit.run import Run, fingerprint, rebuild

from .initialize import read_weights


class TrainedModel:
    """A trained model together with the preprocessing of its images. It predicts the classes of new images. The function `load`
    creates this object from the folder of a finished run.

        trained = smallvit.load("runs/quickstart/200/scratch/seed0-1a2b3c4d")
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

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes as a tuple, in the order of the model's outputs."""
        return self.preprocess.classes

    @torch.no_grad()
    def predict_proba(self, images: Any, batch: int = 256) -> Tensor:
        """Return the probability of each class for each image, as a tensor of shape (images, classes). `batch` is the number of
        images in one forward pass.

        Raises ValueError for images that cannot be read or do not fit, and for a model whose head was not trained on labels.
        """
        new_head = not self.run.steps and any("head." in name for name in (self.record.init_weights or {}).get("missing", ()))
        if new_head or not trains_classifier(self.run):
            raise ValueError("the head of this model was not trained on labels, so it has no classes; use .model.features(...)")
        parameter = next(self.model.parameters(), torch.zeros(()))
        pixels = self.preprocess(images)
        return torch.cat([self.model(part.to(parameter)).float().softmax(-1).cpu() for part in pixels.split(batch)])

    def predict(self, images: Any) -> list[str]:
        """Return the name of the most probable class of each image, as a list. The images are paths, PIL images, arrays or
        tensors.
        """
        return [self.classes[index] for index in self.predict_proba(images).argmax(-1).tolist()]


def trains_classifier(run: Run) -> bool:
    """Return whether the classification head of a run is trained on labels, either by the run itself or by the earlier run that
    provides its initial weights.
    """
    return run.reads_labels and (run.steps > 0 or (isinstance(run.init, Run) and trains_classifier(run.init)))


def load(folder: str | Path) -> TrainedModel:
    """Return the trained model of a finished run, which is loaded from the folder of this run. The training data are not
    needed.

    If the run uses components of your own recipe, import the recipe first: `smallvit.load_recipe(path)`.

    Raises ValueError if no run has finished in `folder`, and for weights that are damaged or of another run.
    """
    folder = Path(folder)
    record = records.read_record(folder)
    if record is None or not record.finished:
        raise ValueError(f"no run has finished in {folder}; expected a folder with {records.RECORD} and {records.WEIGHTS}")
    if problem := records.damaged_weights(folder, record):
        raise ValueError(f"{problem}; delete the folder and train the run again")
    if record.preprocess is None:
        raise ValueError(f"the record in {folder} does not say how images are preprocessed; train the run again")
    run, preprocess = rebuild(record.run), Preprocess.from_dict(record.preprocess)
    model = run.model(preprocess.size, preprocess.channels, len(preprocess.classes))
    model.load_state_dict(read_weights(folder, record.fingerprint))
    return TrainedModel(model, preprocess, run, record)


def save_weights(path: Path, model: nn.Module, run: Run, spec: DataSpec) -> dict:
    """Save the weights of `model` to the safetensors file at `path`, together with the preprocessing of its images and the hash
    of the settings of its run. `run` is the `Run` object with these settings, and `spec` describes the data set. Return a dict
    with the preprocessing and the hash of the file.

    The metadata of the file contain the fingerprint of the run and the preprocessing. The dict holds fields of the record.

    Equal runs give equal files: the metadata have only one key, because safetensors writes several keys in a random order.
    """
    from safetensors.torch import save_file

    preprocess = Preprocess.from_spec(spec).to_dict()
    description = json.dumps({"fingerprint": fingerprint(run), "preprocess": preprocess})
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    records.write_atomic(path, lambda new: save_file(tensors, new, metadata={"smallvit": description}))
    return {"preprocess": preprocess, "weights_sha256": records.file_sha256(path)}
