"""Distillation: its losses by hand and side by side with timm's, the two heads, and a teacher that stays as it is."""

import copy
import math
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from timm.models.deit import VisionTransformerDistilled
from timm.task import LogitDistillationTask, TokenDistillationTask
from torch import nn

from smallvit import ClassToken, Distill, DistilledTokens, LeNet, PatchEmbed, Prune, SmallCNN, Supervised, ViT, initialize
from smallvit.augment import Batch
from smallvit.optim import decay_groups

SIDE, CLASSES = 8, 5
VIT = partial(ViT, (SIDE, SIDE), 1, CLASSES, dim=16, depth=2, heads=2, tokenizer=partial(PatchEmbed, patch=4))
TWO = partial(VIT, pool=DistilledTokens)
CNN = partial(SmallCNN, (SIDE, SIDE), 1, CLASSES, width=4, hidden=8)
MODELS = {"vit": VIT, "cnn": CNN, "two heads": TWO}
KNOBS = [dict(kind="soft", weight=0.3, temperature=4.0), dict(kind="soft", weight=1.0), dict(kind="hard", weight=0.7)]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def batch():
    """Targets as mixing and smoothing leave them: rows of shares."""
    return Batch(torch.randn(6, 1, SIDE, SIDE), (3 * torch.rand(6, CLASSES)).softmax(-1))


def stirred(model, by=0.1):
    """Far from its start, so that no logit is near 0; running statistics too."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(by * torch.randn_like(p))
        for statistic in (b for b in model.buffers() if b.is_floating_point()):
            statistic.add_(by * torch.rand_like(statistic))
    return model


def teacher():
    return stirred(CNN(), 0.3)


# The losses


def by_hand(labelled, taught, said, targets, kind, weight, temperature=3.0):
    """Hinton et al. 2015, section 2, and DeiT, equations 2 and 3, number by number: (1 - w) CE + w (T^2 KL, or CE with the
    teacher's first choice), the mean over images."""

    def chances(row, t=1.0):
        whole = sum(math.exp(z / t) for z in row)
        return [math.exp(z / t) / whole for z in row]

    total = 0.0
    for own, copied, wanted, target in zip(labelled, taught, said, targets):
        total += (1 - weight) * -sum(t * math.log(p) for t, p in zip(target, chances(own)))
        if kind == "hard":
            total += weight * -math.log(chances(copied)[wanted.index(max(wanted))])
        else:
            pairs = zip(chances(wanted, temperature), chances(copied, temperature))
            total += weight * temperature**2 * sum(p * math.log(p / q) for p, q in pairs)
    return total / len(targets)


@pytest.mark.parametrize("knobs", KNOBS)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_the_loss_is_the_papers(make, knobs, batch):
    model, master = stirred(make()).eval(), teacher().eval()
    logits, said = model(batch.images).tolist(), master(batch.images).tolist()
    expected = by_hand(logits, logits, said, batch.targets.tolist(), **knobs)
    assert Distill(model, master, **knobs)(batch, 0.3)["loss"].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("knobs", KNOBS)
def test_with_a_token_the_class_token_learns_from_labels_and_the_other_from_the_teacher(knobs, batch):
    model, master = stirred(TWO()).eval(), teacher().eval()
    tokens = model.tokens(batch.images)[0]
    labelled, taught = model.head.from_labels(tokens[:, 0]), model.head.from_teacher(tokens[:, 1])
    assert (labelled - taught).abs().min() > 1e-4
    expected = by_hand(labelled.tolist(), taught.tolist(), master(batch.images).tolist(), batch.targets.tolist(), **knobs)
    loss = Distill(model, master, token=True, **knobs)(batch, 0.3)["loss"]
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    loss.backward()
    for head, share in ((model.head.from_labels, 1 - knobs["weight"]), (model.head.from_teacher, knobs["weight"])):
        assert (head.weight.grad.abs().max() > 1e-4) == (share > 0)


def test_the_defaults_are_soft_targets_that_count_for_a_half(batch):
    model, master = VIT().eval(), teacher().eval()
    logits, said = model(batch.images).tolist(), master(batch.images).tolist()
    expected = by_hand(logits, logits, said, batch.targets.tolist(), "soft", 0.5, 3.0)
    assert Distill(model, master)(batch, 0.0)["loss"].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["soft", "hard"])
@pytest.mark.parametrize(
    "make", [partial(VIT, dropout=0.2, drop_path=0.3), CNN, TWO, partial(VIT, reduction=partial(Prune, shrink=(0.0, 0.5)))]
)
def test_weight_0_is_supervised_bit_for_bit(make, kind, batch):
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
    same, mine = trained(lambda model: Distill(model, teacher(), kind=kind, weight=0))
    other, _ = trained(lambda model: Distill(model, teacher(), kind=kind, weight=0.5))
    assert torch.equal(losses, same) and all(torch.equal(state[name], mine[name]) for name in state)
    assert not torch.equal(losses, other)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 20.0])
def test_who_says_what_the_teacher_says_has_nothing_to_learn_from_it(temperature, batch):
    model = stirred(VIT())
    objective = Distill(model, model, weight=1, temperature=temperature).train()
    loss = objective(batch, 0.0)["loss"]
    loss.backward()
    assert abs(loss.item()) < 1e-6 and all(p.grad.abs().max() < 1e-5 for p in model.parameters())
    assert Distill(model, teacher(), weight=1, temperature=temperature)(batch, 0.0)["loss"] > 1e-4


class Said(nn.Module):
    """Logits that are its weights, whatever the images."""

    def __init__(self, b=4, k=CLASSES):
        super().__init__()
        self.logits = nn.Parameter(3 * torch.randn(b, k))

    def forward(self, x):
        return self.logits


def test_at_a_high_temperature_it_matches_logits():
    """Hinton et al. 2015, equation 4: with logits of mean 0 the gradient is (z - v) / N, that of half their squared error."""
    model, master = Said(), Said()
    batch, gaps = Batch(torch.zeros(4, 1, 2, 2), torch.eye(CLASSES)[:4]), []
    z, v = (x.logits.detach() - x.logits.detach().mean(-1, keepdim=True) for x in (model, master))
    for temperature in (10.0, 100.0, 1000.0):
        model.zero_grad()
        Distill(model, master, weight=1, temperature=temperature)(batch, 0.0)["loss"].backward()
        gaps.append((model.logits.grad - (z - v) / CLASSES / len(z)).abs().max().item())
    assert gaps[0] > 8 * gaps[1] > 64 * gaps[2] and gaps[2] < 0.01 * (z - v).abs().max() / CLASSES / len(z)


def test_others_divide_by_the_number_of_classes_too(batch):
    """DeiT's loss as EViT and DynamicViT ship it: a sum over the whole batch, divided by all of its numbers."""
    model, master, t = VIT().eval(), teacher().eval(), 2.0
    soft, aim = ((m(batch.images) / t).log_softmax(-1) for m in (model, master))
    theirs = t**2 * F.kl_div(soft, aim, reduction="sum", log_target=True) / soft.numel()
    ours = Distill(model, master, weight=1, temperature=t)(batch, 0.0)["loss"]
    assert ours.item() == pytest.approx(CLASSES * theirs.item(), rel=1e-5)


# Side by side with timm


def for_timm(model):
    """What timm asks of a model; with equal statistics it hands the teacher the student's images as they are."""
    model.pretrained_cfg, model.num_classes, model.in_chans = {"mean": (0.0,), "std": (1.0,)}, CLASSES, 1
    return model


@pytest.mark.parametrize("weight, temperature", [(0.3, 1.0), (0.5, 4.0), (0.9, 2.0)])
@pytest.mark.parametrize("make", [VIT, CNN])
def test_soft_distillation_is_timms(make, weight, temperature, batch):
    model, master = stirred(make()), teacher()
    theirs = LogitDistillationTask(
        for_timm(copy.deepcopy(model)),
        for_timm(copy.deepcopy(master)),
        nn.CrossEntropyLoss(),
        task_loss_weight=1 - weight,
        temperature=temperature,
        verbose=False,
    ).train()
    mine = Distill(model, master, weight=weight, temperature=temperature).train()
    loss, expected = mine(batch, 0.3)["loss"], theirs(batch.images, batch.targets)["loss"]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    for (name, p), q in zip(model.named_parameters(), theirs.trainable_module.parameters()):
        assert torch.allclose(p.grad, q.grad, atol=1e-5, rtol=1e-4), name


def pair_of_vits():
    """timm's distilled ViT, every weight drawn, and ours with the same weights; and timm's names for them in ours."""
    theirs = VisionTransformerDistilled(
        img_size=SIDE, patch_size=4, in_chans=1, num_classes=CLASSES, embed_dim=16, depth=2, num_heads=2
    )
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_(std=0.3)
    ours = TWO()
    ours.load_state_dict(translated(theirs.state_dict()))
    return ours, theirs


NAMES = {
    "pos_embed": "position.table", "patch_embed": "tokenizer", "attn": "attention", "mlp.fc1": "mlp.0", "mlp.fc2": "mlp.3",
    "head": "head.from_labels", "head_dist": "head.from_teacher",
}  # fmt: skip


def translated(state):
    """What timm calls by these names in our names, the two tokens in one."""
    ours = {"prefix": torch.cat([state["cls_token"][0], state["dist_token"][0]])}
    for name, value in state.items():
        if name not in ("cls_token", "dist_token"):
            for theirs, mine in NAMES.items():
                name = re.sub(rf"(^|\.){theirs}(\.|$)", rf"\1{mine}\2", name) if ".from_" not in name else name
            ours[name] = value[0] if name == "position.table" else value
    return ours


def test_logits_are_those_of_timms_distilled_vit(batch):
    ours, theirs = pair_of_vits()
    logits = ours.eval()(batch.images)
    assert logits.std() > 0.1 and torch.allclose(logits, theirs.eval()(batch.images), atol=1e-5)
    theirs.train().set_distilled_training(True)
    apart = ours.train().head.apart(ours.features(batch.images))
    for mine, other in zip(apart, theirs(batch.images)):
        assert torch.allclose(mine, other, atol=1e-5)
    assert torch.equal(sum(apart) / 2, ours(batch.images))


@pytest.mark.parametrize("kind, temperature", [("soft", 1.0), ("soft", 3.0), ("hard", 3.0)])
@pytest.mark.parametrize("weight", [0.3, 0.5])
def test_a_token_learns_as_timms(kind, temperature, weight, batch):
    ours, student = pair_of_vits()
    master = teacher()
    theirs = TokenDistillationTask(
        for_timm(student),
        for_timm(copy.deepcopy(master)),
        nn.CrossEntropyLoss(),
        distill_type=kind,
        task_loss_weight=1 - weight,
        temperature=temperature,
        verbose=False,
    ).train()
    mine = Distill(ours, master, kind=kind, weight=weight, temperature=temperature, token=True).train()
    loss, expected = mine(batch, 0.3)["loss"], theirs(batch.images, batch.targets)["loss"]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    gradients = translated({name: p.grad for name, p in student.named_parameters()})
    assert gradients.keys() == dict(ours.named_parameters()).keys()
    for name, p in ours.named_parameters():
        assert torch.allclose(p.grad, gradients[name], atol=1e-5, rtol=1e-4), name


# The teacher


def test_the_teacher_rests_whatever_the_objective_does(batch):
    """Neither dropout nor running statistics nor gradients, while the student trains; and it is nobody else's."""
    given = teacher().train()
    before = copy.deepcopy(given.state_dict())
    model = CNN()
    objective = Distill(model, given, weight=0.8).train()
    optimizer = torch.optim.SGD([p for p in objective.parameters() if p.requires_grad], lr=0.1)
    said = objective.teacher(batch.images)
    for _ in range(3):
        optimizer.zero_grad()
        objective(batch, 0.5)["loss"].backward()
        optimizer.step()
        assert not any(module.training for module in objective.teacher.modules()) and model.training
    assert torch.equal(objective.teacher(batch.images), said)
    assert all(p.grad is None and not p.requires_grad for p in objective.teacher.parameters())
    after = given.state_dict()
    assert given.training and all(p.requires_grad for p in given.parameters())
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_is_trained_and_saved_is_the_student_alone(batch):
    model = VIT()
    objective = Distill(model, model, weight=0.8)
    assert objective.model is model
    assert {id(p) for p in objective.parameters()} == {id(p) for p in model.parameters()}
    assert {id(p) for g in decay_groups(objective, 0.1)[0] for p in g["params"]} == {id(p) for p in model.parameters()}
    assert {name.removeprefix("model.") for name in objective.state_dict()} == set(model.state_dict())
    stores = [{p.untyped_storage().data_ptr() for p in m.state_dict().values()} for m in (model, objective.teacher)]
    assert not stores[0] & stores[1]


def test_a_student_taken_up_again_goes_on_bit_for_bit(batch):
    def stepped(objective, steps):
        optimizer = torch.optim.SGD(objective.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            objective(batch, 0.5)["loss"].backward()
            optimizer.step()
        return objective.state_dict()

    def made():
        return Distill(initialize(CNN(), 0), master).train()

    master = teacher()
    straight, first, second = made(), made(), made()
    whole = stepped(straight, 4)
    second.load_state_dict(copy.deepcopy(stepped(first, 2)))
    halves = stepped(second, 2)
    assert all(torch.equal(whole[name], halves[name]) for name in whole)


def test_the_teacher_goes_where_the_images_are(batch):
    objective = Distill(stirred(VIT()), teacher(), weight=0.8)
    loss = objective(batch, 0.0)["loss"].item()
    exact = objective.double()(Batch(batch.images.double(), batch.targets.double()), 0.0)["loss"]
    assert exact.item() == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_in_half_precision_the_loss_is_nearly_the_same(kind, batch):
    objective = Distill(stirred(TWO()), teacher(), kind=kind, token=True)
    expected = objective(batch, 0.0)["loss"]
    with torch.autocast("cpu", torch.bfloat16):
        loss = objective(batch, 0.0)["loss"]
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(expected.item(), rel=0.05)


@pytest.mark.parametrize("knobs", [dict(kind="soft", temperature=1.0), dict(kind="hard")])
@pytest.mark.parametrize("token", [False, True])
def test_a_student_learns_what_its_teacher_says_without_reading_a_label(knobs, token):
    """With weight 1 the labels, here all wrong, do not count."""
    master = initialize(LeNet((16, 16), 1, CLASSES, activation="relu"), 0).eval()
    images = torch.randn(64, 1, 16, 16)
    with torch.no_grad():
        logits = master(images)
        master.head.bias.sub_(logits.mean(0))
        for p in master.head.parameters():  # logits of mean 0 and deviation 3, so that it is rather sure
            p.mul_(3 / logits.std(0).mean())
        wanted = master(images).argmax(-1)
    assert len(wanted.unique()) == CLASSES
    model = initialize(ViT((16, 16), 1, CLASSES, dim=32, depth=1, heads=2, pool=DistilledTokens if token else ClassToken), 0)
    objective = Distill(model, master, weight=1, token=token, **knobs).train()
    optimizer = torch.optim.Adam(objective.parameters(), lr=3e-3)
    batch = Batch(images, torch.eye(CLASSES)[(wanted + 1) % CLASSES])

    def agreement():
        with torch.no_grad():
            logits = model.head.apart(model.features(images))[1] if token else model(images)
        return (logits.argmax(-1) == wanted).float().mean().item()

    before = agreement()
    for _ in range(60):
        optimizer.zero_grad()
        objective(batch, 0.0)["loss"].backward()
        optimizer.step()
    assert before < 0.5 and agreement() > 0.9


def test_a_reduction_that_follows_the_run_is_told_where_it_is(batch):
    model = VIT(reduction=partial(Prune, shrink=(0.0, 0.5)))
    objective = Distill(model, teacher())
    for progress in (0.0, 0.25, 1.0):
        objective(batch, progress)
        assert [block.reduction.progress for block in model.blocks] == [progress] * 2


# Bad input


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        (dict(kind="firm"), "kind is 'firm'; expected 'soft' .* or 'hard'"),
        (dict(weight=-0.1), "weight is -0.1; expected the teacher's share of the loss, from 0 to 1"),
        (dict(weight=1.1), "weight is 1.1"),
        (dict(weight=math.nan), "weight is nan"),
        (dict(temperature=0), "temperature is 0; expected a number above 0"),
        (dict(temperature=-1.0), "temperature is -1.0"),
        (dict(temperature=math.inf), "temperature is inf"),
        (dict(kind="hard", temperature=1.0), "temperature is 1.0 and hard targets have none; expected kind='soft', or no"),
        (dict(token=True), "token=True trains two heads and this ViT has not got them; expected pool=DistilledTokens"),
    ],
)
def test_bad_choices_are_named(knobs, message):
    with pytest.raises(ValueError, match=message):
        Distill(VIT(), teacher(), **knobs)


@pytest.mark.parametrize("weight", [0.5, 1.0])
def test_a_teacher_of_other_classes_is_named(weight, batch):
    other = SmallCNN((SIDE, SIDE), 1, CLASSES + 2, width=4, hidden=8)
    with pytest.raises(ValueError, match=r"the teacher gives logits of shape \(6, 7\); expected \(6, 5\) as the targets"):
        Distill(VIT(), other, weight=weight)(batch, 0.0)
