"""Stacked: runs that differ only in their seed, trained as one model with a leading axis.

A small model leaves the machine waiting for the next small product; k of them at once keep it busy. `torch.func.vmap` takes the
step of one for all. Every member keeps its own streams, weights, curve, checkpoint and record: its weights are a slice of
those that are trained, so that all else goes on as if it were alone.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from smallvit.augment import Batch
from smallvit.optim import ema_update
from smallvit.run import fingerprint

from .loop import Training

TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}  # of the losses on the first batch: what a batched product may round otherwise


class NotStackable(ValueError):
    """These runs cannot be trained as one; one after another they can."""


class Stack:
    """The step of k trainings at once. Theirs is what changes: weights, optimizer, average, step and loss.

    Products are batched and may be summed in another order, so that weights agree with those of a run alone to rounding, not to
    the bit. Whether a model can be stacked is tried out: the losses on the first batch must be those of each alone. What draws
    random numbers in a step (dropout), or goes by values in the images for how many tokens to keep, cannot.

    Raises   NotStackable for trainings at different steps, of runs that differ in more than their seed, with an objective that
             has hooks of its own, or with other losses together than alone.
    """

    def __init__(self, members: Sequence[Training]):
        first = members[0]
        if not first.run.steps:
            raise NotStackable("there is nothing to train")
        if len({fingerprint(member.run.at_seed(0)) for member in members}) > 1:
            raise NotStackable("the runs differ in more than their seed")
        if len({member.step for member in members}) > 1:
            raise NotStackable(f"the runs are at steps {[member.step for member in members]}; expected the same for all")
        if len({member.numerics for member in members}) > 1 or first.numerics.compiled:
            raise NotStackable("the runs are computed in different ways, or compiled")
        if first.run.early_stop:
            raise NotStackable("early_stop ends each run at a step of its own")
        if any(hasattr(first.objective, hook) for hook in ("before_step", "after_step", "seen")):
            raise NotStackable(f"{type(first.objective).__name__} does more in a step than take a gradient")
        self.members, self.first = members, first
        self.refuse_other_losses()
        self.weights = joined([member.objective for member in members])
        self.parameters = {name: self.weights[name].requires_grad_() for name, _ in trained(first.objective)}
        self.optimizer = self.one_optimizer()
        for member in members:
            member.stacked = len(members)
        self.pairs = []
        if first.averaged is not None:
            mean, prefix = joined([member.averaged for member in members]), "model."
            self.pairs = [(tensor, self.weights[prefix + name].detach()) for name, tensor in mean.items()]

    def losses(self, weights: dict[str, Tensor], batch: Batch) -> Tensor:
        """The loss of each member on its own part of the batch, k."""

        def loss(own: dict[str, Tensor], part: Batch) -> Tensor:
            return functional_call(self.first.objective, own, (part, self.first.progress))["loss"]

        with self.first.computing():
            return vmap(loss)(weights, batch)

    def refuse_other_losses(self):
        """Raise NotStackable unless the losses are those of each member alone. Nothing is moved, nor drawn from any stream."""
        for member in self.members:
            member.objective.train()
        batches = [member.next_batch() for member in self.members]
        states = [{name: t.detach().clone() for name, t in state_of(member.objective).items()} for member in self.members]
        try:
            with torch.no_grad():
                found = self.losses(stacked(states), side_by_side(batches))
        except RuntimeError as error:  # vmap's own words: something random, or of a size that depends on values
            raise NotStackable(str(error).strip().splitlines()[0]) from error
        with torch.no_grad(), self.first.computing():
            alone = [
                functional_call(member.objective, state, (batch, member.progress))["loss"]
                for member, state, batch in zip(self.members, states, batches)
            ]
        near = TOLERANCE[self.first.precision]
        if not torch.allclose(found, torch.stack(alone), rtol=near, atol=near):
            raise NotStackable(f"the losses together are {found.tolist()}, alone {[loss.item() for loss in alone]}")

    def one_optimizer(self) -> torch.optim.Optimizer:
        """The members' optimizers as one over the stacked parameters; theirs keep slices of its state, to be put down."""
        name_of = {id(p): name for name, p in trained(self.first.objective)}
        groups = [
            group | {"params": [self.parameters[name_of[id(p)]] for p in group["params"]]}
            for group in self.first.optimizer.param_groups
        ]
        optimizer = torch.optim.AdamW(groups, fused=True)
        owned = [dict(trained(member.objective)) for member in self.members]
        for name, parameter in self.parameters.items():
            zero = torch.zeros_like(parameter[0])
            fresh = {"step": parameter.new_zeros(()), "exp_avg": zero, "exp_avg_sq": zero}  # where no step was taken yet
            states = [member.optimizer.state[own[name]] or fresh for member, own in zip(self.members, owned)]
            state = stacked(states) | {"step": states[0]["step"].clone()}  # they are all at the same
            optimizer.state[parameter] = state
            for at, (member, own) in enumerate(zip(self.members, owned)):
                moments = {moment: state[moment][at] for moment in ("exp_avg", "exp_avg_sq")}
                member.optimizer.state[own[name]] = {"step": state["step"]} | moments
        return optimizer

    def train_step(self):
        """One optimizer step of all members."""
        run = self.first.run
        self.first.set_rates(self.optimizer)
        self.optimizer.zero_grad()
        losses = self.losses(self.weights, side_by_side([member.next_batch() for member in self.members]))
        losses.sum().backward()
        if run.clip:
            clip([p.grad for p in self.parameters.values()], run.clip)
        self.optimizer.step()
        for member, loss in zip(self.members, losses.detach()):
            member.count(loss)
        if self.pairs:
            ema_update(self.pairs, self.first.share)


def trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers by name, also those that no checkpoint keeps."""
    return dict((*module.named_parameters(), *module.named_buffers()))


def stacked(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """k equal sets of tensors as one with a leading axis."""
    return {name: torch.stack([state[name].detach() for state in states]) for name in states[0]}


def joined(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Parameters and buffers of k equal modules, stacked; those of the modules become slices of them."""
    states = [state_of(module) for module in modules]
    together = stacked(states)
    for at, state in enumerate(states):
        for name, own in state.items():
            own.data = together[name][at]
    return together


def side_by_side(batches: Sequence[Batch]) -> Batch:
    """k batches as one with a leading axis."""
    images, targets, _, teacher_logits = zip(*batches)
    return Batch(torch.stack(images), torch.stack(targets), teacher_logits=tuple(torch.stack(said) for said in zip(*teacher_logits)))


def clip(gradients: Sequence[Tensor], largest: float):
    """Cut the gradient of each member, all its parts together, to that norm, as clip_grad_norm_ does for one."""
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients]).norm(dim=0)
    factor = (largest / (norms + 1e-6)).clamp(max=1)
    for g in gradients:
        g.mul_(factor.view(-1, *[1] * (g.ndim - 1)))
