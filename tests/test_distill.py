"""Distillation: losses by hand and as in timm, models with two heads, and a teacher that never changes."""

import copy
import math
import re
from functools import partial

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models.deit import VisionTransformerDistilled
from timm.task import LogitDistillationTask, TokenDistillationTask
from torch import nn
from toys import slow_after, tiny_vit

from smallvit import ClassToken, Distill, DistilledTokens, LeNet, PatchEmbed, Prune, SmallCNN, Supervised, ViT, initialize
from smallvit.augment import Batch
from smallvit.optim import decay_groups

SIDE, CLASSES = 8, 5
VIT = partial(tiny_vit, (SIDE, SIDE), tokenizer=partial(PatchEmbed, patch=4))
TWO_HEADS = partial(VIT, pool=DistilledTokens)
CNN = partial(SmallCNN, (SIDE, SIDE), 1, CLASSES, width=4, hidden=8)
MODELS = {"vit": VIT, "cnn": CNN, "two heads": TWO_HEADS}
OPTIONS = [dict(kind="soft", weight=0.3, temperature=4.0), dict(kind="soft", weight=1.0), dict(kind="hard", weight=0.7)]


@pytest.fixture
def batch():
    """Six images with soft targets, as mixing and smoothing make them."""
    return Batch(torch.randn(6, 1, SIDE, SIDE), (3 * torch.rand(6, CLASSES)).softmax(-1))


def randomize(model, std=0.1):
    """Add noise to parameters and running statistics, so that no logit is near 0."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(std * torch.randn_like(p))
        for statistic in (b for b in model.buffers() if b.is_floating_point()):
            statistic.add_(std * torch.rand_like(statistic))
    return model


def make_teacher():
    return randomize(CNN(), 0.3)


# Losses


def loss_by_hand(logits, distilled, teacher, targets, kind, weight, temperature=3.0):
    """Hinton et al. 2015, section 2, and DeiT, equations 2 and 3, number by number; the mean over images."""

    def probabilities(row, t=1.0):
        total = sum(math.exp(z / t) for z in row)
        return [math.exp(z / t) / total for z in row]

    total = 0.0
    for labeled_row, distilled_row, teacher_row, target in zip(logits, distilled, teacher, targets):
        total += (1 - weight) * -sum(t * math.log(p) for t, p in zip(target, probabilities(labeled_row)))
        if kind == "hard":
            total += weight * -math.log(probabilities(distilled_row)[teacher_row.index(max(teacher_row))])
        else:
            pairs = zip(probabilities(teacher_row, temperature), probabilities(distilled_row, temperature))
            total += weight * temperature**2 * sum(p * math.log(p / q) for p, q in pairs)
    return total / len(targets)


@pytest.mark.parametrize("options", [*OPTIONS, {}])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_the_loss_is_that_of_the_papers(make, options, batch):
    model, teacher = randomize(make()).eval(), make_teacher().eval()
    logits, teacher_logits = model(batch.images).tolist(), teacher(batch.images).tolist()
    defaults = {"kind": "soft", "weight": 0.5, "temperature": 3.0}
    expected = loss_by_hand(logits, logits, teacher_logits, batch.targets.tolist(), **defaults | options)
    assert Distill(model, teacher, **options)(batch, 0.3)["loss"].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("options", OPTIONS)
def test_with_two_heads_one_learns_from_labels_and_one_from_the_teacher(options, batch):
    model, teacher = randomize(TWO_HEADS()).eval(), make_teacher().eval()
    tokens = model.tokens(batch.images)[0]
    logits, distilled = model.head.from_labels(tokens[:, 0]), model.head.from_teacher(tokens[:, 1])
    assert (logits - distilled).abs().min() > 1e-4
    rows = [x.tolist() for x in (logits, distilled, teacher(batch.images), batch.targets)]
    loss = Distill(model, teacher, token=True, **options)(batch, 0.3)["loss"]
    assert loss.item() == pytest.approx(loss_by_hand(*rows, **options), rel=1e-5)
    loss.backward()
    for head, weight in ((model.head.from_labels, 1 - options["weight"]), (model.head.from_teacher, options["weight"])):
        assert (head.weight.grad.abs().max() > 1e-4) == (weight > 0)


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_gradients_in_double_precision_are_those_of_finite_differences(kind, batch):
    objective = Distill(VIT(), make_teacher(), kind=kind).double().eval()
    objective.model = nn.Identity()  # the images are the logits
    logits, double = torch.randn_like(batch.targets).double().requires_grad_(), batch.targets.double()
    teacher = (torch.randn_like(double),)
    assert torch.autograd.gradcheck(lambda x: objective(Batch(x, double, teacher_logits=teacher), 0.5)["loss"], logits)


@pytest.mark.parametrize("kind", slow_after(1, ["soft", "hard"]))
@pytest.mark.parametrize(
    "make", [partial(VIT, dropout=0.2, drop_path=0.3), CNN, TWO_HEADS, partial(VIT, reduction=partial(Prune, shrink=(0.0, 0.5)))]
)
def test_weight_0_is_bitwise_supervised(make, kind, batch):
    def trained(objective):
        model = initialize(make(), 0)
        objective = objective(model).train()
        optimizer, losses = torch.optim.AdamW([p for p in objective.parameters() if p.requires_grad]), []
        for step in range(3):
            torch.manual_seed(step)
            losses.append(objective(batch, step / 3)["loss"])
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
        return torch.stack(losses), model.state_dict()

    losses, state = trained(Supervised)
    off_losses, off_state = trained(lambda model: Distill(model, make_teacher(), kind=kind, weight=0))
    other_losses, _ = trained(lambda model: Distill(model, make_teacher(), kind=kind, weight=0.5))
    assert torch.equal(losses, off_losses) and all(torch.equal(state[name], off_state[name]) for name in state)
    assert not torch.equal(losses, other_losses)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 20.0])
def test_a_student_equal_to_its_teacher_has_no_loss_and_no_gradient(temperature, batch):
    model = randomize(VIT())
    loss = Distill(model, model, weight=1, temperature=temperature).train()(batch, 0.0)["loss"]
    loss.backward()
    assert abs(loss.item()) < 1e-6 and all(p.grad.abs().max() < 1e-5 for p in model.parameters())
    assert Distill(model, make_teacher(), weight=1, temperature=temperature)(batch, 0.0)["loss"] > 1e-4


class Constant(nn.Module):
    """Logits that are parameters and do not depend on the images."""

    def __init__(self):
        super().__init__()
        self.logits = nn.Parameter(3 * torch.randn(4, CLASSES))

    def forward(self, x):
        return self.logits


def test_a_high_temperature_matches_logits():
    """Hinton et al. 2015, equation 4: for logits of mean 0 the gradient is (z - v) / N, that of half their squared error."""
    model, teacher = Constant(), Constant()
    batch, errors = Batch(torch.zeros(4, 1, 2, 2), torch.eye(CLASSES)[:4]), []
    z, v = (x.logits.detach() - x.logits.detach().mean(-1, keepdim=True) for x in (model, teacher))
    for temperature in (10.0, 100.0, 1000.0):
        model.zero_grad()
        Distill(model, teacher, weight=1, temperature=temperature)(batch, 0.0)["loss"].backward()
        errors.append((model.logits.grad - (z - v) / CLASSES / len(z)).abs().max().item())
    assert errors[0] > 8 * errors[1] > 64 * errors[2] and errors[2] < 0.01 * (z - v).abs().max() / CLASSES / len(z)


def test_the_loss_of_deit_is_smaller_by_the_number_of_classes(batch):
    """DeiT's loss, as EViT and DynamicViT use it, divides the sum over the batch by batch times classes."""
    model, teacher, t = VIT().eval(), make_teacher().eval(), 2.0
    student_logs, teacher_logs = ((m(batch.images) / t).log_softmax(-1) for m in (model, teacher))
    deit = t**2 * F.kl_div(student_logs, teacher_logs, reduction="sum", log_target=True) / student_logs.numel()
    loss = Distill(model, teacher, weight=1, temperature=t)(batch, 0.0)["loss"]
    assert loss.item() == pytest.approx(CLASSES * deit.item(), rel=1e-5)


# As in timm


def prepare_for_timm(model):
    """Add the attributes that timm needs; with equal statistics timm gives teacher and student the same images."""
    model.pretrained_cfg, model.num_classes, model.in_chans = {"mean": (0.0,), "std": (1.0,)}, CLASSES, 1
    return model


needs_timm_1_0_31 = pytest.mark.skipif(
    tuple(map(int, timm.__version__.split(".")[:3])) < (1, 0, 31), reason="before timm 1.0.31 its tasks weigh the losses otherwise"
)


def timm_task(task, student, teacher, weight, **options):
    models = prepare_for_timm(copy.deepcopy(student)), prepare_for_timm(copy.deepcopy(teacher))
    return task(*models, nn.CrossEntropyLoss(), task_loss_weight=1 - weight, verbose=False, **options).train()


@needs_timm_1_0_31
@pytest.mark.parametrize("weight, temperature", [(0.3, 1.0), (0.5, 4.0), (0.9, 2.0)])
@pytest.mark.parametrize("make", [VIT, CNN])
def test_soft_distillation_is_that_of_timm(make, weight, temperature, batch):
    model, teacher = randomize(make()), make_teacher()
    task = timm_task(LogitDistillationTask, model, teacher, weight, temperature=temperature)
    loss = Distill(model, teacher, weight=weight, temperature=temperature).train()(batch, 0.3)["loss"]
    expected = task(batch.images, batch.targets)["loss"]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    for (name, p), q in zip(model.named_parameters(), task.trainable_module.parameters()):
        assert torch.allclose(p.grad, q.grad, atol=1e-5, rtol=1e-4), name


def vit_and_timm_vit():
    """A ViT with two heads and timm's distilled ViT with the same random weights."""
    sizes = dict(img_size=SIDE, patch_size=4, in_chans=1, num_classes=CLASSES, embed_dim=16, depth=2, num_heads=2)
    timm_vit = VisionTransformerDistilled(**sizes)
    with torch.no_grad():
        for p in timm_vit.parameters():
            p.normal_(std=0.3)
    vit = TWO_HEADS()
    vit.load_state_dict(rename(timm_vit.state_dict()))
    return vit, timm_vit


NAMES = {
    "pos_embed": "position.table", "patch_embed": "tokenizer", "attn": "attention", "mlp.fc1": "mlp.0", "mlp.fc2": "mlp.3",
    "head": "head.from_labels", "head_dist": "head.from_teacher",
}  # fmt: skip


def rename(state):
    """Tensors of timm's distilled ViT under the names of smallvit, with the two tokens in one tensor."""
    renamed = {"prefix": torch.cat([state["cls_token"][0], state["dist_token"][0]])}
    for name, value in state.items():
        if name not in ("cls_token", "dist_token"):
            for old, new in NAMES.items():
                name = re.sub(rf"(^|\.){old}(\.|$)", rf"\1{new}\2", name) if ".from_" not in name else name
            renamed[name] = value[0] if name == "position.table" else value
    return renamed


def test_logits_are_those_of_timms_distilled_vit(batch):
    vit, timm_vit = vit_and_timm_vit()
    logits = vit.eval()(batch.images)
    assert logits.std() > 0.1 and torch.allclose(logits, timm_vit.eval()(batch.images), atol=1e-5)
    timm_vit.train().set_distilled_training(True)
    heads = vit.train().head.apart(vit.features(batch.images))
    for head, expected in zip(heads, timm_vit(batch.images)):
        assert torch.allclose(head, expected, atol=1e-5)
    assert torch.equal(sum(heads) / 2, vit(batch.images))


@needs_timm_1_0_31
@pytest.mark.parametrize("kind, temperature", [("soft", 1.0), ("soft", 3.0), ("hard", 3.0)])
@pytest.mark.parametrize("weight", [0.3, 0.5])
def test_distillation_with_a_token_is_that_of_timm(kind, temperature, weight, batch):
    vit, timm_vit = vit_and_timm_vit()
    teacher = make_teacher()
    task = timm_task(TokenDistillationTask, timm_vit, teacher, weight, distill_type=kind, temperature=temperature)
    objective = Distill(vit, teacher, kind=kind, weight=weight, temperature=temperature, token=True).train()
    loss, expected = objective(batch, 0.3)["loss"], task(batch.images, batch.targets)["loss"]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    gradients = rename({name: p.grad for name, p in task.trainable_module.named_parameters()})
    assert gradients.keys() == dict(vit.named_parameters()).keys()
    for name, p in vit.named_parameters():
        assert torch.allclose(p.grad, gradients[name], atol=1e-5, rtol=1e-4), name


# The teacher


def test_the_teacher_never_changes_and_the_given_model_is_left_alone(batch):
    given = make_teacher().train()
    before = copy.deepcopy(given.state_dict())
    model = CNN()
    objective = Distill(model, given, weight=0.8).train()
    optimizer = torch.optim.SGD([p for p in objective.parameters() if p.requires_grad], lr=0.1)
    logits = objective.teacher(batch.images)
    for _ in range(3):
        optimizer.zero_grad()
        objective(batch, 0.5)["loss"].backward()
        optimizer.step()
        assert not any(module.training for module in objective.teacher.modules()) and model.training
    assert torch.equal(objective.teacher(batch.images), logits)
    assert all(p.grad is None and not p.requires_grad for p in objective.teacher.parameters())
    assert given.training and all(p.requires_grad for p in given.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in given.state_dict().items())


def test_only_the_student_is_trained_and_saved(batch):
    model = VIT()
    objective = Distill(model, model, weight=0.8)
    ids = {id(p) for p in model.parameters()}
    assert objective.model is model and {id(p) for p in objective.parameters()} == ids
    assert {id(p) for group in decay_groups(objective, 0.1)[0] for p in group["params"]} == ids
    assert {name.removeprefix("model.") for name in objective.state_dict()} == set(model.state_dict())
    student, teacher = ({p.untyped_storage().data_ptr() for p in m.state_dict().values()} for m in (model, objective.teacher))
    assert not student & teacher


def test_a_student_resumed_from_its_state_is_bitwise_equal(batch):
    def trained(objective, steps):
        optimizer = torch.optim.SGD(objective.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            objective(batch, 0.5)["loss"].backward()
            optimizer.step()
        return objective.state_dict()

    teacher = make_teacher()
    straight, first, second = (Distill(initialize(CNN(), 0), teacher).train() for _ in range(3))
    expected = trained(straight, 4)
    second.load_state_dict(copy.deepcopy(trained(first, 2)))
    assert all(torch.equal(expected[name], tensor) for name, tensor in trained(second, 2).items())


def test_the_teacher_follows_the_precision_of_the_images(batch):
    objective = Distill(randomize(VIT()), make_teacher(), weight=0.8)
    loss = objective(batch, 0.0)["loss"].item()
    exact = objective.double()(Batch(batch.images.double(), batch.targets.double()), 0.0)["loss"]
    assert exact.item() == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_the_loss_in_bfloat16_is_nearly_the_same(kind, batch):
    objective = Distill(randomize(TWO_HEADS()), make_teacher(), kind=kind, token=True)
    expected = objective(batch, 0.0)["loss"]
    with torch.autocast("cpu", torch.bfloat16):
        loss = objective(batch, 0.0)["loss"]
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(expected.item(), rel=0.05)


@pytest.mark.parametrize("options", slow_after(1, [dict(kind="soft", temperature=1.0), dict(kind="hard")]))
@pytest.mark.parametrize("token", slow_after(1, [True, False]))
def test_with_weight_1_a_student_learns_from_its_teacher_alone(options, token):
    """The labels, here all wrong, do not count."""
    teacher = initialize(LeNet((16, 16), 1, CLASSES, activation="relu"), 0).eval()
    images = torch.randn(64, 1, 16, 16)
    with torch.no_grad():
        logits = teacher(images)
        teacher.head.bias.sub_(logits.mean(0))
        for p in teacher.head.parameters():  # a rather certain teacher: logits of mean 0 and standard deviation 3
            p.mul_(3 / logits.std(0).mean())
        labels = teacher(images).argmax(-1)
    assert len(labels.unique()) == CLASSES
    model = initialize(ViT((16, 16), 1, CLASSES, dim=32, depth=1, heads=2, pool=DistilledTokens if token else ClassToken), 0)
    objective = Distill(model, teacher, weight=1, token=token, **options).train()
    optimizer = torch.optim.Adam(objective.parameters(), lr=3e-3)
    batch = Batch(images, torch.eye(CLASSES)[(labels + 1) % CLASSES])

    def agreement():
        with torch.no_grad():
            logits = model.head.apart(model.features(images))[1] if token else model(images)
        return (logits.argmax(-1) == labels).float().mean().item()

    before = agreement()
    for _ in range(60):
        optimizer.zero_grad()
        objective(batch, 0.0)["loss"].backward()
        optimizer.step()
    assert before < 0.5 and agreement() > 0.9


def test_the_progress_of_reductions_is_set(batch):
    model = VIT(reduction=partial(Prune, shrink=(0.0, 0.5)))
    objective = Distill(model, make_teacher())
    for progress in (0.0, 0.25, 1.0):
        objective(batch, progress)
        assert [block.reduction.progress for block in model.blocks] == [progress] * 2


# Bad input


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(kind="firm"), "kind is 'firm'; expected 'soft' .* or 'hard'"),
        (dict(weight=-0.1), "weight is -0.1; expected the teacher's share of the loss, from 0 to 1"),
        (dict(weight=1.1), "weight is 1.1"),
        (dict(weight=math.nan), "weight is nan"),
        (dict(temperature=0), "temperature is 0; expected a number above 0"),
        (dict(temperature=-1.0), "temperature is -1.0"),
        (dict(temperature=math.inf), "temperature is inf"),
        (dict(kind="hard", temperature=1.0), "temperature is 1.0.* hard targets have none; use kind='soft'"),
        (dict(token=True), "token=True trains two heads and this ViT does not have them; expected pool=DistilledTokens"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Distill(VIT(), make_teacher(), **options)


@pytest.mark.parametrize("weight", [0.5, 1.0])
def test_a_teacher_with_other_classes_is_refused(weight, batch):
    other = SmallCNN((SIDE, SIDE), 1, CLASSES + 2, width=4, hidden=8)
    with pytest.raises(ValueError, match=r"the teacher gives logits of shape \(6, 7\); expected \(6, 5\) as the targets"):
        Distill(VIT(), other, weight=weight)(batch, 0.0)
