"""Learning to reduce tokens: the objectives that teach `LearnedPrune` and `LearnedThresholds`, from a trained model."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smallvit.augment import Batch
from smallvit.flops import block_macs, has_closed_form, unreduced
from smallvit.reduction import LearnedPrune, LearnedThresholds

from .objective import LearningRate, Objective
from .supervised import cross_entropy


class LearnToPrune(Objective):
    """Teach a trained model with `LearnedPrune` to decide with fewer patches, held to its own words when it had them all.

    Paper    Rao et al. 2021 (DynamicViT), arXiv:2106.02034, section 3.3: cross-entropy, plus `ratio` times the squared gap
             between the share kept and its target, the mean over predictors and images, plus `distil` times the divergence of
             the logits, plus `distil_tokens` times the squared error of the kept patches, from the unpruned model. The other
             weights rest for the first sixth, then learn at most at `backbone` times the peak rate.
    Departs  All parameters learn; the authors' optimizer forgets the class token and the positions. The divergence is that of
             the student from the teacher, as in the authors' code; the paper writes it the other way round.

    Raises   ValueError for a model without `LearnedPrune`.
    """

    needs_init = True

    def __init__(
        self, model: nn.Module, *, ratio: float = 2.0, distil: float = 0.5, distil_tokens: float = 0.5, backbone: float = 0.01
    ):
        super().__init__(model)
        self.pruning = deciding(model, LearnedPrune, "predictor")
        self.teacher = unreduced(model).eval().requires_grad_(False)
        self.ratio, self.distil, self.distil_tokens, self.backbone = ratio, distil, distil_tokens, backbone

    def train(self, mode: bool = True):
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        with torch.no_grad():
            wanted = self.teacher.tokens(batch.images)[0]
            likely = self.teacher.head(self.teacher.pooled(wanted, None)).float().log_softmax(-1)
        with watching(self.pruning) as kept:
            tokens, size = self.model.tokens(batch.images)
        logits = self.model.head(self.model.pooled(tokens, size))
        shares = torch.stack([decisions.mean(1) for decisions in kept], dim=1)
        targets = shares.new_tensor([module.target for module in self.pruning])
        p = len(self.model.prefix)
        here = (size[:, p:] > 0).to(tokens.dtype)[..., None]
        error = ((tokens[:, p:] - wanted[:, p:]).square() * here).sum() / (here.sum() * tokens.shape[-1]).clamp_min(1)
        divergence = F.kl_div(logits.float().log_softmax(-1), likely, reduction="batchmean", log_target=True)
        loss = cross_entropy(logits, batch.targets) + self.ratio * (shares - targets).square().mean()
        return {"loss": loss + self.distil * divergence + self.distil_tokens * error, "kept": shares.mean(0).detach()}

    def learning_rates(self) -> list[tuple[list[nn.Parameter], LearningRate]]:
        learned = [p for module in self.pruning for p in module.parameters()]
        mine = set(map(id, learned))
        return [
            (learned, lambda progress, rate: rate),
            ([p for p in self.model.parameters() if id(p) not in mine], self.rest_then_follow),
        ]

    def rest_then_follow(self, progress: float, rate: float) -> float:
        return 0.0 if progress < 1 / 6 else min(self.backbone, rate)


class LearnThresholds(Objective):
    """Find thresholds for a trained model with `LearnedThresholds` that meet a budget of compute; all else stays as it is.

    Paper    Bonnaerens, Dambre 2023 (LTMP), arXiv:2305.17328, section 3.3: cross-entropy plus `weight` times the squared gap
             between the compute left and `budget`, both as shares of the unreduced blocks'. Attention counts the tokens before,
             the MLP those behind a block's reduction, each as the mean over the batch. Thresholds are put back into their range
             after every step.
    Departs  The thresholds are of one scale (see `LearnedThresholds`) and learn at one rate with the run's optimizer, where the
             authors take plain gradient descent with 5e-6 and 5e-3. A loss that is no number stops the run, no step is skipped.

    Raises   ValueError for a model without `LearnedThresholds`, or a budget that is no fraction.
    """

    needs_init = True

    def __init__(self, model: nn.Module, *, budget: float = 0.75, weight: float = 10.0):
        super().__init__(model)
        if not 0 < budget <= 1:
            raise ValueError(f"budget is {budget}; expected a fraction of the unreduced compute, above 0 and up to 1")
        self.budget, self.weight = budget, weight
        self.thresholds = deciding(model, LearnedThresholds, "kept")
        if not has_closed_form(model):
            raise ValueError(
                "LearnThresholds goes by the closed form of attention; give the model one with a projection `proj`"
            )
        model.requires_grad_(False)
        for module in self.thresholds:
            module.requires_grad_(True)

    def forward(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        with watching(self.thresholds) as kept:
            logits = self.model(batch.images)
        spent = self.spent(kept)
        loss = cross_entropy(logits, batch.targets) + self.weight * (spent - self.budget).square()
        return {"loss": loss, "spent": spent.detach()}

    def spent(self, kept: list[Tensor]) -> Tensor:
        """The share of the blocks' MACs that is left by these decisions, b n for each block that has thresholds."""
        decisions, whole = iter(kept), kept[0].shape[1]
        there, n, left, full = torch.ones_like(kept[0]), kept[0].new_tensor(float(whole)), 0.0, 0.0
        for block in self.model.blocks:
            there = there * next(decisions) if block.reduction in self.thresholds else there
            m = there.mean() * whole
            left, full, n = left + block_macs(block, n, m), full + block_macs(block, whole, whole), m
        return left / full

    def after_step(self, progress: float):
        for module in self.thresholds:
            module.clamp()


def deciding(model: nn.Module, kind: type, part: str) -> list[nn.Module]:
    """The reductions of that class that decide something. Raises ValueError if there are none."""
    reductions = [getattr(block, "reduction", None) for block in getattr(model, "blocks", ())]
    found = [module for module in reductions if isinstance(module, kind) and getattr(module, part) is not None]
    if not found:
        raise ValueError(f"this objective teaches {kind.__name__} and none is at work: reduction={kind.__name__}")
    return found


@contextmanager
def watching(modules: list[nn.Module]) -> Iterator[list[Tensor]]:
    """The decisions that these reductions make, in their order, while this lasts."""
    seen: list[Tensor] = []
    hooks = [module.kept.register_forward_hook(lambda _, given, out: seen.append(out)) for module in modules]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
