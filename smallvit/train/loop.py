"""The training loop: `train` calls `train_step` until the last step; 12 times `validate`; every 10 s a checkpoint."""

import copy
import functools
import json
import math
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.weight_norm import WeightNorm

from smallvit.augment import Batch
from smallvit.data import Dataset, Images, Subset
from smallvit.data.images import joined
from smallvit.evaluate import Splits, accuracy, frozen, knn
from smallvit.evaluate.splits import NotFinite
from smallvit.flops import footprint
from smallvit.numerics import DEFAULT, Numerics, NumericsContext
from smallvit.objectives import Objective
from smallvit.objectives.collapse import Collapse, Monitor, collapse_statistics
from smallvit.optim import buffers_of, decay_groups, ema_update, learning_rate, tensor_pairs
from smallvit.optimizers import AdamW
from smallvit.record import CURVE
from smallvit.rng import stream
from smallvit.run import Run
from smallvit.vit import ViT

from . import checkpoint
from .batches import Source, draw_batch
from .cuda_graph import GradientStep, reason_against
from .evaluation import evaluation_numerics
from .flat_adamw import FlatAdamW, lay_apart, lay_in_a_row
from .initialize import initial_objective
from .own_numbers import counted_once, own_parts
from .trace import Trace, digest, distance

CHECKS = 12  # validations of a run, evenly spaced; the last one after the last step
CHECKPOINT_SECONDS = 10.0
MOST_REPEATS = 100  # of one image in a batch

Watch = Callable[[int, float | None], None]
"""Called after each step with (step, validation accuracy); the accuracy is None between the checks."""


def is_checked(step: int) -> bool:
    """Return whether the state of an optimizer is checked in this step, counted from 0: the 1st, 2nd, 4th, 8th and so on."""
    return step & (step + 1) == 0


def train(members: Sequence["Training"], train_step: Callable[[], None], watch: Watch):
    """Train one run, or several runs together, until the last step. `members` are the `Training` objects of these runs. The
    function `train_step` takes one step of all of them, and the function `watch` is called after each step.

    Every 10 seconds a checkpoint is written, one for all runs, to the file of the first one.

    A run whose loss is not finite (FloatingPointError), or whose features collapse (`Collapse`), keeps this error in its
    attribute `failure`, and the others are trained on. Raises the error if no run is left.
    """
    first, going = members[0], [*members]
    for member in members:
        member.objective.train()
        write_curve(member.checkpoint_file, member.curve)
    saved = last = time.perf_counter()
    while first.step < first.run.steps and not first.stopped_early():
        train_step()
        if not first.run.reads_labels:
            going = without_failed(going, Training.check_collapse)
        if first.step in first.checks:
            going = without_failed(going, Training.validate)
            for member in going:
                write_curve(member.checkpoint_file, member.curve[-1:], append=True)
        watch(first.step, going[0].curve[-1][2] if first.step in first.checks else None)
        now = time.perf_counter()
        for member in members:
            member.seconds += (now - last) / len(members)
        last = now
        if now - saved > CHECKPOINT_SECONDS and first.checkpoint_file != Path():
            checkpoint.save(members, first.checkpoint_file)
            saved = last = time.perf_counter()  # a large checkpoint takes long, which is no training
    for member in members:
        if member.best is not None:
            member.model.load_state_dict(member.best)


def without_failed(members: Sequence["Training"], check: Callable[["Training"], None]) -> list["Training"]:
    """Call the function `check` for each run, and return the runs for which it raised no FloatingPointError and no `Collapse`.
    The others keep the error. Raises the first error if no run is left.
    """
    for member in members:
        try:
            check(member)
        except (Collapse, FloatingPointError) as error:
            member.failure = error
            member.loss.fill_(math.nan)  # a checkpoint keeps this, so that the run also fails if it is continued from there
    going = [member for member in members if member.failure is None]
    if not going and members[0].failure:
        raise members[0].failure
    return going


def write_curve(checkpoint_file: Path, points: Sequence[Sequence], append: bool = False):
    """Write points of a learning curve to the file `curve.jsonl` beside the checkpoint file of a run, one JSON line for each,
    so that other programs can follow the run. Each point in `points` is [step, training loss, validation accuracy]. With
    `append`, the points are added to those in the file; otherwise they replace them, as when a training continues from a
    checkpoint. Nothing is written for a `Training` without a checkpoint file (an empty path).

    The file is for following only. If it cannot be written, the training goes on without it.
    """
    if checkpoint_file == Path():
        return
    with suppress(OSError), (checkpoint_file.parent / CURVE).open("a" if append else "w", encoding="utf-8") as file:
        file.writelines(json.dumps(dict(zip(("step", "loss", "val"), point))) + "\n" for point in points)


def choose_device(device: str) -> torch.device:
    """Return the torch device with the name `device`, such as "cpu" or "cuda". "auto" is the GPU of this machine if it has one,
    otherwise the CPU. Raise ValueError for a name that torch does not know and for a GPU that it does not find.
    """
    if device == "auto":
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator or torch.device("cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device is {device!r}; expected cpu, cuda, mps or auto") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}.get(chosen.type, bool)
        there = chosen.index < torch.cuda.device_count() if chosen.type == "cuda" and chosen.index else found()
        if chosen.type in ("cuda", "mps") and not there:
            raise ValueError(f"device is {device!r}, but torch finds no such GPU on this machine; use the device cpu")
    return chosen


class Training:
    """The state of one training run: model, optimizer, data, number of the current step, and the learning curve up to this
    step.

    `init` and `teacher` are the folders of the finished runs that the run depends on. `device` may be "auto". Once its
    attribute `checkpoint_file` is set, checkpoints are written to this file, with `origin`, a text that identifies the code and
    the data.

    Raises ValueError for settings that do not fit the data.
    """

    optimizer: Any

    def __init__(
        self,
        run: Run,
        data: Dataset,
        subset: Subset,
        device: str,
        init: Path | None = None,
        teacher: Path | None = None,
        numerics: Numerics = DEFAULT,
    ):
        self.run, self.spec, self.subset = run, data.spec, subset
        self.device = choose_device(device)
        objective, teacher_model, self.init_weights, self.init_hashes = initial_objective(run, data.spec, init, teacher)
        self.objective: Any = objective.to(self.device)
        if run.steps and getattr(self.objective.model, "divides_batches", False):
            self.objective.model.check_batch(run.batch)
        self.trace = Trace(digest(self.objective.model.state_dict().items()))
        self.optimizer = None
        self.flat: FlatAdamW | None = None  # takes the steps of `optimizer` if the kernel is "native"
        if run.steps and not any(p.requires_grad for p in self.objective.parameters()):
            name = type(self.objective.model).__name__
            raise ValueError(f"{name} has no weights to train and the run has steps={run.steps}; expected steps=0")
        if run.steps:
            groups, self.rates = decay_groups(self.objective, run.weight_decay, run.layer_decay)
            self.optimizer = run.optimizer(groups)
            self.optimizer.check_objective(self.objective)
        averages = run.ema or (self.optimizer and self.optimizer.averages)
        self.ema_model = copy.deepcopy(self.objective.model).requires_grad_(False) if averages else None
        self.use(numerics)
        started = time.perf_counter()
        self.images = self.training_images(data, teacher_model)
        self.pool = self.unlabelled_images(data)
        self.count_classes()
        self.parameters = [p for p in self.objective.parameters() if p.requires_grad]
        self.step, self.seconds, self.loss = 0, time.perf_counter() - started, torch.zeros((), device=self.device)
        self.curve: list[list] = []  # [step, mean loss since the last check, validation accuracy]
        self.best: dict[str, Tensor] | None = None  # weights of the best check, for early stopping
        self.failure: Exception | None = None  # why this run of a stack has failed; see `train`
        self.health: list[dict] = []  # collapse statistics at each check, for runs without labels
        self.monitor = Monitor(run.steps)
        self.curves = True  # whether the validation accuracy is measured during training
        self.stacked: int | None = None  # how many runs were trained together with this one, at any time
        self.processes: int | None = None  # how many processes train this run together (`fit_parallel`); None: one
        self.origin, self.checkpoint_file = "", Path()

    def use(self, numerics: Numerics):
        """Compute the training steps with `numerics`. This is called before the first step, and again if the run continues from
        a checkpoint that was begun with other numerics.

        With the kernel "native" the optimizer AdamW takes its steps with few large tensors (`FlatAdamW`). Like the kernel, this
        changes rounding and speed only; so the default rounds as it always has. Other optimizers take their own steps.
        """
        self.numerics, self.joins_parameters = numerics, numerics.kernel == "native" and type(self.optimizer) is AdamW
        for group in self.optimizer.param_groups if self.optimizer else ():
            (lay_in_a_row if self.joins_parameters else lay_apart)(group["params"])
        self.find_averaged()

    def find_averaged(self):
        """Note which tensors the average (EMA) of the weights follows now, and which modules have buffers."""
        model = self.objective.model
        self.ema_pairs = tensor_pairs(self.ema_model, model) if self.ema_model is not None else []
        self.buffer_owners = [module for module in model.modules() if module._buffers] if self.ema_pairs else []
        self.buffers = buffers_of(self.buffer_owners)

    def count_classes(self):
        """Tell the objective how many training images each class has, unless their labels are hidden from the run."""
        if self.run.reads_labels and self.label_mask:
            self.objective.set_class_counts(self.images.labels.bincount(minlength=len(self.spec.classes)))

    def training_images(self, data: Dataset, teacher: nn.Module | None) -> Images:
        """Return the images on which the run is trained, moved to its device. `data` is the data set. Without `run.unlabelled`,
        they are the labelled images of the run. With it, they are all training images of the data set except the validation
        images; these include the labelled ones, and the images whose class is not known. If their labels are to be guessed, the
        model does this as it is before the first step or, in a run without `init`, the `teacher`.

        Raises ValueError for a batch that would contain each image more than 100 times.
        """
        run, labelled = self.run, self.subset.train
        images = labelled
        if run.unlabelled:
            images = joined(data.subset(labels=None, val=run.val, seed=run.seed).train, data.unlabelled)
        if run.steps and run.batch > MOST_REPEATS * len(images):
            most = MOST_REPEATS * len(images)
            raise ValueError(f"batch={run.batch} for {len(images)} training images; expected at most {most}")
        labels = images.labels
        if run.pseudo_labels:
            model = self.objective.model if run.init or teacher is None else teacher.to(self.device)
            labels = run.pseudo_labels(model, labelled, replace(images, labels=torch.zeros_like(labels)))
            if not isinstance(labels, Tensor) or labels.dtype != torch.int64 or labels.shape != images.labels.shape:
                found = f"{labels.dtype} {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
                expected = f"an int64 tensor with one label for each of {len(images)} images"
                raise ValueError(f"pseudo_labels returned {found}; expected {expected}")
        return Images(images.images.to(self.device), labels.to(self.device), self.spec)

    def unlabelled_images(self, data: Dataset) -> Images | None:
        """Return the images that the objective sees beside the labelled ones, moved to the device of the run, or None if it
        needs none. They are all training images in `data`, the labelled ones included, but without the validation images. The
        images whose class is not known come after them. All labels are replaced by 0, and do not decide which images these are,
        or in which order.
        """
        if not (self.objective.unlabelled and self.run.steps):
            return None
        chosen = torch.ones(len(data.train), dtype=torch.bool)
        if data.val is None:
            chosen[self.subset.val_index] = False
        pool = Images(data.train.images, torch.zeros_like(data.train.labels), self.spec).take(chosen.nonzero()[:, 0])
        pool = joined(pool, data.unlabelled)
        return Images(pool.images.to(self.device), pool.labels.to(self.device), self.spec)

    @property
    def ended(self) -> bool:
        """Whether all training steps have been taken."""
        return self.step >= self.run.steps

    @property
    def label_mask(self) -> float:
        """A factor, 0 or 1, by which the targets of all training images are multiplied. It is 0 if the run uses unlabelled
        images without pseudo-labels: this hides all labels. Otherwise it is 1.
        """
        return 0.0 if self.run.unlabelled and not self.run.pseudo_labels else 1.0

    @property
    def model(self) -> nn.Module:
        """The model that is evaluated and saved. Its weights are the exponential moving average (EMA) of the trained weights,
        or the average that the optimizer keeps (`ScheduleFree`), or else the trained weights themselves.
        """
        return self.objective.model if self.ema_model is None else self.ema_model

    @property
    def progress(self) -> float:
        """The fraction of all training steps that have been taken, from 0 to 1."""
        return self.step / self.run.steps

    @property
    def ema_weight(self) -> float:
        """The weight of the current parameters when their exponential moving average (EMA) is updated, from 0 to 1. In step n
        of the early training it is 1 / n, so that the average is the mean over all n steps. Later it is constant.
        """
        return 1 / min(self.step, max(self.run.ema * self.run.steps, 1))

    def train_step(self):
        """Take one training step: draw a batch, compute the gradient of the loss, update the weights, and then update their
        exponential moving average (EMA) if the run uses one.
        """
        self.update_weights(self.compute_gradients(self.next_batch()))

    def compute_gradients(self, batch: Batch) -> Tensor:
        """Set the learning rates of the step, compute the gradient of the loss on a batch, and return the loss. An optimizer
        with two passes, such as `SAM`, computes the gradient at moved weights, and the loss at the present ones.
        """
        self.set_learning_rates(self.optimizer)
        if not hasattr(self.optimizer, "two_passes"):
            return self.backward(batch)
        backward = counted_once(self.own_modules, functools.partial(self.backward, batch))
        watched = self.optimizer.passes > 1 and is_checked(self.step)
        buffers = [*self.objective.buffers()] if watched else []
        loss = self.optimizer.two_passes(backward, self.objective, self.not_trained)
        if watched and [*map(id, self.objective.buffers())] != [*map(id, buffers)]:
            raise ValueError(
                f"the model replaces a buffer in a forward pass, so the second pass of {type(self.optimizer).__name__} would "
                "change it again; expected a change in place, as in self.mean.copy_(...)"
            )
        return loss

    @functools.cached_property
    def own_modules(self) -> list[nn.Module]:
        """The modules of the objective whose classes are a user's own."""
        return [*own_parts(self.objective).values()]

    @functools.cached_property
    def not_trained(self) -> list[Tensor]:
        """All tensors of the objective that are not trained, which a forward pass may change: buffers, and parameters such as
        those of a teacher.
        """
        return [p for p in self.objective.parameters() if not p.requires_grad] + [*self.objective.buffers()]

    def backward(self, batch: Batch) -> Tensor:
        """Compute the gradient of the loss on a batch at the present weights, and return the loss."""
        if self.flat is None and self.joins_parameters and self.optimizer.state:  # from the second step on
            self.flat = FlatAdamW(self.optimizer)
        return self.gradient_step(batch, self.progress)

    @functools.cached_property
    def gradient_step(self) -> GradientStep:
        """The function that computes the gradients and the loss of a step; see `GradientStep`."""

        def compute(batch: Batch, progress: Any) -> Tensor:
            (self.flat or self.optimizer).zero_grad()  # before the forward pass, which needs the memory
            with self.computing(), self.numerics_context.gradients_in_place(self.flat is not None):
                loss = self.objective(batch, progress)["loss"]
            loss.backward()
            for module, name in self.weight_norms:
                setattr(module, name, getattr(module, name).detach())
            return loss.detach()

        return GradientStep(compute, self.parameters, self.not_trained, self.reason_against_graph, self.objective.phase)

    @functools.cached_property
    def weight_norms(self) -> list[tuple[nn.Module, str]]:
        """The modules of the objective with PyTorch's weight norm, each with the name of its weight. Such a module keeps the
        weight of the last forward pass, and with it all that its gradient needed. A CUDA graph cannot be recorded then.
        """
        hooks = [(module, hook) for module in self.objective.modules() for hook in module._forward_pre_hooks.values()]
        return [(module, hook.name) for module, hook in hooks if isinstance(hook, WeightNorm)]

    @property
    def reason_against_graph(self) -> str | None:
        """Why the steps are not recorded as a CUDA graph, or None if they may be."""
        if hasattr(self.optimizer, "two_passes"):
            return f"{type(self.optimizer).__name__} computes gradients twice in a step"
        return reason_against(self.objective, self.device, self.run.steps, bool(self.numerics.compiled))

    def update_weights(self, loss: Tensor):
        """Update the weights and their average (EMA) from the gradients of a step, and count the step with its `loss`."""
        self.objective.before_step(self.progress)
        if self.flat is not None and not self.flat.complete():
            self.flat.separate()
            self.flat, self.joins_parameters = None, False
        if self.run.clip and self.flat:
            self.flat.clip(self.run.clip)
        elif self.run.clip:
            nn.utils.clip_grad_norm_(self.parameters, self.run.clip)
        (self.flat or self.optimizer).step()
        if is_checked(self.step):
            self.optimizer.check_state()
        self.count_step(loss)
        self.loss += loss
        self.objective.after_step(self.progress)
        if self.run.ema:
            if any(now is not before for now, before in zip(buffers_of(self.buffer_owners), self.buffers)):
                self.find_averaged()  # a module has replaced a buffer, as in `self.mean = ...`
            ema_update(self.ema_pairs, self.ema_weight)

    def next_batch(self) -> Batch:
        """Return the batch of the current step. Its images are drawn, augmented and normalized. Then the objective of the run
        adds values that it needs, such as the logits of a teacher.

        Also seeds torch's generator, which dropout draws from during the step.
        """
        self.seed_generators()
        return self.prepare(draw_batch([self], Source([self.images]), None if self.pool is None else Source([self.pool])))

    def seed_generators(self):
        """Seed torch's generators of the CPU and of the device for the current step. `torch.manual_seed` does the same for all
        kinds of devices, and takes longer than a small layer: it keeps a traceback for each kind that is not there.
        """
        seed = stream(self.run.seed, "dropout", self.step)
        torch.default_generator.manual_seed(seed)
        if self.device.type != "cpu":
            module = torch.get_device_module(self.device)
            with module.device(self.device) if self.device.index else nullcontext():  # otherwise the present GPU
                module.manual_seed(seed)

    def prepare(self, batch: Batch) -> Batch:
        """Return the `batch` of the current step with the values that the objective adds, such as the logits of a teacher. The
        hash of the batch is kept if it is one of the first.
        """
        if self.prepares:
            with self.computing():
                batch = self.objective.prepare(batch)
        self.trace.add_batch(self.step, batch)
        return batch

    @property
    def prepares(self) -> bool:
        """Whether the objective adds values to each batch."""
        return type(self.objective).prepare is not Objective.prepare

    def set_learning_rates(self, optimizer: torch.optim.Optimizer):
        """Set the learning rate of each parameter group of an optimizer to the value for the current step."""
        run = self.run
        rate = learning_rate(self.progress, run.warmup, 1 / run.steps, run.schedule)
        for group, group_rate in zip(optimizer.param_groups, self.rates):
            group["lr"] = run.lr * group_rate(self.progress, rate)

    @property
    def precision(self) -> str:
        """The number format of matrix products in training as text, "fp32" or "bf16".

        If `numerics` sets a precision, it replaces that of the run.
        """
        return self.numerics.precision or self.run.precision

    @contextmanager
    def computing(self):
        """Context manager for the forward passes of training. Inside it, matrix products have the precision of the run ("fp32"
        or "bf16"), and the model uses the chosen implementation of attention (kernel) and, if chosen, transformer blocks that
        were compiled.
        """
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"), self.numerics_context.active():
            yield
        torch.clear_autocast_cache()  # inside an outer autocast, PyTorch would keep the rounded weights for the next step

    @functools.cached_property
    def evaluating(self) -> NumericsContext:
        """Like `numerics_context`, for the measurements of the validation accuracy during training: with the native kernel if
        that gives the first 256 validation images the same classes as PyTorch (see `evaluation_numerics`).
        """
        images = self.subset.val.take(slice(256))
        return NumericsContext(self.model, evaluation_numerics(self.model, self.numerics, images))

    @functools.cached_property
    def numerics_context(self) -> NumericsContext:
        """The `NumericsContext` object of this training. It switches the chosen implementation of attention (kernel) and the
        compiled blocks on before a forward pass, and off after it. The precision is set by the method `computing`, not here.
        """
        return NumericsContext(self.objective, self.numerics)

    def count_step(self, loss: Tensor):
        """Count a training step that was taken, with its loss."""
        self.step += 1
        self.trace.add_loss(self.step, loss)

    @functools.cached_property
    def checks(self) -> set[int]:
        """The set of the training steps after which the validation accuracy is measured. There are up to 12 such steps. They
        are evenly spaced, and the last one is the last training step.
        """
        return {round(self.run.steps * check / CHECKS) for check in range(1, CHECKS + 1)}

    def validate(self):
        """Add a point to the learning curve: the step, the mean training loss since the last point, and the validation
        accuracy. With early stopping, a copy of the weights is kept if this accuracy is the best so far.

        Raises FloatingPointError if the loss is not finite, or if the model gives logits or features that are not finite.
        """
        self.copy_average()
        steps = self.step - (self.curve[-1][0] if self.curve else 0)
        loss = self.loss.item() / steps
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss is {loss} at step {self.step} of {self.run.steps} (seed {self.run.seed}); try a smaller lr"
            )
        self.loss.zero_()
        measured = self.curves or self.run.early_stop
        val, score = self.subset.val if measured else self.subset.val.take(slice(0)), None
        splits = Splits(self.subset.train.take(slice(1_000)), val, val)
        with self.finite_outputs(), self.evaluating.active():
            if len(val) and accuracy in self.run.evaluators:
                score = float(next(accuracy(self.model, splits))[1])
            if not self.run.reads_labels:
                score = float(next(knn(self.model, splits, ks=(1,)))[1]) if len(val) else None
        if not self.run.reads_labels:
            self.health.append({"step": self.step, **collapse_statistics(self.objective.observed), "knn_1": score})
        if self.run.early_stop and score is not None and all(score > check[2] for check in self.curve):
            self.best = copy.deepcopy(self.model.state_dict())
        self.curve.append([self.step, round(loss, 5), score])

    @contextmanager
    def finite_outputs(self):
        """Context manager for measurements of the trained model. Inside it, logits and features that are not finite raise
        FloatingPointError, as an infinite loss does: if only the last step has diverged, the losses were still finite.
        """
        try:
            yield
        except NotFinite as error:
            if not self.run.steps:
                raise
            place = f"at step {self.step} of {self.run.steps} (seed {self.run.seed})"
            raise FloatingPointError(f"{place}, {error}; try a smaller lr") from None

    @torch.no_grad()
    def copy_average(self):
        """Copy the weights that the optimizer averages (`ScheduleFree`) to the model that is evaluated."""
        if self.ema_model is not None and self.optimizer and self.optimizer.averages:
            for average, parameter in zip(self.ema_model.parameters(), self.objective.model.parameters()):
                average.copy_(self.optimizer.averaged(parameter))
            for average, buffer in zip(self.ema_model.buffers(), self.objective.model.buffers()):
                average.copy_(buffer)

    def check_collapse(self):
        """Check the features of the last batch for collapse; see `Monitor`. Errors name the seed of the run."""
        try:
            self.monitor.check(self.step, self.objective.observed)
        except (Collapse, FloatingPointError) as error:
            raise type(error)(f"{error} (seed {self.run.seed})") from None

    def stopped_early(self) -> bool:
        """Return whether early stopping ends the training now. This is so if the last `run.early_stop` measurements of the
        validation accuracy brought no improvement: none of them is higher than the best one before them.
        """
        patience = self.run.early_stop
        scores = [check[2] for check in self.curve]
        return bool(patience) and len(scores) > patience and max(scores[-patience:]) <= max(scores[:-patience])

    def facts(self) -> dict:
        """Return what the record (results) of a run says about its training, as a dict: steps, seconds, learning curve, device
        and costs.
        """
        device = self.device
        in_a_step = self.run.batch * (1 if self.pool is None else 1 + self.objective.unlabelled.ratio)
        without_labels = self.images if self.run.unlabelled else self.pool
        seconds = round(self.seconds, 2)
        if not self.run.steps:  # nothing was trained here: a run with trained weights took no time, for others none is known
            seconds = 0.0 if self.run.init else None
        return {
            "steps": self.step,
            "images_seen": self.step * in_a_step * (self.optimizer.passes if self.optimizer else 1),
            "unlabelled": None if without_labels is None else len(without_labels),
            "seconds": seconds,
            "curve": self.curve,
            "health": self.health or None,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "threads": torch.get_num_threads(),
            "precision": self.precision,
            "kernel": self.numerics.kernel or "rule",
            "compiled": self.numerics.compiled,
            "stacked": self.stacked,
            "processes": self.processes,
            "trace": self.trace.to_dict(self.model, self.ema_distance()),
            "init_weights": self.init_weights,
        } | self.count_tokens() | self.footprint()

    def count_tokens(self) -> dict:
        """Return the number of tokens that enter the first block, and how many of them are patches, as a dict. The dict is
        empty for a model that is not a `ViT`.
        """
        if not isinstance(self.model, ViT):
            return {}
        context = self.model.layer_contexts(1, self.spec.size)[0]
        return {"tokens": context.tokens, "patches": context.patches}

    def ema_distance(self) -> float | None:
        """Return how far the evaluated weights, an exponential moving average (EMA), are from the last weights of the training:
        the L2 distance divided by the norm of the last weights. The result is 0 if averaging changes nothing, and None if the
        run uses no average, or averages over a single step.
        """
        if self.ema_model is None or min(self.step, self.run.ema * self.run.steps) <= 1:
            return None
        return distance(self.objective.model, self.model)

    def footprint(self) -> dict:
        """Return the number of parameters of the model and its multiply-adds (MACs) for one image, as a dict. The dict is empty
        if there are no parameters at all, for example in the reference model that classifies raw pixels.

        Multiply-adds that depend on the image are the mean over 256 training images.
        """
        if not self.parameters and not list(self.model.parameters()):
            return {}
        with frozen(self.model):
            return footprint(self.model, self.spec.normalize(self.images.pixels(slice(256))))
