"""Stacking: runs that differ only in seed, learning rate and number of labels, trained as one model with a leading axis.

A small model does not keep the machine busy; k of them at once do. `torch.func.vmap` computes one step for all of them. Each
run (a member of the stack) keeps its own random streams, weights, curve and record: its weights are slices of the tensors that
are trained, so everything outside the step works as for a single run. They share one checkpoint.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from smallvit.augment import Batch, MultiCrop
from smallvit.augment.batch import changes_parts
from smallvit.numerics import DEFAULT, Numerics, NumericsContext
from smallvit.objectives.collapse import Observation
from smallvit.optim import ema_update
from smallvit.optimizers import SAM, SCALARS
from smallvit.random_weights import is_builtin

from .batches import Source, draw_batch
from .cuda_graph import GradientStep
from .failures import first_line, is_gpu_lost, is_out_of_memory
from .loop import Training, is_checked
from .own_numbers import changed_number, numbers_of, own_parts, set_numbers
from .trace import BATCHES

TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}  # of the losses on the first batch: batched products round differently
# of each gradient on the first batch, relative to its own norm, and relative to the norm of the largest gradient
GRADIENT_TOLERANCE = {"fp32": (1e-2, 1e-5), "bf16": (0.3, 2e-2)}


class NotStackable(ValueError):
    """Error for runs that cannot be trained together as one model. They can still be trained one after another."""


class Stack:
    """Several training runs that are computed together as one model, because this is faster. They differ only in their seed,
    learning rate and number of labels. `members` are their `Training` objects, and each keeps its own weights, optimizer state
    and loss.

    Each member also keeps its own moving average (EMA) and step, so it can be saved and evaluated like a single training.

    Batched matrix products may sum in another order, so the weights agree with those of single runs up to rounding, not
    bitwise. The constructor checks this: losses and gradients on the first batch must be those of each member alone, as at the
    beginning and as at the end of the training, and so must be two steps of an optimizer of a user's own. Models with random
    numbers inside a step (dropout), with tied weights, or whose number of tokens depends on the image, cannot be stacked. Nor
    can models with a module that changes a number, a flag or a tensor of its own that is no buffer, such as `self.calls += 1`,
    or that says why in its attribute `not_stackable`.

    `resumed=True` leaves out this check, for members that were trained together until their checkpoint.

    Raises NotStackable for trainings at different steps, runs that differ in more than seed, learning rate and number of
    labels, an objective that is not stackable, and losses or gradients that differ from those of the members alone.
    """

    def __init__(self, members: Sequence[Training], *, resumed: bool = False):
        first = members[0]
        if not first.run.steps:
            raise NotStackable("there is nothing to train")
        if len({member.run.stack_key for member in members}) > 1:
            raise NotStackable("the runs differ in more than seed, learning rate and number of labels")
        if len({member.step for member in members}) > 1:
            raise NotStackable(f"the runs are at steps {[member.step for member in members]}; expected the same for all")
        if len({member.numerics for member in members}) > 1 or first.numerics.compiled:
            raise NotStackable("the runs have different numerics, or are compiled")
        if first.run.early_stop:
            raise NotStackable("early_stop ends each run at a different step")
        if not first.objective.stackable:
            raise NotStackable(f"{type(first.objective).__name__} changes state outside the gradient step")
        for module in first.objective.modules():
            if reason := getattr(module, "not_stackable", None):
                raise NotStackable(f"{type(module).__name__} {reason}")
        named = [*first.objective.named_parameters(remove_duplicate=False)]
        if len({id(parameter) for _, parameter in named}) < len(named):
            raise NotStackable("one tensor is the weight of two modules (tied weights)")
        self.members, self.first = members, first
        # PyTorch's fused attention for GPUs does not work in `torch.func.vmap`, and native blocks are for CPUs
        gpu_rule = first.device.type != "cpu" and first.numerics.kernel in (None, "native")
        self.numerics_context = NumericsContext(first.objective, Numerics(kernel="explicit") if gpu_rule else DEFAULT)
        if not resumed:
            self.check_optimizer()
            for progress in (first.progress, 1.0):  # parts of a model may change in between
                self.check_first_step(progress)
        self.weights = stack_modules([member.objective for member in members])
        self.parameters = {name: self.weights[name].requires_grad_() for name, _ in trainable(first.objective)}
        self.optimizer = self.stacked_optimizer()
        rates = [member.run.lr for member in members]
        self.fastest = members[rates.index(max(rates))]
        self.rate_shares = torch.tensor([rate / max(rates) if rate else 0.0 for rate in rates], device=first.device)
        for group in self.optimizer.param_groups:
            group["shares"] = self.rate_shares
        for member in members:
            member.stacked = len(members)
        self.losses_so_far = torch.stack([member.loss for member in members])
        for member, loss in zip(members, self.losses_so_far):
            member.loss = loss
        self.source = self.pool = None
        if can_draw_together(members):
            self.source = Source([member.images for member in members])
            self.pool = None if first.pool is None else Source([member.pool for member in members if member.pool is not None])
            for number, member in enumerate(members):
                member.images, member.pool = self.source.parts[number], self.pool and self.pool.parts[number]
        self.ema_pairs = []
        if first.run.ema:
            averages = stack_modules([member.model for member in members])
            self.ema_pairs = [(tensor, self.weights[f"model.{name}"].detach()) for name, tensor in averages.items()]

    def losses(self, weights: dict[str, Tensor], batch: Batch, progress: Any) -> Tensor:
        """Return the loss of each training run in the stack on its own batch, as a tensor of shape (runs,). In `weights` and
        `batch`, the first axis of all tensors is the run. `progress` is the finished fraction of the training.

        The objective of each run also gets what it would have observed, if the runs learn without labels.
        """
        objective, before = self.first.objective, self.first.objective.observed

        def loss_and_observation(own_weights: dict[str, Tensor], own_batch: Batch) -> tuple[Tensor, list[Tensor]]:
            objective.observed = None
            loss = functional_call(objective, own_weights, (own_batch, progress))["loss"]
            return loss, [tensor for tensor in objective.observed or () if tensor is not None]

        with self.first.computing(), self.numerics_context.active():
            losses, observed = vmap(loss_and_observation)(weights, batch)
        objective.observed = before
        for member, own in zip(self.members, zip(*observed)):
            member.objective.observed = Observation(*own)
        return losses

    def check_optimizer(self):
        """Raise NotStackable if an optimizer of a user's own changes the weights of a stack otherwise than those of one run."""

        def base(optimizer: Any) -> Any:
            return optimizer.base if isinstance(optimizer, SAM) else optimizer

        own, make = base(self.first.optimizer), self.first.run.optimizer
        if is_builtin(own):
            return
        made: list[tuple[Any, dict]] = []

        def make_noted(groups: list[dict]) -> Any:
            optimizer = base(make(groups))
            made.append((optimizer, numbers_of(optimizer)))
            return optimizer

        equal_rates = len({member.run.lr for member in self.members}) == 1
        if not steps_alike(make_noted, own.param_groups, 1.0 if equal_rates else 0.5):
            raise NotStackable(f"{type(own).__name__} changes weights in a stack otherwise than in a single run")
        if changed := changed_number(*zip(*made)):
            raise NotStackable(f"a step changes the attribute {changed} of the optimizer, which the runs cannot keep")

    def check_first_step(self, progress: float):
        """Raise NotStackable if training the runs as one model (a stack) gives another result than training each run alone. For
        this, the loss and the gradients of each run on the first batch are computed in both ways, as if the fraction `progress`
        of the training had been taken. They may differ by rounding errors only. The training does not change.

        A loss may differ by 1e-4 with fp32 and by 2e-2 with bf16 (`TOLERANCE`). A gradient may differ by 1% of its norm with
        fp32 and by 30% with bf16, and in addition by 1e-5 and 2e-2 of the norm of the largest one (`GRADIENT_TOLERANCE`).
        """
        for member in self.members:
            member.objective.train()
        names = [name for name, _ in trainable(self.first.objective)]
        batches = [member.next_batch() for member in self.members]
        states = [{name: t.detach().clone() for name, t in tensors_of(member.objective).items()} for member in self.members]
        stacked = stack_states(states)
        try:
            with refused_new_numbers(self.first.objective):
                losses = self.losses(with_gradients(stacked, names), stack_batches(batches), progress)
            gradients = torch.autograd.grad(losses.sum(), [stacked[name] for name in names], materialize_grads=True)
        except RuntimeError as error:  # from vmap: random numbers, or a shape that depends on values
            if is_out_of_memory(error) or is_gpu_lost(error):
                raise
            reason = first_line(error)
            if "random" in reason:
                reason = "the model draws random numbers inside a step, as dropout does"
            raise NotStackable(reason) from error
        precision = self.first.precision
        tolerance = TOLERANCE[precision]
        of_norm, of_largest = GRADIENT_TOLERANCE[precision]
        for index, (member, state, batch) in enumerate(zip(self.members, states, batches)):
            weights = with_gradients(state, names)
            objective = member.objective
            with self.first.computing(), refused_new_buffers(objective, weights), refused_new_numbers(objective):
                loss = functional_call(objective, weights, (batch, progress))["loss"]
            if not torch.allclose(losses[index], loss, rtol=tolerance, atol=tolerance):
                raise NotStackable(f"run {index + 1} has loss {losses[index].item()} in the stack and {loss.item()} alone")
            alone = torch.autograd.grad(loss, [state[name] for name in names], materialize_grads=True)
            largest = max(gradient.norm() for gradient in alone)
            for name, gradient, expected in zip(names, gradients, alone):
                if (gradient[index] - expected).norm() > of_norm * expected.norm() + of_largest * largest:
                    raise NotStackable(f"run {index + 1} has another gradient of {name} in the stack than alone")

    def stacked_optimizer(self) -> Any:
        """Return one optimizer for all training runs of the stack (several runs that are trained together as one model). It
        continues from the optimizer states of the single runs.

        These states become slices of its state, so that each member can still save a checkpoint.
        """
        name_of = {id(p): name for name, p in trainable(self.first.objective)}
        groups = [
            group | {"params": [self.parameters[name_of[id(p)]] for p in group["params"]]}
            for group in self.first.optimizer.param_groups
        ]
        optimizer = self.first.run.optimizer(groups)
        for number, group in enumerate(optimizer.param_groups):
            own_groups = [member.optimizer.param_groups[number] for member in self.members]
            for place, parameter in enumerate(group["params"]):
                states = [
                    member.optimizer.state[own["params"][place]] or member.optimizer.initial_state(own, place)
                    for member, own in zip(self.members, own_groups)
                ]
                same = {name: states[0][name].clone() for name in SCALARS if name in states[0]}  # all are at the same step
                state = optimizer.state[parameter] = stack_states(states) | same
                for index, (member, own) in enumerate(zip(self.members, own_groups)):
                    slices = {name: tensor[index] for name, tensor in state.items() if name not in same}
                    member.optimizer.state[own["params"][place]] = same | slices
        return optimizer

    def train_step(self):
        """Take one training step of all runs in the stack (several runs that are trained together as one model). Each run has
        its own batch, weights and loss.
        """
        self.fastest.set_learning_rates(self.optimizer)
        losses = self.compute_gradients(self.next_batch())
        self.update_weights()
        self.losses_so_far += losses
        for member, loss in zip(self.members, losses):
            member.count_step(loss)
        if self.ema_pairs:
            ema_update(self.ema_pairs, self.first.ema_weight)

    def next_batch(self) -> Batch:
        """Return the batches of the current step of all runs, as tensors whose first axis is the run. The batches are drawn
        together if all transforms allow it: see `draw_batch`.
        """
        if self.source is None:
            return stack_batches([member.next_batch() for member in self.members])
        self.members[-1].seed_generators()  # as when each draws its own: an evaluator may draw from torch's generators
        joined = draw_batch(self.members, self.source, self.pool)
        count = len(self.members)
        images, targets = (tensor.unflatten(0, (count, -1)) for tensor in joined[:2])
        batch = Batch(images, targets, tuple(views.unflatten(0, (count, -1)) for views in joined.views))
        if not self.first.prepares and self.first.step >= BATCHES:
            return batch
        prepared = []
        for number, member in enumerate(self.members):
            member.seed_generators()
            own = Batch(batch.images[number], batch.targets[number], tuple(views[number] for views in batch.views))
            prepared.append(member.prepare(own))
        return stack_batches(prepared)

    def compute_gradients(self, batch: Batch) -> Tensor:
        """Compute the gradients of the losses of all runs in the stack, each on its own part of `batch`, clip them if the runs
        say so, and return the losses, shape (runs,). With an optimizer with two passes, such as `SAM`, these are the gradients
        at moved weights; each run has its own move.
        """
        if not hasattr(self.optimizer, "two_passes"):
            return self.gradient_step(batch, self.first.progress)
        objectives = [member.objective for member in self.members]
        backward = partial(self.gradient_step, batch, self.first.progress)
        losses = self.optimizer.two_passes(backward, self.first.objective, self.not_trained, objectives)
        self.clip_gradients()
        return losses

    def clip_gradients(self):
        """Clip the gradients of each run, if the runs say so."""
        if self.first.run.clip:
            clip([p.grad for p in self.parameters.values() if p.grad is not None], self.first.run.clip)

    @cached_property
    def not_trained(self) -> list[Tensor]:
        """The tensors of the runs that are not trained: buffers, and parameters that are kept as they are."""
        return [tensor for name, tensor in self.weights.items() if name not in self.parameters]

    @cached_property
    def gradient_step(self) -> GradientStep:
        """The function that computes the gradients and the losses of a step; see `GradientStep`."""

        def compute(batch: Batch, progress: Any) -> Tensor:
            self.optimizer.zero_grad()
            losses = self.losses(self.weights, batch, progress)
            losses.sum().backward()
            if not hasattr(self.optimizer, "two_passes"):  # those need the gradients of their first pass as they are
                self.clip_gradients()
            return losses.detach()

        parameters, reason = [*self.parameters.values()], self.first.reason_against_graph
        return GradientStep(compute, parameters, self.not_trained, reason, self.first.objective.phase)

    @torch.no_grad()
    def update_weights(self):
        """Change the weights by one step of the optimizer, with the learning rate of each run.

        The optimizer takes its step with the largest rate. Both parts of a step of AdamW or Muon, the weight decay and the
        change along the gradient, are multiples of the learning rate. So runs with a smaller rate keep only a part of their
        step. An optimizer that averages weights reads the shares of the runs from its groups instead.
        """
        parameters = [*self.parameters.values()]
        before = [p.clone() for p in parameters] if self.rate_shares.min() < 1 and not self.optimizer.averages else []
        self.optimizer.step()
        if is_checked(self.first.step):
            self.optimizer.check_state()
        for parameter, start in zip(parameters, before):
            share = self.rate_shares.view(-1, *[1] * (parameter.ndim - 1)).to(parameter.dtype)
            torch.lerp(start, parameter, share, out=parameter)


@contextmanager
def refused_new_numbers(objective: nn.Module) -> Iterator[None]:
    """Context manager that raises NotStackable if a forward pass changes a number, a flag or a tensor that a module of a user's
    own keeps as a plain attribute, as in `self.calls += 1`: a stack would change that of its first run only. All of them in the
    `objective` are restored at the end.
    """
    parts = [*own_parts(objective).values()]
    numbers, changed = [numbers_of(part) for part in parts], ""
    attributes = [{**vars(part)} for part in parts]
    copies = [{name: value.detach().clone() for name, value in plain_tensors(part).items()} for part in parts]
    try:
        yield
    finally:
        changed = changed_number(parts, numbers)
        set_numbers(parts, numbers)
        for part, before, copied in zip(parts, attributes, copies):
            if names := restore_tensors(part, before, copied):
                changed = changed or f"{type(part).__name__}.{names[0]}"
    if changed:
        raise NotStackable(f"a step changes the attribute {changed}; expected a buffer that is changed in place")


def plain_tensors(part: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a module keeps as plain attributes, which are neither parameters nor buffers, by name."""
    return {name: value for name, value in vars(part).items() if isinstance(value, Tensor)}


def restore_tensors(part: nn.Module, before: dict[str, Any], copies: dict[str, Tensor]) -> list[str]:
    """Give a module the tensors that it kept as plain attributes, and return the names of those that had changed. `before` are
    all its earlier attributes, and `copies` the earlier values of these tensors.
    """
    now = plain_tensors(part)
    replaced = sorted(name for name in now.keys() | copies.keys() if now.get(name) is not before.get(name))
    for name in replaced:
        vars(part).pop(name, None)
        vars(part).update({name: before[name]} if name in before else {})
    changed = [name for name, value in copies.items() if not torch.equal(before[name], value)]
    for name in changed:
        before[name].data.copy_(copies[name])
    return replaced + changed


@contextmanager
def refused_new_buffers(objective: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Context manager that raises NotStackable if a forward pass of the objective replaces a buffer, as in `self.mean = ...`. A
    stack keeps only changes in place, as in `self.mean.copy_(...)`. `tensors` are those with which the objective is called.
    """
    replaced: list[str] = []

    def find(module, inputs, output):
        replaced.extend(name for name, buffer in module.named_buffers() if buffer is not tensors.get(name, buffer))

    with objective.register_forward_hook(find):
        yield
    if replaced:
        raise NotStackable(f"the model replaces its buffer {replaced[0]}; expected a change in place, as by copy_()")


def steps_alike(make: Callable[[list[dict]], Any], groups: Sequence[dict], share: float) -> bool:
    """Return whether an optimizer changes the weights of two models that are stacked as it changes those of each model alone.
    `make` creates the optimizer from groups of parameters such as `groups`. The second model has the learning rate of the first
    times `share`. Two steps with random gradients are compared.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = [[torch.randn(3, 2, *p.shape, generator=generator).to(p) for p in group["params"]] for group in groups]

    def trained(model: int | slice) -> list[Tensor]:
        rate, together = 1e-3 * (share if model == 1 else 1.0), isinstance(model, slice)
        parameters = [[nn.Parameter(numbers[0, model].clone()) for numbers in group] for group in drawn]
        optimizer = make([group | {"params": own, "lr": rate} for group, own in zip(groups, parameters)])
        for group in optimizer.param_groups if together else ():
            group["shares"] = torch.tensor([1.0, share], device=group["params"][0].device if group["params"] else None)
        for step in (1, 2):
            before = [[parameter.detach().clone() for parameter in own] for own in parameters]
            for own, group in zip(parameters, drawn):
                for parameter, numbers in zip(own, group):
                    parameter.grad = numbers[step, model].clone()
            optimizer.step()
            if together and not optimizer.averages:  # as `Stack.update_weights` does
                for own, starts in zip(parameters, before):
                    for parameter, start in zip(own, starts):
                        parameter.data[1] = torch.lerp(start[1], parameter.data[1], share)
        return [parameter.detach() for own in parameters for parameter in own]

    starts = [numbers[0] for group in drawn for numbers in group]
    try:
        together = trained(slice(None))
    except (RuntimeError, ValueError, IndexError) as error:  # as from a transposed matrix, which has a further axis now
        if is_out_of_memory(error) or is_gpu_lost(error):
            raise
        return False
    for model in (0, 1):
        for start, found, expected in zip(starts, together, trained(model)):
            if (found[model] - expected).norm() > 0.01 * (expected - start[model]).norm() + 1e-7:
                return False
    return True


def can_draw_together(members: Sequence[Training]) -> bool:
    """Return whether the batches of several runs can be drawn by `draw_batch`: all transforms can change several parts of a
    batch at once, and the runs normalize their images alike, unlike the folds of a cross-validation. On a CPU, the views of
    `MultiCrop` are made for one run after another: those of all runs do not fit into its caches.
    """
    first = members[0]
    if first.device.type == "cpu" and any(isinstance(transform, MultiCrop) for transform in first.run.augment):
        return False
    views = [] if first.pool is None else first.objective.unlabelled.views
    known = all(changes_parts(transform) for transforms in (first.run.augment, *views) for transform in transforms)
    return known and all(member.spec == first.spec for member in members)


def trainable(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return a list of pairs (name, parameter) with all parameters of a module that require a gradient."""
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers of a module, as a dict from name to tensor. Buffers that are not part of its
    `state_dict` are included.
    """
    return dict((*module.named_parameters(), *module.named_buffers()))


def with_gradients(state: dict[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """Set `requires_grad` for the tensors in the dict `state` that have one of the given names, and return the dict. Autograd
    can then compute their gradients.
    """
    for name in names:
        state[name].requires_grad_()
    return state


def stack_states(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack the tensors of several dicts along a new first axis. All dicts have the same keys. Return one dict with these keys.
    """
    return {name: torch.stack([state[name].detach() for state in states]) for name in states[0]}


def stack_modules(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Stack the parameters and buffers of several modules of the same architecture along a new first axis, and return a dict
    from name to stacked tensor. After that, each module uses a slice of the stacked tensors, so the memory is shared.
    """
    states = [tensors_of(module) for module in modules]
    stacked = stack_states(states)
    for index, state in enumerate(states):
        for name, tensor in state.items():
            tensor.data = stacked[name][index]
    return stacked


def stack_batches(batches: Sequence[Batch]) -> Batch:
    """Return one batch whose tensors are those of several batches, stacked along a new first axis."""
    images, targets, *others = zip(*batches)
    rest = (tuple(torch.stack(each) for each in zip(*tensors)) for tensors in others)
    return Batch(torch.stack(images), torch.stack(targets), *rest)


def clip(gradients: Sequence[Tensor], largest: float):
    """Clip the gradients of several models in place. The first axis of each gradient is the model. The norm of all gradients of
    one model is then at most `largest`.

    PyTorch's `clip_grad_norm_` does the same for one model.
    """
    norms = torch.stack([g.reshape(len(g), -1).norm(dim=1) for g in gradients]).norm(dim=0)
    factors = (largest / (norms + 1e-6)).clamp(max=1)
    for g in gradients:
        g.mul_(factors.view(-1, *[1] * (g.ndim - 1)))
