"""Objectives that train token reduction in a trained model: `LearnToPrune` and `LearnThresholds`."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smallvit.attention import at_least_float32
from smallvit.augment import Batch
from smallvit.flops import block_macs, has_closed_form, unreduced
from smallvit.reduction import LearnedPrune, LearnedThresholds

from .objective import LearningRate, Objective, check_option_range, outputs_of
from .supervised import cross_entropy


class LearnToPrune(Objective):
    """An objective that teaches a trained model to prune tokens (DynamicViT). Small networks in `LearnedPrune` layers learn
    which patches can be removed. The unpruned model is the teacher.

    ratio          the weight of the squared difference between the share of patches kept and the target share.
    distil         the weight of the KL divergence between the logits of teacher and student.
    distil_tokens  the weight of the squared error between the kept patch tokens of the student and those of the teacher.
    backbone       the largest learning rate of the other weights, as a fraction of the peak rate.

    Paper    Rao et al. 2021 (DynamicViT), arXiv:2106.02034, section 3.3: the cross-entropy plus the three terms above. The
             difference in the share kept is averaged over predictors and images. The weights outside the predictors do not
             learn for the first sixth of the run, then with at most `backbone` times the peak rate.
    Departs  All parameters learn; the authors' optimizer leaves out the class token and the positions. The divergence is that
             of the student from the teacher, as in the authors' code; the paper writes it the other way round.

    Raises   ValueError for a model without `LearnedPrune`.
    """

    needs_init = True

    def __init__(
        self, model: nn.Module, *, ratio: float = 2.0, distil: float = 0.5, distil_tokens: float = 0.5, backbone: float = 0.01
    ):
        super().__init__(model)
        terms = {"ratio": ratio, "distil": distil, "distil_tokens": distil_tokens, "backbone": backbone}
        check_option_range(**{name: (value, 0.0, float("inf")) for name, value in terms.items()})
        self.pruning = active_reductions(model, LearnedPrune, "predictor")
        self.teacher: Any = unreduced(model).eval().requires_grad_(False)
        self.ratio, self.distil, self.distil_tokens, self.backbone = ratio, distil, distil_tokens, backbone

    def train(self, mode: bool = True):
        """Switch the student to training mode (`mode` True) or evaluation mode, and return the objective. The teacher always
        stays in evaluation mode.
        """
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """Return a dict with the loss of a batch under "loss" and, under "kept", the fraction of all patches that is left after
        each pruning layer, averaged over the batch. `progress` is not used.
        """
        check_training(self)
        with torch.no_grad():
            teacher_tokens = self.teacher.tokens(batch.images)[0]
            teacher_logs = at_least_float32(self.teacher.head(self.teacher.pooled(teacher_tokens, None))).log_softmax(-1)
        with outputs_of(module.kept for module in self.pruning) as decisions:
            tokens, size = self.model.tokens(batch.images)
        logits = self.model.head(self.model.pooled(tokens, size))
        shares = torch.stack([kept.mean(1) for kept in decisions], dim=1)
        targets = shares.new_tensor([module.target for module in self.pruning])
        p = len(self.model.prefix)
        present = (size[:, p:] > 0).to(tokens.dtype)[..., None]
        squares = (tokens[:, p:] - teacher_tokens[:, p:]).square() * present
        error = squares.sum() / (present.sum() * tokens.shape[-1]).clamp_min(1)
        divergence = F.kl_div(at_least_float32(logits).log_softmax(-1), teacher_logs, reduction="batchmean", log_target=True)
        loss = cross_entropy(logits, batch.targets) + self.ratio * (shares - targets).square().mean()
        return {"loss": loss + self.distil * divergence + self.distil_tokens * error, "kept": shares.mean(0).detach()}

    def learning_rates(self) -> list[tuple[list[nn.Parameter], LearningRate]]:
        """Return two pairs (parameters, learning-rate function). The first pair is for the small networks that choose the
        patches to keep. The second pair is for all other weights, which learn later and at a much lower rate.

        The small networks follow the learning-rate schedule of the run.
        """
        predictors = [p for module in self.pruning for p in module.parameters()]
        ids = set(map(id, predictors))
        others = [p for p in self.model.parameters() if id(p) not in ids]
        return [(predictors, lambda progress, rate: rate), (others, self.backbone_learning_rate)]

    def backbone_learning_rate(self, progress: float, run_rate: float) -> float:
        """Return the learning rate of all weights except the pruning networks, as a fraction of the peak rate. `progress` is
        the finished fraction of the run, and `run_rate` is the value of the run's learning-rate schedule. The result is 0 in
        the first sixth of the run, then `run_rate`, but at most the option `backbone`.
        """
        return 0.0 if progress < 1 / 6 else min(self.backbone, run_rate)


class LearnThresholds(Objective):
    """An objective that trains only the thresholds for merging and pruning tokens in a trained model (LTMP). The other weights
    are frozen. The model has `LearnedThresholds` layers.

    budget  the target for the multiply-adds of the blocks, as a share of those without merging and pruning.
    weight  the weight of the squared difference between the multiply-adds and the budget.

    Paper    Bonnaerens, Dambre 2023 (LTMP), arXiv:2305.17328, section 3.3: the cross-entropy plus the budget term. The cost of
             attention depends on the number of tokens before a block's reduction, the cost of the MLP on the number after it;
             both are means over the batch. Thresholds are clamped to their range after every step.
    Departs  The thresholds have one scale (see `LearnedThresholds`) and learn at one rate with the run's optimizer, where the
             authors use plain gradient descent with rates 5e-6 and 5e-3. A loss that is not finite stops the run; the authors
             skip the step.

    Raises   ValueError for a model without `LearnedThresholds`, an attention without an output projection `proj`, or a budget
             outside (0, 1].
    """

    needs_init = True
    changes_weights = True

    def __init__(self, model: nn.Module, *, budget: float = 0.75, weight: float = 10.0):
        super().__init__(model)
        check_option_range(weight=(weight, 0.0, float("inf")))
        if not 0 < budget <= 1:
            raise ValueError(f"budget is {budget}; expected a fraction of the unreduced compute, above 0 and up to 1")
        self.budget, self.weight = budget, weight
        self.thresholds = active_reductions(model, LearnedThresholds, "kept")
        if not has_closed_form(self.model):
            raise ValueError("LearnThresholds needs the closed form of attention; expected attention with a projection `proj`")
        model.requires_grad_(False)
        for module in self.thresholds:
            module.requires_grad_(True)
        self.train()

    def train(self, mode: bool = True):
        """Switch the objective to training mode (`mode` True) or evaluation mode, and return it. BatchNorm layers stay in
        evaluation mode, so that the running statistics of the frozen model do not change.
        """
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
        return self

    def forward(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """Return a dict with the loss of a batch under "loss" and, under "spent", the multiply-adds of the blocks, divided by
        their multiply-adds without merging and pruning. `progress` is not used.
        """
        check_training(self)
        with outputs_of(module.kept for module in self.thresholds) as decisions:
            logits = self.model(batch.images)
        spent = self.compute_share(decisions)
        loss = cross_entropy(logits, batch.targets) + self.weight * (spent - self.budget).square()
        return {"loss": loss, "spent": spent.detach()}

    def compute_share(self, decisions: list[Tensor]) -> Tensor:
        """Return the multiply-adds of all blocks, divided by their multiply-adds without merging and pruning. `decisions` holds
        one tensor (batch, tokens) for each block with learned thresholds: 1 for tokens that are kept, 0 for others.
        """
        kept, tokens = iter(decisions), decisions[0].shape[1]
        present, n = torch.ones_like(decisions[0]), decisions[0].new_tensor(float(tokens))
        macs: Any = 0.0
        full: Any = 0.0
        for block in self.model.blocks:
            present = present * next(kept) if block.reduction in self.thresholds else present
            m = present.mean() * tokens
            macs, full, n = macs + block_macs(block, n, m), full + block_macs(block, tokens, tokens), m
        return macs / full

    def after_step(self, progress: float):
        """Limit each learned threshold to its allowed range. The training loop calls this method after the optimizer step.
        `progress` is not used.
        """
        for module in self.thresholds:
            module.clamp()


def active_reductions(model: nn.Module, reduction_class: type, required: str) -> list[Any]:
    """Return a list of the modules of class `reduction_class`, which merges or prunes tokens, that are active in a model.
    `required` is the name of an attribute, such as the network that scores patches. Modules in which this attribute is None do
    nothing and are left out.

    Raises ValueError if there are none.
    """
    reductions = [getattr(block, "reduction", None) for block in getattr(model, "blocks", ())]
    found = [module for module in reductions if isinstance(module, reduction_class) and getattr(module, required) is not None]
    if not found:
        name = reduction_class.__name__
        raise ValueError(
            f"this objective trains {name}, which no block of the model has, or which is off; expected reduction={name}"
        )
    return found


def check_training(objective: nn.Module):
    """Raise ValueError if an objective is in evaluation mode. Its model then removes tokens, and the decisions about them, from
    which the loss is computed, are no longer complete.
    """
    if not objective.training:
        name = type(objective).__name__
        raise ValueError(f"{name} is in evaluation mode, in which it has no loss; call train() first, or evaluate the model")
