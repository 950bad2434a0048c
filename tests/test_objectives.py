"""Objectives: the base class, losses computed by hand, which parameters learn, and that training reaches the targets."""

import copy
import inspect
import math
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from timm.models.eva import Eva
from torch import nn
from toys import tiny_vit

from smallvit import augment, objectives
from smallvit.augment import Batch
from smallvit.components import function
from smallvit.evaluate import METRICS, accuracy, augmented_accuracy, calibration, knn
from smallvit.flops import closed_form, seen_tokens, unreduced
from smallvit.objectives import DINO, MAE, SSAT, Distill, DrLoc, LearnThresholds, LearnToPrune, LeJEPA, Objective, Supervised
from smallvit.optim import decay_groups
from smallvit.pooling import MeanTokens
from smallvit.reduction import LearnedPrune, LearnedThresholds, Merge, Prune
from smallvit.references import Pixels, SmallCNN

TINY = partial(tiny_vit, (8, 8), depth=4)
PRUNED = partial(TINY, reduction=partial(LearnedPrune, keep=0.5))
THRESHOLDS = partial(TINY, reduction=partial(LearnedThresholds, merge=0.9, prune=0.5))


@pytest.fixture
def batch():
    """Six images with soft targets, as mixing and smoothing make them."""
    return Batch(torch.randn(6, 1, 8, 8), torch.rand(6, 5).softmax(-1))


def randomize_decisions(model):
    """Draw large weights for attention and predictors, so that tokens differ in importance."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".attention." in name or ".predictor." in name:
                parameter.normal_(std=0.3)
    return model


def cross_entropy_by_hand(logits, targets):
    rows = [[-t * (z - math.log(sum(map(math.exp, row)))) for t, z in zip(target, row)] for target, row in zip(targets, logits)]
    return sum(map(sum, rows)) / len(rows)


def test_every_objective_is_tested():
    found = {name for name, member in vars(objectives).items() if inspect.isclass(member) and issubclass(member, Objective)}
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    assert found == {
        "DINO", "Data2Vec", "Distill", "DrLoc", "EachMember", "LeJEPA", "LearnThresholds", "LearnToPrune", "MAE", "Objective",
        "SSAT", "SemiSupervised", "Supervised",
    }  # fmt: skip
    assert all(f"import {name}" in tests or f"{name}," in tests for name in found - {"Objective"})


# The base class


def test_the_example_of_the_documentation_is_an_objective(batch):
    example = re.search(r"    class ConfidencePenalty.*?(?=\n    Run)", objectives.__doc__, re.DOTALL).group()
    namespace = {"Objective": Objective}
    exec(inspect.cleandoc("\n" + example), namespace)
    objective = namespace["ConfidencePenalty"](TINY(reduction=partial(Prune, shrink=(0.0, 0.5))), weight=0.0)
    assert torch.allclose(objective(batch, 0.3)["loss"], Supervised(objective.model)(batch, 0.3)["loss"])
    assert objective.model.blocks[0].reduction.progress == 0.3 and objective.stackable and objective.needs_labels


def test_defaults_of_the_base_class_do_nothing(batch):
    class Bare(Objective):
        pass

    objective, model = Bare(TINY()), TINY()
    assert objective.prepare(batch) is batch and objective.observed is None
    assert objective.before_step(0.5) is None is objective.after_step(0.5)
    (parameters, rate), *others = objective.learning_rates()
    assert not others and list(map(id, parameters)) == list(map(id, objective.parameters())) and rate(0.1, 0.7) == 0.7
    assert Objective(model).trained_model is model
    with pytest.raises(NotImplementedError, match="Bare has no forward"):
        objective(batch, 0.0)


@pytest.mark.parametrize("objective", [Supervised, MAE, SSAT, DrLoc])
def test_batch_that_is_a_tuple_or_a_tensor_is_explained(objective, batch):
    made = objective(TINY())
    for wrong, kind in ((tuple(batch[:2]), "tuple"), (batch.images, "Tensor")):
        for call in (lambda given: made(given, 0.0), made.prepare):
            with pytest.raises(ValueError, match=rf"{objective.__name__} got {kind}; expected Batch\(images, targets\)"):
                call(wrong)


@pytest.mark.parametrize("objective", [Supervised, DINO])
def test_class_in_the_place_of_a_model_is_explained(objective):
    with pytest.raises(ValueError, match=f"the model of {objective.__name__} is the class SmallCNN; expected a finished nn.Module"):
        objective(SmallCNN)


def test_objectives_that_change_more_than_parameters_in_a_step_are_not_stackable():
    assert {cls.__name__ for cls in vars(objectives).values() if inspect.isclass(cls) and issubclass(cls, Objective) and cls.stackable} == {
        "Objective", "SemiSupervised", "Supervised", "Distill", "DrLoc", "LearnToPrune", "SSAT", "MAE", "LeJEPA",
    }  # fmt: skip
    members = {"before_step": lambda self, progress: None}, {"after_step": lambda self, progress: None}, {"needs_labels": False}
    for member in members:
        changed = type("Changed", (Supervised,), member)
        assert not changed.stackable and not type("Child", (changed,), {}).stackable
        assert type("Declared", (Supervised,), member | {"stackable": True}).stackable
    assert type("Plain", (Supervised,), {}).stackable


class TwoMasks(MAE):
    """Two masks of each image, and the mirrored images."""

    def forward(self, batch, progress):
        both = batch._replace(images=torch.cat([batch.images, batch.images.flip(-1)]))
        self.losses = [super(TwoMasks, self).forward(both, progress)["loss"] for _ in range(2)]
        return {"loss": sum(self.losses)}


class WithMAE(LeJEPA):
    def __init__(self, model):
        super().__init__(model, hidden=16, dim=4)
        self.mae = MAE(model)

    def forward(self, batch, progress):
        return {"loss": super().forward(batch, progress)["loss"] + self.mae(batch, progress)["loss"]}


class Spread(DINO):
    """A term for the prototypes, which are the weight of the last layer."""

    def __init__(self, model):
        super().__init__(model, prototypes=12, hidden=16, bottleneck=8)

    def forward(self, batch, progress):
        loss, weight = super().forward(batch, progress)["loss"], self.head.last_layer.weight
        return {"loss": 0 * loss + (weight @ weight.T).square().sum()}


@pytest.mark.parametrize("kind", [TwoMasks, WithMAE, Spread])
def test_subclass_that_overrides_forward_draws_there_and_gets_all_gradients(kind):
    torch.manual_seed(0)
    objective = kind(tiny_vit((8, 8), classes=10)).train()
    batch = Batch(torch.randn(6, 1, 8, 8), torch.zeros(6, 10), (torch.randn(12, 1, 8, 8),))
    prepared = objective.prepare(batch)
    assert prepared.draws == ()
    objective(prepared, 0.5)["loss"].backward()
    if kind is TwoMasks:
        assert objective.losses[0] != objective.losses[1], "the same patches are hidden twice"
    if kind is Spread:
        assert objective.head.last_layer.weight_v.grad.norm() > 0


@pytest.mark.parametrize("kind", [MAE, partial(LeJEPA, hidden=16, dim=4), partial(DINO, prototypes=12, hidden=16, patches=1.0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_converted_objective_computes_in_its_own_number_format(kind, dtype):
    torch.manual_seed(0)
    objective = kind(tiny_vit((8, 8), classes=10)).to(dtype).train()
    batch = Batch(torch.randn(6, 1, 8, 8).to(dtype), torch.zeros(6, 10), (torch.randn(12, 1, 8, 8).to(dtype),))
    for _ in range(2):
        loss = objective(objective.prepare(batch), 0.5)["loss"]
        loss.backward()
    assert loss.isfinite() and all(p.grad is None or p.grad.dtype == dtype for p in objective.parameters())
    if isinstance(objective, DINO):
        assert objective.loss.center.dtype == torch.promote_types(dtype, torch.float32), "the moving mean would stall in bfloat16"


RUN = SimpleNamespace(
    dependencies={}, init=None, teacher=None, unlabelled=False, pseudo_labels=None, augment=(), evaluators=(knn,), reads_labels=True, steps=9
)  # fmt: skip
UNTRAINED = SimpleNamespace(reads_labels=True, steps=0, init=None)
NEIGHBORS, TWO_HEADS, ONE_OF_TWO = partial(DINO, neighbors=2), partial(Distill, token=True), partial(Distill, token=True, weight=1)
CROPS = augment.digit_crops()


def run_with(objective, settings):
    """Check the settings of a run with this objective."""
    function(objective).check_run(SimpleNamespace(**vars(RUN) | {"objective": objective} | settings))


@pytest.mark.parametrize(
    "objective, setting, message",
    [
        (LearnToPrune, {}, "LearnToPrune teaches a trained model; give the run init="),
        (LearnThresholds, {}, "LearnThresholds teaches a trained model; give the run init="),
        (Distill, {}, "teacher is None and Distill learns from one; give the run teacher="),
        (Supervised, {"teacher": RUN}, "has a teacher and Supervised takes none"),
        (Distill, {"teacher": SimpleNamespace(reads_labels=False, steps=9, init=None)}, "teacher has a head .* no labels"),
        (Distill, {"teacher": UNTRAINED}, "teacher has a head .* no labels"),
        (Supervised, {"unlabelled": True}, "unlabelled=True but Supervised reads labels; use DINO, MAE, Distill"),
        (Supervised, {"augment": augment.digit_crops()}, "augment makes views and Supervised reads none"),
        (MAE, {"augment": augment.digit_crops()}, "augment makes views and MAE reads none; .* or use DINO or LeJEPA"),
        (DINO, {"evaluators": (knn, accuracy)}, "accuracy needs a trained head and DINO trains none"),
        (MAE, {"evaluators": (accuracy,)}, "accuracy needs a trained head and MAE trains none"),
        *[
            (DINO, {"evaluators": (knn, metric)}, f"{function(metric).__name__} needs a trained head and DINO trains none")
            for metric in (*METRICS, partial(calibration, bins=5), partial(augmented_accuracy, augment=()))
        ],
        (NEIGHBORS, {"augment": (augment.Flip(), *CROPS)}, "the same pixels .* augment has Flip.* outside of MultiCrop"),
        (NEIGHBORS, {"augment": (*CROPS, augment.Warp(rotate=9))}, "the same pixels .* augment has Warp.* outside of MultiCrop"),
        (TWO_HEADS, {"teacher": RUN, "unlabelled": True}, "one of the two heads .*, and unlabelled=True gives it none"),
        (ONE_OF_TWO, {"teacher": RUN}, "one of the two heads .*, and weight=1 gives it none"),
        (MAE, {"augment": (augment.RandomErasing(),)}, "MAE predicts the pixels .* black rectangles of RandomErasing"),
        (SSAT, {"augment": (augment.RandomErasing(),)}, "SSAT predicts the pixels .* black rectangles of RandomErasing"),
    ],
)
def test_settings_of_a_run_that_do_not_fit_are_refused(objective, setting, message):
    with pytest.raises(ValueError, match=message):
        run_with(objective, setting)


@pytest.mark.parametrize(
    "objective, setting",
    [
        (Supervised, {"evaluators": (accuracy,)}),
        (Supervised, {"unlabelled": True, "pseudo_labels": print}),
        (LearnToPrune, {"dependencies": {"init": RUN}, "init": RUN}),
        (Distill, {"teacher": RUN, "unlabelled": True}),
        (Distill, {"teacher": SimpleNamespace(reads_labels=True, steps=0, init=RUN)}),
        (DINO, {"augment": augment.digit_crops(), "unlabelled": True}),
        (MAE, {"unlabelled": True}),
        (MAE, {"augment": (augment.RandomErasing(probability=0),)}),
        (DINO, {"augment": (augment.Flip(), *CROPS)}),
        (NEIGHBORS, {"augment": (augment.Flip(probability=0), *CROPS)}),
        (TWO_HEADS, {"teacher": RUN}),
        (TWO_HEADS, {"teacher": RUN, "unlabelled": True, "pseudo_labels": print}),
        (partial(Distill, weight=1), {"teacher": RUN, "unlabelled": True}),
    ],
)
def test_settings_of_a_run_that_fit_are_accepted(objective, setting):
    run_with(objective, setting)


def test_layer_decay_needs_blocks():
    with pytest.raises(ValueError, match="layer_decay needs the blocks of a ViT and SmallCNN has none"):
        decay_groups(Supervised(SmallCNN((8, 8), 1, 5)), 0.1, 0.5)


def test_layer_decay_refuses_a_model_whose_first_parts_it_does_not_know():
    eva = Eva(img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=3)
    with pytest.raises(ValueError, match="layer_decay needs the tokenizer of a ViT and Eva has none"):
        decay_groups(Supervised(eva), 0.1, 0.5)


# Supervised


@pytest.mark.parametrize("make", [TINY, partial(SmallCNN, (8, 8), 1, 5, width=4, hidden=8)], ids=["vit", "cnn"])
def test_supervised_is_the_cross_entropy_with_the_targets(make, batch):
    model = make().eval()
    loss = Supervised(model)(batch, 0.3)["loss"]
    assert loss.item() == pytest.approx(cross_entropy_by_hand(model(batch.images).tolist(), batch.targets.tolist()), rel=1e-5)


def test_supervised_sets_the_progress_of_reductions(batch):
    model = TINY(reduction=partial(Prune, shrink=(0.0, 0.5)))
    objective = Supervised(model)
    for progress in (0.0, 0.25, 1.0):
        objective(batch, progress)
        assert [block.reduction.progress for block in model.blocks] == [progress] * 4


@pytest.mark.parametrize("off", [{"softmax_first": False}, {"softmax_first": None}])
def test_softmax_first_off_is_bitwise_the_default(off, batch):
    model = TINY()
    losses = [Supervised(model, **options)(batch, 0.3)["loss"] for options in ({}, off)]
    gradients = [torch.autograd.grad(loss, list(model.parameters()), allow_unused=True) for loss in losses]
    assert torch.equal(*losses) and all(a is b is None or torch.equal(a, b) for a, b in zip(*gradients))


def test_balanced_weights_are_those_of_scikit_learn(batch):
    from sklearn.utils.class_weight import compute_class_weight

    labels = torch.tensor([0] * 7 + [1] * 2 + [2] * 40 + [3] + [4] * 3)
    objective = Supervised(TINY(), class_weight="balanced")
    objective.set_class_counts(labels.bincount())
    expected = compute_class_weight("balanced", classes=np.arange(5), y=labels.numpy())
    assert objective.class_weights.tolist() == pytest.approx(expected)
    assert objective.class_weights[labels].mean() == pytest.approx(1)
    assert "class_weights" not in objective.state_dict()


def test_balanced_weights_have_the_mean_1_also_if_a_class_is_empty():
    labels = torch.tensor([0] * 7 + [1] * 3)
    objective = Supervised(TINY(), class_weight="balanced")
    objective.set_class_counts(labels.bincount(minlength=5))
    assert objective.class_weights[labels].mean() == pytest.approx(1)
    assert not objective.class_weights[2:].any()


def test_balanced_weights_multiply_the_loss_of_each_image(batch):
    objective = Supervised(TINY().eval(), class_weight="balanced")
    with pytest.raises(ValueError, match="call set_class_counts"):
        objective(batch, 0.0)
    objective.set_class_counts(torch.tensor([1, 2, 3, 4, 10]))
    logits, weights = objective.model(batch.images), torch.tensor([4, 2, 4 / 3, 1, 0.4])
    hard = Batch(batch.images, F.one_hot(torch.tensor([0, 1, 2, 3, 4, 0]), 5).float())
    each = F.cross_entropy(logits, hard.targets, reduction="none")
    assert objective(hard, 0.0)["loss"].item() == pytest.approx((each * weights[[0, 1, 2, 3, 4, 0]]).mean().item())
    mixed = 0.3 * hard.targets + 0.7 * hard.targets.flip(0)  # an image of two classes has the mixture of their weights
    each = F.cross_entropy(logits, mixed, reduction="none") * (mixed @ weights)
    assert objective(Batch(batch.images, mixed), 0.0)["loss"].item() == pytest.approx(each.mean().item())


def test_weights_of_equal_classes_and_none_change_nothing(batch):
    model = TINY().eval()
    plain, off, equal = (Supervised(model, class_weight=weight) for weight in (None, None, "balanced"))
    off.set_class_counts(torch.tensor([1, 2, 3, 4, 10]))
    equal.set_class_counts(torch.tensor([7] * 5))
    assert torch.equal(plain(batch, 0.0)["loss"], off(batch, 0.0)["loss"]) and not hasattr(off, "class_weights")
    assert torch.allclose(plain(batch, 0.0)["loss"], equal(batch, 0.0)["loss"])
    with pytest.raises(ValueError, match="class_weight is 'equal'; expected 'balanced', or None"):
        Supervised(model, class_weight="equal")  # pyright: ignore


def test_softmax_first_takes_probabilities_for_logits(batch):
    model = TINY().eval()
    rows = [[math.exp(z) / sum(map(math.exp, row)) for z in row] for row in model(batch.images).tolist()]
    loss = Supervised(model, softmax_first=True)(batch, 0.0)["loss"]
    assert loss.item() == pytest.approx(cross_entropy_by_hand(rows, batch.targets.tolist()), rel=1e-5)


def test_softmax_first_has_the_losses_and_gradients_of_its_docstring():
    """A certain and right model has a loss of 1.46; a certain and wrong model has almost no gradient. Images are the logits."""
    right, chance, wrong = 50 * torch.eye(10)[:1], torch.zeros(1, 10), 50 * torch.eye(10)[1:2]
    first, targets = Supervised(nn.Identity(), softmax_first=True), torch.eye(10)[:1]
    losses = [first(Batch(x, targets), 0.0)["loss"].item() for x in (right, chance)]
    assert losses == pytest.approx([math.log(math.e + 9) - 1, math.log(10)]) and "log(e + k - 1) - 1" in Supervised.__doc__
    assert [round(loss, 2) for loss in losses] == [1.46, 2.30]
    largest = []
    for objective in (first, Supervised(nn.Identity())):
        x = wrong.clone().requires_grad_()
        largest.append(torch.autograd.grad(objective(Batch(x, targets), 0.0)["loss"], x)[0].abs().max().item())
    assert largest[0] < 1e-6 and largest[1] == pytest.approx(1)


# LearnToPrune


def fix_decisions(monkeypatch, shares, patches=16):
    """Make each predictor keep the first patches up to its share, whatever its scores are."""
    policies = [torch.stack([(torch.arange(patches) < share * patches).float()] * 6) for share in shares]

    def draw(score, hard):
        policies.append(policies.pop(0))
        return torch.stack([policies[-1], 1 - policies[-1]], -1) + (score - score.detach())

    monkeypatch.setattr(F, "gumbel_softmax", draw)
    return policies


def test_the_loss_of_dynamicvit_is_the_sum_of_its_four_terms(batch, monkeypatch):
    model = randomize_decisions(PRUNED())
    policies = fix_decisions(monkeypatch, (0.75, 0.5, 0.25))
    objective = LearnToPrune(model, ratio=3.0, distil=0.7, distil_tokens=0.2).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # the student differs from its teacher
    result = objective(batch, 0.5)

    logits, (tokens, _) = model.train()(batch.images).tolist(), model.tokens(batch.images)
    teacher_tokens, teacher_logits = objective.teacher.tokens(batch.images)[0], objective.teacher(batch.images).tolist()
    ratio = sum((policy.mean(1) - 0.5**k).square().mean().item() for k, policy in enumerate(policies, 1)) / 3
    divergence = 0.0
    for student, teacher in zip(logits, teacher_logits):
        s, t = (math.log(sum(map(math.exp, row))) for row in (student, teacher))
        divergence += sum(math.exp(b - t) * ((b - t) - (a - s)) for a, b in zip(student, teacher)) / 6
    kept = [(image, 1 + patch) for image in range(6) for patch in range(16) if policies[-1][image, patch] > 0]
    error = sum((tokens[index] - teacher_tokens[index]).square().mean().item() for index in kept) / len(kept)
    expected = cross_entropy_by_hand(logits, batch.targets.tolist()) + 3.0 * ratio + 0.7 * divergence + 0.2 * error
    assert min(ratio, divergence, error) > 1e-4
    assert result["loss"].item() == pytest.approx(expected, rel=1e-4)
    assert result["kept"].tolist() == pytest.approx([0.75, 0.5, 0.25])


@pytest.mark.parametrize("options", [{}, {"softmax_first": True}, {"class_weight": "balanced"}])
def test_gradient_of_the_cross_entropy_in_double_precision_is_that_of_finite_differences(options):
    objective = Supervised(nn.Identity(), **options)
    objective.set_class_counts(torch.tensor([4, 2, 3]))
    logits, targets = torch.randn(4, 3, dtype=torch.float64, requires_grad=True), torch.rand(4, 3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: objective(Batch(x, targets), 0.5)["loss"], logits)


def test_losses_in_double_precision_are_computed_in_double_precision(batch, monkeypatch):
    """The divergence of LearnToPrune; float32 would differ by more than 1e-9."""
    fix_decisions(monkeypatch, (0.75, 0.5, 0.25))
    objective = LearnToPrune(randomize_decisions(PRUNED()), ratio=0.0, distil=1.0, distil_tokens=0.0).double().train()
    images, targets = batch.images.double(), batch.targets.double()
    with torch.no_grad():
        for parameter in objective.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    loss = objective(Batch(images, targets), 0.5)["loss"]
    student, teacher = (model(images).log_softmax(-1) for model in (objective.model, objective.teacher))
    expected = F.kl_div(student, teacher, reduction="batchmean", log_target=True) - (targets * student).sum(-1).mean()
    assert loss.dtype == torch.float64 and loss.item() == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize("shares, met", [((0.5, 0.25, 0.125), True), ((0.5, 0.25, 0.25), False)])
def test_the_ratio_term_is_zero_where_the_targets_are_met(shares, met, batch, monkeypatch):
    fix_decisions(monkeypatch, shares)
    model = PRUNED()
    losses = [LearnToPrune(model, ratio=ratio).train()(batch, 0.5)["loss"].item() for ratio in (0.0, 1e3)]
    assert (losses[0] == losses[1]) == met


def test_learned_reductions_have_no_loss_in_evaluation_mode(batch):
    with pytest.raises(ValueError, match="LearnToPrune is in evaluation mode, in which it has no loss; call train"):
        LearnToPrune(PRUNED()).eval()(batch, 0.5)


@pytest.mark.parametrize("shape", [(10,), (10, 1), (10, 9)])
def test_labels_that_are_no_probabilities_are_refused(shape):
    with pytest.raises(ValueError, match=r"got targets of shape .* expected a probability for each class, such as F\.one_hot"):
        Supervised(SmallCNN((8, 8), 1, 10))(Batch(torch.zeros(10, 1, 8, 8), torch.ones(shape)), 0.5)


@pytest.mark.parametrize(
    "objective, defaults",
    [
        (LearnToPrune, {"ratio": 2.0, "distil": 0.5, "distil_tokens": 0.5, "backbone": 0.01}),
        (LearnThresholds, {"budget": 0.75, "weight": 10.0}),
    ],
)
def test_default_options_are_those_of_the_papers(objective, defaults):
    options = inspect.signature(objective).parameters
    assert {name: options[name].default for name in defaults} == defaults


def test_the_teacher_is_the_initial_model_and_never_changes(batch):
    model = PRUNED()
    plain = unreduced(model).eval()
    objective = LearnToPrune(model).train()
    assert not objective.teacher.training and model.training
    assert torch.equal(objective.teacher(batch.images), plain(batch.images))
    optimizer = torch.optim.SGD([p for p in objective.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        objective(batch, 0.5)["loss"].backward()
        optimizer.step()
    assert all(p.grad is None and not p.requires_grad for p in objective.teacher.parameters())
    assert torch.equal(objective.teacher(batch.images), plain(batch.images))
    assert not torch.equal(unreduced(model).eval()(batch.images), plain(batch.images))
    assert not {id(p) for p in model.parameters()} & {id(p) for p in objective.teacher.parameters()}


def test_the_backbone_starts_after_a_sixth_of_the_run_and_learns_slowly(batch):
    model = PRUNED()
    objective = LearnToPrune(model, backbone=0.02).train()
    groups, rates = decay_groups(objective, 0.1)
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    ids = [id(p) for group in groups for p in group["params"]]
    assert len(ids) == len(set(ids)) and set(ids) == {id(p) for p in model.parameters()}

    def changed_by_a_step(progress):
        before = copy.deepcopy(model.state_dict())
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = 0.01 * rate(progress, 1.0)
        optimizer.zero_grad()
        objective(batch, progress)["loss"].backward()
        optimizer.step()
        return {name for name, value in model.state_dict().items() if not torch.equal(before[name], value)}

    predictors = {name for name in model.state_dict() if ".predictor." in name}
    for progress in (0.0, 0.1, 0.166):
        assert 0 < len(changed_by_a_step(progress)) <= len(predictors) and changed_by_a_step(progress) <= predictors
    assert changed_by_a_step(0.17) == set(model.state_dict())
    fast, slow = rates[0], rates[-1]
    assert [slow(0.5, rate) for rate in (1.0, 0.02, 0.001)] == [0.02, 0.02, 0.001]
    assert [fast(progress, 0.3) for progress in (0.0, 0.5)] == [0.3, 0.3]


def test_a_predictor_learns_to_keep_the_target_share(batch):
    """Training starts from a predictor that keeps nearly all patches."""
    model = PRUNED(reduction=partial(LearnedPrune, keep=0.5, layers=(1,)), pool=MeanTokens)
    predictor = model.blocks[1].reduction.predictor
    nn.init.constant_(predictor.decide[-1].bias[:1], 3.0)
    objective, kept = LearnToPrune(model, distil_tokens=0.0).train(), []
    optimizer = torch.optim.Adam(predictor.parameters(), lr=0.05)
    for _ in range(40):
        result = objective(batch, 0.0)
        optimizer.zero_grad()
        result["loss"].backward()
        optimizer.step()
        kept.append(result["kept"].item())
    assert kept[0] > 0.85 and abs(sum(kept[-10:]) / 10 - 0.5) < 0.15


# LearnThresholds


def test_the_loss_of_ltmp_is_cross_entropy_and_the_squared_difference_to_the_budget(batch):
    model = randomize_decisions(THRESHOLDS()).train()
    result = LearnThresholds(model, budget=0.4, weight=7.0)(batch, 0.5)
    cross_entropy = cross_entropy_by_hand(model(batch.images).tolist(), batch.targets.tolist())
    assert 0.4 < result["spent"] < 1
    assert result["loss"].item() == pytest.approx(cross_entropy + 7.0 * (result["spent"].item() - 0.4) ** 2, rel=1e-5)


def test_running_statistics_of_the_frozen_model_stay(batch):
    model = THRESHOLDS()
    model.dropout = nn.BatchNorm1d(17)  # 17 tokens enter the blocks
    LearnThresholds(model)(batch, 0.0)
    LearnThresholds(model).train()(batch, 0.0)
    assert model.dropout.num_batches_tracked == 0 and model.training


def test_the_share_spent_is_one_if_all_is_kept_and_falls_with_every_dropped_token():
    objective = LearnThresholds(THRESHOLDS())
    kept = [torch.ones(6, 17) for _ in range(4)]
    assert objective.compute_share(kept).item() == 1
    spent = [1.0]
    for block, token in [(3, 1), (3, 2), (2, 5), (1, 9), (0, 3), (0, 4)]:
        kept[block][:, token] = 0
        spent.append(objective.compute_share(kept).item())
    assert spent == sorted(spent, reverse=True) and len(set(spent)) == len(spent)
    before = kept[1].clone()
    kept[1][:, 3] = 0  # already dropped in block 0
    assert objective.compute_share(kept).item() == pytest.approx(spent[-1]) and not torch.equal(before, kept[1])


def spent_by_hand(model, rows):
    """LTMP equation 8 with r = 4: n tokens before and m tokens after the reduction of each block, for one image."""
    d = 16
    full = sum(4 * 17 * d * d + 2 * 17 * 17 * d + 8 * 17 * d * d for _ in rows)
    return sum(4 * n * d * d + 2 * n * n * d + 8 * m * d * d for n, m in rows) / full


@pytest.mark.parametrize("merge", [0.6, None])
def test_the_share_spent_is_that_of_the_closed_form_for_one_image(merge):
    model = randomize_decisions(TINY(reduction=partial(LearnedThresholds, merge=merge, prune=0.8)))
    for _ in range(4):
        x = torch.randn(1, 1, 8, 8)
        rows = seen_tokens(model.eval(), x)[0].tolist()
        share = closed_form(model, rows)["blocks"] / closed_form(unreduced(model))["blocks"]
        spent = LearnThresholds(model).train()(Batch(x, torch.eye(5)[:1]), 0.0)["spent"].item()
        assert spent == pytest.approx(share, rel=1e-5) == pytest.approx(spent_by_hand(model, rows), rel=1e-5) and spent < 1


def test_a_block_without_thresholds_is_counted_too(batch):
    def only_in_second_block(context):
        return LearnedThresholds(context, merge=None, prune=0.9) if context.layer == 1 else None

    model = randomize_decisions(TINY(reduction=only_in_second_block))
    kept = torch.ones(6, 17)
    kept[:, :9] = 0
    spent = LearnThresholds(model).compute_share([kept]).item()
    assert spent == pytest.approx(spent_by_hand(model, [(17, 17), (17, 8), (8, 8), (8, 8)]))
    assert LearnThresholds(model).train()(batch, 0.0)["loss"].isfinite()


def test_only_thresholds_learn_and_are_clamped_to_their_range(batch):
    model = randomize_decisions(THRESHOLDS())
    objective = LearnThresholds(model, budget=0.05).train()
    trained = {name for name, p in objective.named_parameters() if p.requires_grad}
    assert trained == {f"model.blocks.{layer}.reduction.{name}" for layer in range(4) for name in ("merge", "prune")}
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD([p for p in objective.parameters() if p.requires_grad], lr=100.0)
    objective(batch, 0.0)["loss"].backward()
    optimizer.step()
    assert not all(0 <= block.reduction.merge <= 1 for block in model.blocks)
    objective.after_step(0.1)
    for block in model.blocks:
        assert 0 <= block.reduction.merge <= 1 and 0 <= block.reduction.prune <= 17
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if ".reduction." not in name)


@pytest.mark.parametrize("budget", [0.4, 0.8])
@pytest.mark.slow
def test_the_thresholds_reach_the_budget(budget, batch):
    model = randomize_decisions(TINY(reduction=partial(LearnedThresholds, merge=0.9, prune=0.0)))
    objective = LearnThresholds(model, budget=budget).train()
    optimizer = torch.optim.Adam([p for p in objective.parameters() if p.requires_grad], lr=0.03)
    spent = []
    for _ in range(40):
        result = objective(batch, 0.0)
        optimizer.zero_grad()
        result["loss"].backward()
        optimizer.step()
        objective.after_step(0.0)
        spent.append(result["spent"].item())
    assert spent[0] > 0.85 and abs(sum(spent[-10:]) / 10 - budget) < 0.1


# Bad input

WITHOUT_REDUCTION = {
    "plain": TINY,
    "merge": partial(TINY, reduction=Merge),
    "off": partial(TINY, reduction=partial(LearnedPrune, keep=1)),
    "cnn": partial(SmallCNN, (8, 8), 1, 5),
    "pixels": partial(Pixels, (8, 8), 1, 5),
}


@pytest.mark.parametrize("objective", [LearnToPrune, LearnThresholds])
@pytest.mark.parametrize("model", WITHOUT_REDUCTION)
def test_a_model_without_the_reduction_to_train_is_refused(objective, model):
    reduction = {LearnToPrune: "LearnedPrune", LearnThresholds: "LearnedThresholds"}[objective]
    with pytest.raises(ValueError, match=rf"trains {reduction}, which no block .* has, or which is off; expected reduction={reduction}"):
        objective(WITHOUT_REDUCTION[model]())


@pytest.mark.parametrize(
    "make, message",
    [(partial(Supervised, TINY(), softmax_first="no"), "softmax_first is 'no'; expected True for the mistake")]
    + [(partial(LearnThresholds, THRESHOLDS(), budget=budget), f"budget is {budget}; expected a fraction") for budget in (0, -0.1, 1.1)],
)
def test_options_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
