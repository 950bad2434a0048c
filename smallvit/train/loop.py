"""Training: a run in progress, from its first weights to its last step.

All randomness is drawn from streams named by (seed, name, step), so a resumed run needs no generator's state: the checkpoint
holds weights, optimizer and the curve so far, and the rest follows from the step.
"""

import copy
import functools
import math
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from smallvit import record as records
from smallvit.augment import Batch, apply
from smallvit.data import Dataset, Images, Subset
from smallvit.evaluate import Splits, accuracy, frozen, knn
from smallvit.flops import footprint
from smallvit.numerics import DEFAULT, Numerics, NumericsContext
from smallvit.objectives.collapse import Monitor, measure
from smallvit.optim import decay_groups, ema_update, learning_rate, tensors
from smallvit.rng import stream
from smallvit.run import Run, fingerprint
from smallvit.vit import ViT

from .initialize import begin

CHECKS = 12  # how often a run looks at its loss and its validation images
CHECKPOINT_SECONDS = 10.0

Watch = Callable[[int, float | None], None]


class Training:
    """A run in progress: what changes from step to step, how one step is made, and how it is put down and taken up again."""

    def __init__(
        self,
        run: Run,
        data: Dataset,
        subset: Subset,
        device: str,
        start: Path | None = None,
        teacher: Path | None = None,
        numerics: Numerics = DEFAULT,
    ):
        self.run, self.spec, self.subset = run, data.spec, subset
        self.device = torch.accelerator.current_accelerator() if device == "auto" else torch.device(device)
        self.device = self.device or torch.device("cpu")
        objective, self.weights, self.made_of = begin(run, data.spec, start, teacher)
        self.objective = objective.to(self.device)
        self.numerics = numerics
        self.averaged = copy.deepcopy(self.objective.model).requires_grad_(False) if run.ema else None
        self.optimizer = None
        if run.steps:
            groups, self.paces = decay_groups(self.objective, run.weight_decay, run.layer_decay)
            self.optimizer = torch.optim.AdamW(groups, lr=run.lr, fused=True)
        started = time.perf_counter()
        self.images = self.to_train_on(data)
        self.trained = [p for p in self.objective.parameters() if p.requires_grad]
        self.pairs = tensors(self.averaged, self.objective.model) if run.ema else []
        self.step, self.seconds, self.loss = 0, time.perf_counter() - started, torch.zeros((), device=self.device)
        self.curve: list[list] = []  # step, mean loss since the last check, validation accuracy
        self.best: dict[str, Tensor] | None = None
        self.health: list[dict] = []  # of a run without labels, at every check: see smallvit.objectives.collapse
        self.monitor = Monitor(run.steps)
        self.stacked: int | None = None  # how many were trained together with this one, if only for a while

    def to_train_on(self, data: Dataset) -> Images:
        """The labelled images, or all but the validation images, with no labels or those that they are taken for."""
        run, known = self.run, self.subset.train
        images = data.subset(labels=None, val=run.val, seed=run.seed).train if run.unlabelled else known
        labels = images.labels
        if run.pseudo_labels:
            labels = run.pseudo_labels(self.objective.model, known, replace(images, labels=torch.zeros_like(labels)))
        return Images(images.images.to(self.device), labels.to(self.device), self.spec)

    @property
    def label_mask(self) -> float:
        """By this the targets are multiplied: what is not known cannot be read."""
        return 0.0 if self.run.unlabelled and not self.run.pseudo_labels else 1.0

    @property
    def model(self) -> nn.Module:
        """The weights that are evaluated: the averaged ones, where the run averages."""
        return self.objective.model if self.averaged is None else self.averaged

    @property
    def progress(self) -> float:
        """How much of the run is over, from 0 to 1."""
        return self.step / self.run.steps

    @property
    def share(self) -> float:
        """By how much the averaged weights move towards those of this step."""
        return 1 / min(self.step, max(self.run.ema * self.run.steps, 1))

    def train_step(self):
        """One optimizer step."""
        run, batch = self.run, self.next_batch()
        self.set_rates(self.optimizer)
        self.optimizer.zero_grad()  # before the forward pass, which needs the room
        with self.computing():
            loss = self.objective(batch, self.progress)["loss"]
        loss.backward()
        if hasattr(self.objective, "before_step"):  # gradients cut or cancelled by the objective's own rule
            self.objective.before_step(self.progress)
        if run.clip:
            nn.utils.clip_grad_norm_(self.trained, run.clip)
        self.optimizer.step()
        self.count(loss.detach())
        if hasattr(self.objective, "after_step"):
            self.objective.after_step(self.progress)
        if self.averaged is not None:
            ema_update(self.pairs, self.share)

    def next_batch(self) -> Batch:
        """The batch of this step: chosen, augmented and normalised. What draws without a generator, dropout too, is set up."""
        run, images, step = self.run, self.images, self.step
        torch.manual_seed(stream(run.seed, "dropout", step))
        chosen = order(len(images), run.batch, step, run.seed).to(images.labels.device)
        generator = torch.Generator().manual_seed(stream(run.seed, "augment", step))
        batch = apply(run.augment, Batch(images.pixels(chosen), self.label_mask * images.targets(chosen)), generator)
        normalise = self.spec.normalise
        batch = batch._replace(images=normalise(batch.images), views=tuple(normalise(views) for views in batch.views))
        if not hasattr(self.objective, "prepare"):
            return batch
        with self.computing():
            return self.objective.prepare(batch)

    def set_rates(self, optimizer: torch.optim.Optimizer):
        """The learning rates of this step."""
        run = self.run
        for group, own in zip(optimizer.param_groups, self.paces):
            group["lr"] = run.lr * own(self.progress, learning_rate(self.progress, run.warmup, 1 / run.steps, run.schedule))

    @property
    def precision(self) -> str:
        """Of the products: what the numerics says, or else the run."""
        return self.numerics.precision or self.run.precision

    @contextmanager
    def computing(self):
        """The context in which the objective is computed."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"), self.computed.active():
            yield

    @functools.cached_property
    def computed(self) -> NumericsContext:
        return NumericsContext(self.objective, self.numerics)

    def count(self, loss: Tensor):
        """A step has been taken."""
        self.step += 1
        self.loss += loss

    @functools.cached_property
    def checks(self) -> set[int]:
        return {round(self.run.steps * check / CHECKS) for check in range(1, CHECKS + 1)}

    def validate(self):
        """Put a point on the curve; where the run chooses, keep the weights if they are the best so far."""
        since = self.step - (self.curve[-1][0] if self.curve else 0)
        loss = self.loss.item() / since
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss is {loss} by step {self.step} of {self.run.steps} (seed {self.run.seed}); try a smaller lr"
            )
        self.loss.zero_()
        val, score = self.subset.val, None
        known = Splits(self.subset.train.take(slice(1_000)), val, val)
        if len(val) and accuracy in self.run.evaluators:
            score = next(accuracy(self.model, known))[1]
        if not self.run.reads_labels:
            score = next(knn(self.model, known, ks=(1,)))[1] if len(val) else None
            self.health.append({"step": self.step, **measure(self.objective.seen), "knn_1": score})
        if self.run.early_stop and all(score > check[2] for check in self.curve):
            self.best = copy.deepcopy(self.model.state_dict())
        self.curve.append([self.step, round(loss, 5), score])

    def stopped_early(self) -> bool:
        """Whether the last `early_stop` checks brought nothing better than the best before them."""
        patience = self.run.early_stop
        scores = [check[2] for check in self.curve]
        return bool(patience) and len(scores) > patience and max(scores[-patience:]) <= max(scores[:-patience])

    def facts(self) -> dict:
        """What a record says of the training itself."""
        device = self.device
        return {
            "steps": self.step,
            "images_seen": self.step * self.run.batch,
            "unlabelled": len(self.images) if self.run.unlabelled else None,
            "seconds": round(self.seconds, 2) if self.run.steps or self.run.init else None,
            "curve": self.curve,
            "health": self.health or None,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "threads": torch.get_num_threads(),
            "precision": self.precision,
            "kernel": self.numerics.kernel or "rule",
            "compiled": self.numerics.compiled,
            "stacked": self.stacked,
            "weights": self.weights,
            "tokens": self.model.places(1, self.model.image)[0].tokens if isinstance(self.model, ViT) else None,
        } | self.footprint()

    def footprint(self) -> dict:
        """Parameters and MACs, where there are parameters; MACs that depend on the image are those of training images."""
        if not self.trained and not list(self.model.parameters()):
            return {}
        with frozen(self.model):
            return footprint(self.model, self.spec.normalise(self.images.pixels(slice(256))))

    def save(self):
        """Put the training down."""
        state = {
            "fingerprint": fingerprint(self.run),
            "made_by": self.made_by,
            "step": self.step,
            "seconds": self.seconds,
            "loss": self.loss,
            "curve": self.curve,
            "health": self.health,
            "in_a_row": self.monitor.in_a_row,
            "objective": self.objective.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "averaged": self.averaged and self.averaged.state_dict(),
            "best": self.best,
            "stacked": self.stacked,
            "numerics": [*self.numerics],
        }
        state = whole(state) if self.stacked else state
        records.write_atomic(self.checkpoint, lambda new: torch.save(state, new))

    def resume(self, path: Path, made_by: str):
        """Take the training up where it was put down, and put it down there from now on; `made_by` names the code and the data.

        Nothing there, or other code or data since, means from the start.

        Raises ValueError if the checkpoint is of another run or cannot be read.
        """
        self.checkpoint, self.made_by = path, made_by
        if not path.exists():
            return
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
        except Exception as error:  # whatever a broken file makes of the unpickler
            raise ValueError(f"{path} cannot be read ({type(error).__name__}); delete it to start this run again") from error
        if state["fingerprint"] != fingerprint(self.run):
            raise ValueError(
                f"{path} is of run {state['fingerprint']}, not of {fingerprint(self.run)}; give each run a folder of its own"
            )
        if state["made_by"] != made_by:
            return
        self.step, self.seconds, self.loss = state["step"], state["seconds"], state["loss"]
        self.curve, self.best, self.stacked = state["curve"], state["best"], state["stacked"]
        self.health, self.monitor.in_a_row = state["health"], state["in_a_row"]
        self.numerics = Numerics(*state["numerics"])  # as it began, whatever is chosen today
        self.objective.load_state_dict(state["objective"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.averaged is not None:
            self.averaged.load_state_dict(state["averaged"])


def train(members: Sequence[Training], train_step: Callable[[], None], watch: Watch):
    """Train to the end, with a checkpoint every `CHECKPOINT_SECONDS`. `train_step` takes a step of all members."""
    first = members[0]
    for member in members:
        member.objective.train()
    saved = last = time.perf_counter()
    while first.step < first.run.steps and not first.stopped_early():
        train_step()
        if not first.run.reads_labels:
            first.monitor.check(first.step, first.objective.seen)
        if first.step in first.checks:
            for member in members:
                member.validate()
            watch(first.step, first.curve[-1][2])
        now = time.perf_counter()
        for member in members:
            member.seconds += (now - last) / len(members)
        last = now
        if now - saved > CHECKPOINT_SECONDS:
            for member in members:
                member.save()
            saved = now
    for member in members:
        if member.best is not None:
            member.model.load_state_dict(member.best)


def whole(state: Any) -> Any:
    """The same with copies for tensors: of a slice of a stack `torch.save` would write the whole stack."""
    if isinstance(state, dict):
        return {name: whole(part) for name, part in state.items()}
    if isinstance(state, list):
        return [whole(part) for part in state]
    return state.clone() if isinstance(state, Tensor) else state


def order(n: int, batch: int, step: int, seed: int) -> Tensor:
    """Which of n images make the batch of that step: one shuffle of all after another, cut into batches wherever they meet."""
    places = torch.arange(step * batch, (step + 1) * batch)
    epochs = range(step * batch // n, ((step + 1) * batch - 1) // n + 1)
    return torch.cat([shuffle(n, epoch, seed)[places[places // n == epoch] % n] for epoch in epochs])


@functools.lru_cache(maxsize=64)  # those of a stack take turns
def shuffle(n: int, epoch: int, seed: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(stream(seed, "order", epoch)))
