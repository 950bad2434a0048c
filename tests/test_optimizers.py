"""Optimizers beside AdamW: the steps of the papers, what they leave as it was, and all that a run does with its optimizer."""

import copy
import pickle
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from timm.optim import create_optimizer_v2
from torch import nn
from toys import TINY_VIT, slow_after, slow_but, tiny_vit

from smallvit import (
    DINO,
    MAE,
    SAM,
    AdamW,
    Attention,
    Learned,
    LearnedPrune,
    LearnedThresholds,
    LearnThresholds,
    LocalityAttention,
    Muon,
    Optimizer,
    PatchEmbed,
    Projected,
    Run,
    ScheduleFree,
    SemiSupervised,
    SmallCNN,
    Supervised,
    TalkingHeadsAttention,
    Tune,
    ViT,
    ablate,
    augment,
    describe,
    digits,
    fingerprint,
    fit,
    load_recipe,
    rebuild,
)
from smallvit.numerics import Numerics
from smallvit.optim import decay_groups, ema_update, hidden_matrices, tensor_pairs
from smallvit.optimizers.muon import COEFFICIENTS, orthogonalize
from smallvit.record import WEIGHTS
from smallvit.train import fit_stacked, loop
from smallvit.train.parallel import check_divisible
from smallvit.train.stack import NotStackable, Stack
from smallvit.tuning import arm_ranges

SHORT = Run(model=TINY_VIT, labels=50, val=50, steps=12, batch=8, augment=augment.digits())
FREE = SHORT.vary(optimizer=ScheduleFree, schedule="constant", ema=0.0)
RUNS = {
    "Muon": SHORT.vary(optimizer=Muon, layer_decay=0.7),
    "SAM on ScheduleFree": FREE.vary(optimizer=partial(SAM, base=ScheduleFree)),
    "SAM": SHORT.vary(optimizer=SAM),
    "ASAM on Muon": SHORT.vary(optimizer=partial(SAM, rho=0.5, adaptive=True, base=Muon)),
    "ScheduleFree": FREE,
}
each_run = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
two_runs_quickly = pytest.mark.parametrize("run", slow_after(2, RUNS.values()), ids=RUNS)


def training_of(run: Run, seed: int = 0, double: bool = False) -> loop.Training:
    run, data = run.vary(seed=seed), digits()
    made = loop.Training(run, data, data.subset(labels=run.labels, val=run.val, seed=seed), "cpu")
    if double:
        for module in filter(None, (made.objective, made.ema_model)):
            module.double()
        made.ema_pairs = tensor_pairs(made.ema_model, made.objective.model) if made.ema_model else []
        next_batch = made.next_batch
        made.next_batch = lambda: (b := next_batch())._replace(images=b.images.double(), targets=b.targets.double())
    made.objective.train()
    return made


def groups_of(matrices=(), others=(), weight_decay=0.1) -> list[dict]:
    """Groups as `decay_groups` returns them; all of `matrices` are matrices inside blocks."""
    return [
        {"params": [*matrices], "weight_decay": weight_decay, "decays": True, "parts": [1] * len(matrices)},
        {"params": [*others], "weight_decay": 0.0, "decays": False, "parts": [0] * len(others)},
    ]


def set_rate(optimizer, rate: float):
    for group in optimizer.param_groups:
        group["lr"] = rate


def equal_weights(one, other) -> bool:
    first, second = load_file(one / WEIGHTS), load_file(other / WEIGHTS)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# Muon


def polynomial(s, times=5):
    a, b, c = COEFFICIENTS
    for _ in range(times):
        s = a * s + b * s**3 + c * s**5
    return s


@pytest.mark.parametrize("rows, columns", [(4, 4), (3, 7), (7, 3), (1, 5)])
def test_orthogonalization_applies_the_polynomial_to_the_singular_values(rows, columns):
    g = torch.randn(3, rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u, s, v = torch.linalg.svd(g, full_matrices=False)
    scaled = s / s.norm(dim=-1, keepdim=True)
    expected = u * polynomial(scaled)[..., None, :] @ v
    found = orthogonalize(g, 5)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(orthogonalize(100 * g, 5), found, rtol=0, atol=1e-12)
    torch.testing.assert_close(orthogonalize(-g, 5), -found, rtol=0, atol=1e-12)
    sizes = torch.linalg.svdvals(found)[scaled > 0.01]
    assert sizes.min() > 0.68 and sizes.max() < 1.14
    turned = torch.linalg.qr(torch.randn(rows, rows, dtype=torch.float64))[0]
    torch.testing.assert_close(orthogonalize(turned @ g, 5), turned @ found, rtol=0, atol=1e-12)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon is newer than this torch")
@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_takes_the_steps_of_torch_and_adamw_those_of_the_rest(scale, nesterov, monkeypatch):
    """Without the change to bfloat16 that torch makes, by a method or by the name of the type."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    monkeypatch.setattr(torch, "bfloat16", torch.float32)
    torch.manual_seed(0)
    start = [torch.randn(shape) for shape in ((6, 4), (4, 6), (6, 4), (5,))]
    ours, theirs = ([nn.Parameter(t.clone()) for t in start] for _ in range(2))
    muon = Muon(groups_of(ours[:3], ours[3:]), scale=scale, nesterov=nesterov)
    reference = torch.optim.Muon(theirs[:3], weight_decay=0.1, nesterov=nesterov, adjust_lr_fn=scale)
    rest = torch.optim.AdamW(theirs[3:], weight_decay=0.0, fused=True)
    for step in range(4):
        for optimizer in (muon, reference, rest):
            set_rate(optimizer, 0.02 / (step + 1))
        for p, q in zip(ours, theirs):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        for optimizer in (muon, reference, rest):
            optimizer.step()
        for p, q in zip(ours, theirs):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert torch.equal(ours[3], theirs[3])


def test_queries_keys_and_values_are_orthogonal_each_by_itself():
    torch.manual_seed(0)
    gradient = torch.randn(12, 4)
    whole, apart = nn.Parameter(torch.zeros(12, 4)), [nn.Parameter(torch.zeros(4, 4)) for _ in range(3)]
    group = {"params": [whole], "weight_decay": 0.0, "decays": True, "parts": [3]}
    for optimizer, gradients in ((Muon([group]), [gradient]), (Muon(groups_of(apart)), gradient.chunk(3))):
        for p, g in zip([p for group in optimizer.param_groups for p in group["params"]], gradients):
            p.grad = g.clone()
        optimizer.step()
    torch.testing.assert_close(whole.detach(), torch.cat([p.detach() for p in apart]), rtol=1e-5, atol=1e-7)
    fused = nn.Parameter(torch.zeros(12, 4))
    fused.grad = gradient
    Muon([group | {"params": [fused]}], split_qkv=False).step()
    assert not torch.allclose(fused, whole, atol=1e-4)


def test_parameters_that_a_timm_model_names_with_dots_get_no_weight_decay():
    """timm's Swin names its tables `layers.0.blocks.0.attn.relative_position_bias_table`."""

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 2)])

        def no_weight_decay(self):
            return {"layers.0.weight", "absent.weight"}

    model = Named()
    groups, _ = decay_groups(Supervised(model), 0.1)
    decayed = [p for group in groups if group["weight_decay"] for p in group["params"]]
    assert [id(p) for p in decayed] == [id(model.layers[1].weight)]


def test_parameters_behind_a_parametrized_weight_are_trained_as_the_weight():
    model = tiny_vit((8, 8), 1, 3, dim=8, attention=TalkingHeadsAttention)
    expected = [(group["weight_decay"], part) for group in decay_groups(Supervised(model), 0.1)[0] for part in group["parts"]]
    for block in model.blocks:
        nn.utils.parametrizations.orthogonal(block.attention.proj)
        nn.utils.parametrizations.spectral_norm(block.attention, "mix_maps")
    groups, _ = decay_groups(Supervised(model), 0.1)
    assert sorted(expected) == sorted((group["weight_decay"], part) for group in groups for part in group["parts"])


def test_names_without_weight_decay_are_those_of_our_groups_and_of_timms_optimizers():
    model = tiny_vit((8, 8), 1, 3, dim=8, attention=TalkingHeadsAttention, position=Learned)
    ours, _ = decay_groups(Supervised(model), 0.1)
    theirs = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.1).param_groups
    decayed = [{id(p) for group in groups if group["weight_decay"] for p in group["params"]} for groups in (ours, theirs)]
    assert decayed[0] == decayed[1] and "blocks.1.attention.mix_maps" in model.no_weight_decay()


def test_zero_gradient_moves_a_matrix_by_weight_decay_only():
    p = nn.Parameter(torch.ones(3, 3))
    p.grad = torch.zeros(3, 3)
    muon = Muon(groups_of([p], weight_decay=0.5))
    set_rate(muon, 0.1)
    muon.step()
    assert torch.equal(p, torch.full((3, 3), 1 - 0.1 * 0.5))


def test_muon_is_for_linear_layers_inside_blocks_only():
    attention = partial(LocalityAttention, temperature="per head")
    model = ViT((8, 8), 1, 10, depth=2, attention=attention, reduction=LearnedPrune, tokenizer=partial(PatchEmbed, patch=2))
    parts = hidden_matrices(Supervised(model))
    names = {name: parts[id(p)] for name, p in model.named_parameters() if id(p) in parts}
    own = {"attention.qkv.weight": 3, "attention.proj.weight": 1, "mlp.0.weight": 1, "mlp.3.weight": 1}
    assert names == {f"blocks.{layer}.{name}": number for layer in range(2) for name, number in own.items()}
    mae = MAE(model=ViT((8, 8), 1, 10, depth=2, tokenizer=partial(PatchEmbed, patch=2)))
    counts = Counter(name.partition(".")[0] for name, p in mae.named_parameters() if id(p) in hidden_matrices(mae))
    assert counts == {"model": 8, "decoder": 8}
    groups, _ = decay_groups(mae, 0.1)
    assert all(len(group["params"]) == len(group["parts"]) for group in groups)
    assert not any(any(group["parts"]) for group in groups if not group["decays"])


def test_update_of_muon_is_as_large_as_that_of_adamw():
    training = training_of(SHORT.vary(optimizer=Muon, warmup=0.0, weight_decay=0.0, clip=0.0))
    before = {name: p.detach().clone() for name, p in training.objective.named_parameters()}
    training.train_step()
    for name, p in training.objective.named_parameters():
        change = (p.detach() - before[name]).square().mean().sqrt() / training.run.lr
        inside = "blocks" in name and p.ndim > 1
        assert 0.1 < change < 0.25 if inside else change > 0.5 or change == 0, name


# SAM


def gradient_of(optimizer: SAM, parameters, loss) -> list[torch.Tensor]:
    """The gradient that SAM gives its base optimizer."""

    def backward():
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value.detach()

    optimizer.two_passes(backward, Supervised(nn.Linear(1, 1)), [])
    return [p.grad.clone() for p in parameters]


def test_gradient_of_sam_on_a_quadratic_function():
    torch.manual_seed(0)
    a = torch.randn(5, 5, dtype=torch.float64)
    a, w = a @ a.T, nn.Parameter(torch.randn(5, dtype=torch.float64))
    start, lengths = w.detach().clone(), []
    optimizer = SAM(groups_of(others=[w]), rho=0.3)
    found = gradient_of(optimizer, [w], lambda: (lengths.append((w - start).norm().item()), 0.5 * w @ a @ w)[1])
    expected = a @ start + 0.3 * a @ (a @ start) / (a @ start).norm()
    torch.testing.assert_close(found[0], expected)
    assert torch.equal(w, start) and lengths == pytest.approx([0.0, 0.3])
    linear = gradient_of(optimizer, [w], lambda: 3 * w.sum())
    assert torch.equal(linear[0], torch.full_like(w, 3.0))


@pytest.mark.parametrize("adaptive", [True, False])
def test_asam_treats_rescaled_weights_alike(adaptive):
    """A linear net of two layers computes the same if one layer is multiplied by c and the other divided by c."""
    torch.manual_seed(0)
    start, x = [torch.randn(3, 3, dtype=torch.float64) for _ in range(2)], torch.randn(3, dtype=torch.float64)
    losses = []
    for c in (1.0, 5.0):
        layers = nn.Parameter(c * start[0]), nn.Parameter(start[1] / c)
        optimizer = SAM(groups_of(layers), rho=0.2, adaptive=adaptive, eta=0.0)
        (layers[1] @ layers[0] @ x).square().sum().backward()
        with optimizer.moved():
            losses.append((layers[1] @ layers[0] @ x).square().sum().item())
    assert (losses[0] == pytest.approx(losses[1])) is adaptive


def test_weights_without_gradients_are_not_moved():
    p = nn.Parameter(torch.ones(2))
    with SAM(groups_of([p])).moved():
        assert torch.equal(p, torch.ones(2))


def test_asam_adapts_matrices_and_kernels_only():
    torch.manual_seed(0)
    matrix, bias = nn.Parameter(torch.randn(2, 2)), nn.Parameter(torch.randn(2))
    g, h, before = torch.randn(2, 2), torch.randn(2), (matrix.detach().clone(), bias.detach().clone())
    optimizer = SAM(groups_of([matrix], [bias]), rho=0.4, adaptive=True, eta=0.01)
    matrix.grad, bias.grad = g, h
    t = before[0].abs() + 0.01
    length = torch.cat([(t * g).flatten(), h]).norm()
    with optimizer.moved():
        torch.testing.assert_close(matrix.detach(), before[0] + 0.4 * t * t * g / length)
        torch.testing.assert_close(bias.detach(), before[1] + 0.4 * h / length)
    assert torch.equal(matrix, before[0]) and torch.equal(bias, before[1])


def test_sam_without_a_move_equals_its_base_bit_for_bit_and_counts_once(tmp_path):
    one = fit(SHORT, tmp_path / "adamw")
    other = fit(SHORT.vary(optimizer=partial(SAM, rho=0.0)), tmp_path / "sam")
    assert equal_weights(tmp_path / "adamw", tmp_path / "sam") and one.images_seen == other.images_seen == 12 * 8
    assert fit(SHORT.vary(optimizer=SAM), tmp_path / "moved").images_seen == 2 * 12 * 8
    assert not equal_weights(tmp_path / "adamw", tmp_path / "moved")


def test_both_passes_of_sam_see_the_same_batch_and_draws_and_buffers_change_once():
    run = SHORT.vary(pool=Projected, attention=partial(Attention, dropout=0.3), drop_path=0.3)
    trainings = training_of(run), training_of(run.vary(optimizer=SAM))
    seen, initial = [], {name: t.clone() for name, t in trainings[1].objective.state_dict().items()}
    weights = trainings[1].objective.model.head.weight
    trainings[1].objective.model.blocks.register_forward_pre_hook(lambda _, given: seen.append((given[0].detach().clone(), torch.get_rng_state(), weights.detach().clone())))
    for training in trainings:
        loss = training.compute_gradients(training.next_batch())
        training.first_loss, training.state = loss, torch.get_rng_state()
    plain, sam = trainings
    assert len(seen) == 2 and torch.equal(seen[0][1], seen[1][1]) and not torch.equal(seen[0][2], seen[1][2])
    assert torch.equal(plain.first_loss, sam.first_loss) and torch.equal(plain.state, sam.state)
    for (name, one), (_, two) in zip(plain.objective.named_buffers(), sam.objective.named_buffers()):
        assert torch.equal(one, two), name
    assert any(not torch.equal(t, initial[name]) for name, t in sam.objective.named_buffers() if name in initial)
    for name, p in sam.objective.named_parameters():
        assert torch.equal(p, initial[name]), name
    assert not torch.equal(plain.objective.model.head.weight.grad, sam.objective.model.head.weight.grad)


def test_sam_keeps_the_statistics_of_dino_from_the_first_pass():
    run = Run(model=TINY_VIT, objective=DINO, unlabelled=True, augment=augment.digit_crops(), val=50, steps=4, batch=8, clip=0.0)
    plain, sam = training_of(run), training_of(run.vary(optimizer=SAM))
    for training in (plain, sam):
        training.train_step()
    assert torch.equal(plain.objective.loss.center, sam.objective.loss.center)
    assert all(torch.equal(one, two) for one, two in zip(plain.objective.observed, sam.objective.observed))
    assert not torch.equal(plain.objective.head.layers[0].weight, sam.objective.head.layers[0].weight)


@pytest.mark.parametrize("stacked", [False, True], ids=["alone", "stacked"])
def test_teacher_of_semi_supervised_training_moves_once_in_a_step_of_sam(stacked):
    objective = partial(SemiSupervised, weak=augment.digits(0.3), strong=augment.strong_digits(), ratio=1, momentum=0.5)
    members = [training_of(SHORT.vary(objective=objective, optimizer=partial(SAM, rho=0.5)), seed) for seed in range(1 + stacked)]
    training = Stack(members) if stacked else members[0]
    training.train_step()
    tensors = training.weights if stacked else dict(members[0].objective.named_parameters())
    before, student = ({n: t.detach().clone() for n, t in tensors.items() if n.startswith(of)} for of in ("teacher.", "model."))
    training.train_step()
    for name, t in before.items():
        expected = t.lerp(student[name.replace("teacher.", "model.")], 0.5)
        torch.testing.assert_close(tensors[name].detach(), expected, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("options", [{"momentum": 0.5}, {"momentum": 0.5, "align": True}], ids=["teacher", "aligned"])
def test_both_passes_of_sam_learn_the_same_targets_of_a_teacher(options, monkeypatch):
    seen, targets = [], SemiSupervised.targets
    monkeypatch.setattr(SemiSupervised, "targets", lambda *given: seen.append(targets(*given)) or seen[-1])
    objective = partial(SemiSupervised, weak=augment.digits(0.3), strong=augment.strong_digits(), ratio=1, hard=0.0, **options)
    training = training_of(SHORT.vary(objective=objective, optimizer=partial(SAM, rho=0.5)))
    for _ in range(2):
        training.train_step()
    assert len(seen) == 4 and training.objective.count == 2 and training.objective.second_pass is False
    for first, second in (seen[:2], seen[2:]):
        assert torch.equal(first[0], second[0])


def test_sam_does_not_move_the_last_layer_of_dino_while_it_is_frozen():
    objective = partial(DINO, freeze=0.5)
    run = Run(model=TINY_VIT, objective=objective, unlabelled=True, augment=augment.digit_crops(), val=50, steps=2, batch=8)
    training, seen = training_of(run.vary(optimizer=SAM)), []
    head = training.objective.head
    head.register_forward_pre_hook(lambda *_: seen.append([p.detach().clone() for p in (head.last_layer.weight_v, head.layers[0].weight)]))
    for frozen in (True, False):
        training.train_step()
        (last, first), (moved_last, moved_first) = seen[-2:]
        assert torch.equal(last, moved_last) == frozen and not torch.equal(first, moved_first)


def test_sam_does_not_move_weights_with_a_learning_rate_of_0():
    """As those outside the predictors of `LearnToPrune` in the first sixth of a run."""
    training, seen = training_of(SHORT.vary(optimizer=SAM, steps=2)), []
    groups, head = training.optimizer.param_groups, training.objective.model.head
    late = [any(p is head.bias for p in group["params"]) for group in groups]
    training.rates = [lambda progress, rate, late=late: rate * (progress >= 0.5 or not late) for late in late]
    head.register_forward_pre_hook(lambda *_: seen.append([p.detach().clone() for p in (head.bias, head.weight)]))
    for frozen in (True, False):
        training.train_step()
        (bias, weight), (moved_bias, moved_weight) = seen[-2:]
        assert torch.equal(bias, moved_bias) == frozen and not torch.equal(weight, moved_weight)


# ScheduleFree


@pytest.mark.parametrize("warmup, weight_decay", [(1, 0.0), (4, 0.1)])
def test_schedule_free_takes_the_steps_of_the_paper(warmup, weight_decay):
    """The oracle keeps x, y and z. Without warmup, x is the plain mean of all z."""
    torch.manual_seed(0)
    target, p = torch.randn(4, dtype=torch.float64), nn.Parameter(torch.randn(4, dtype=torch.float64))
    optimizer = ScheduleFree(groups_of([p], weight_decay=weight_decay), beta1=0.8, beta2=0.9)
    x = z = p.detach().clone()
    v, total, fast = torch.zeros(4, dtype=torch.float64), 0.0, []
    for t in range(8):
        rate = 0.1 * min(1, (t + 1) / warmup)
        y = 0.2 * z + 0.8 * x
        torch.testing.assert_close(p.detach(), y)
        g = y - target
        v = 0.9 * v + 0.1 * g**2
        z = z - rate * (g / ((v / (1 - 0.9 ** (t + 1))).sqrt() + 1e-8) + weight_decay * y)
        total += rate**2
        x = x + rate**2 / total * (z - x)
        fast.append(z)
        set_rate(optimizer, rate)
        p.grad = p.detach() - target
        optimizer.step()
        torch.testing.assert_close(optimizer.averaged(p), x)
    assert warmup > 1 or torch.allclose(x, torch.stack(fast).mean(0))


def test_schedule_free_equals_the_package():
    package = pytest.importorskip("schedulefree")
    torch.manual_seed(0)
    start = [torch.randn(4, 3), torch.randn(3)]
    ours, theirs = ([nn.Parameter(t.clone()) for t in start] for _ in range(2))
    optimizer = ScheduleFree(groups_of(ours[:1], ours[1:]))
    decays = [{"params": theirs[:1], "weight_decay": 0.1}, {"params": theirs[1:], "weight_decay": 0.0}]
    reference = package.AdamWScheduleFree(decays, lr=0.02, warmup_steps=3)
    reference.train()
    for t in range(7):
        for p, q in zip(ours, theirs):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        set_rate(optimizer, 0.02 * min(1, (t + 1) / 3))
        optimizer.step()
        reference.step()
        for p, q in zip(ours, theirs):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    reference.eval()
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(optimizer.averaged(p), q.detach(), rtol=1e-5, atol=1e-6)


def test_average_is_evaluated_and_saved(tmp_path):
    training = training_of(FREE)
    for _ in range(3):
        training.train_step()
    training.validate()
    for average, p in zip(training.model.parameters(), training.objective.model.parameters()):
        assert torch.equal(average, training.optimizer.averaged(p))
    assert not torch.equal(training.model.head.weight, training.objective.model.head.weight)
    record = fit(FREE.vary(early_stop=2, steps=60, lr=8e-3), tmp_path / "stopped")
    assert record.val["accuracy"] == max(score for _, _, score in record.curve)


# What a run does with its optimizer


@pytest.mark.parametrize("rates", slow_but(((0.3, 1),), [(1, 1), (0.3, 1)]), ids=["one rate", "two rates"])
@two_runs_quickly
def test_stack_takes_the_same_steps_as_its_members_alone(run, rates, monkeypatch):
    double = lambda logits, targets, weights=None: -(targets * logits.log_softmax(-1)).sum(-1).mean()  # noqa: E731
    monkeypatch.setattr("smallvit.objectives.supervised.cross_entropy", double)
    runs = [run.vary(lr=rate * run.lr) for rate in rates]
    alone, together = ([training_of(one, seed, double=True) for one, seed in zip(runs, (3, 1))] for _ in range(2))
    stack = Stack(together)
    stack.source = None  # each draws its own batch, in double precision
    for _ in range(3):
        stack.train_step()
        for one in alone:
            one.train_step()
    for one, other in zip(alone, together):
        for member in (one, other):
            member.copy_average()
        found, expected = other.model.state_dict(), one.model.state_dict()
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-7, atol=1e-7, msg=name)


def killed(run: Run, folder, monkeypatch, steps: int = 5, fit=fit, **options):
    """Train a run until it is killed after some steps, and then to its end."""
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
    calls, save = [], loop.checkpoint.save

    def kill(*given):
        save(*given)
        calls.append(1)
        if len(calls) == steps:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop.checkpoint, "save", kill)
        fit(run, folder, **options)
    return fit(run, folder, **options)


@pytest.mark.parametrize("run", slow_after(1, RUNS.values()), ids=RUNS)
def test_killed_run_ends_with_the_same_bits(run, tmp_path, monkeypatch):
    fit(run, tmp_path / "whole")
    killed(run, tmp_path / "killed", monkeypatch)
    assert equal_weights(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.slow
@each_run
def test_killed_stack_ends_with_the_same_bits(run, tmp_path, monkeypatch):
    runs = [run.at_seed(0), run.at_seed(1).vary(lr=run.lr / 2)]
    folders = [[tmp_path / name / str(n) for n in range(2)] for name in ("whole", "killed")]
    records = fit_stacked(runs, folders[0])
    assert [record.stacked for record in records] == [2, 2]
    killed(runs, folders[1], monkeypatch, fit=fit_stacked)
    assert all(equal_weights(one, other) for one, other in zip(*folders))


@two_runs_quickly
def test_native_kernel_trains_alike_and_leaves_the_steps_to_the_optimizer(run):
    run = run.vary(dim=32, heads=2, clip=0.0)
    plain, native = training_of(run), training_of(run)
    native.use(Numerics(kernel="native"))
    for training in (plain, native):
        for _ in range(3):
            training.train_step()
    assert native.flat is None
    losses = [training.trace.losses for training in (plain, native)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


@pytest.mark.parametrize("name", ["Muon", "SAM", "ScheduleFree"])
def test_frozen_parameters_stay_and_bf16_trains(name):
    training = training_of(RUNS[name].vary(precision="bf16"))
    before = training.objective.model.blocks[0].mlp[0].weight.detach().clone()
    frozen = training.objective.model.blocks[0].attention.qkv.weight.requires_grad_(False)
    kept = frozen.clone()
    for _ in range(3):
        training.train_step()
    assert torch.equal(frozen, kept) and not torch.equal(training.objective.model.blocks[0].mlp[0].weight, before)
    assert all(p.isfinite().all() for p in training.objective.parameters())


# In a training loop of your own

LOOSE = {
    "AdamW": AdamW, "Muon": partial(Muon, momentum=0.8), "ScheduleFree": partial(ScheduleFree, beta1=0.8),
    "SAM": partial(SAM, rho=0.1), "SAM on Muon": partial(SAM, base=partial(Muon, momentum=0.8)),
}  # fmt: skip
each_optimizer = pytest.mark.parametrize("make", LOOSE.values(), ids=LOOSE)


def optimized(make, dtype=torch.float32):
    """A matrix inside a block and a bias, which have gradients, and an optimizer for them."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((4, 4), (4,))]
    optimizer = make(groups_of(parameters[:1], parameters[1:]))
    set_rate(optimizer, 0.01)
    if isinstance(optimizer, SAM):
        optimizer.two_passes(lambda: torch.zeros(()), SimpleNamespace(observed=None), [])
    for p in parameters:
        p.grad = torch.ones_like(p)
    return parameters, optimizer


@each_optimizer
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["deepcopy", "pickle"])
def test_copy_takes_the_same_steps(make, copied):
    parameters, optimizer = optimized(make)
    optimizer.step()
    others, copy_of = copied((parameters, optimizer))
    for p, other in zip(parameters, others):
        other.grad = p.grad.clone()
    for each in (optimizer, copy_of):
        if isinstance(each, SAM):
            each.two_passes(lambda: torch.zeros(()), SimpleNamespace(observed=None), [])
        each.step()
    assert all(torch.equal(p, other) for p, other in zip(parameters, others)) and parameters[0] is not others[0]


def test_optimizer_that_would_silently_be_adamw_is_refused():
    p = nn.Parameter(torch.ones(3, 3))
    p.grad = torch.ones(3, 3)
    with pytest.raises(ValueError, match=r"SAM.step was called without two_passes\(backward, objective, changed\)"):
        SAM(groups_of([p])).step()
    SAM(groups_of([p]), rho=0).step()
    with pytest.raises(ValueError, match="Muon got no linear layer inside blocks, so it would be AdamW"):
        Muon(decay_groups(Supervised(nn.TransformerEncoderLayer(8, 2)), 0.1)[0]).step()
    assert p.min() < 1


def test_sam_asks_for_two_passes_before_each_step():
    _, optimizer = optimized(SAM)
    optimizer.step()
    with pytest.raises(ValueError, match=r"SAM.step was called without two_passes"):
        optimizer.step()


def test_step_hooks_of_muon_are_called_once():
    """Also if torch has added the calls of hooks to the methods of AdamW."""
    for adamw in (AdamW, torch.optim.AdamW):
        adamw([{"params": [nn.Parameter(torch.zeros(1))], "lr": 0.1}])
        parameters, optimizer = optimized(Muon)
        before, calls = [p.detach().clone() for p in parameters], []
        optimizer.register_step_pre_hook(lambda *_: calls.append([p.grad is not None for p in parameters]))  # noqa: B023
        optimizer.register_step_post_hook(lambda *_: calls.append([not torch.equal(p, old) for p, old in zip(parameters, before)]))  # noqa: B023
        optimizer.step()
        assert calls == [[True, True], [True, True]]


def test_layer_called_qkv_that_is_not_three_equal_parts_is_one_matrix():
    """For example, an attention with fewer heads for keys and values."""
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.ModuleDict({"qkv": nn.Linear(16, rows)}) for rows in (48, 20)])
    assert [hidden_matrices(model)[id(block["qkv"].weight)] for block in model.blocks] == [3, 1]
    optimizer = Muon(decay_groups(Supervised(model), 0.1)[0])
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


def test_average_of_a_model_without_weights_or_of_another_type():
    ema_update(tensor_pairs(nn.Flatten(), nn.Flatten()), 0.5)
    average, model = nn.Linear(2, 2), nn.Linear(2, 2).bfloat16()
    expected = torch.lerp(average.weight.detach(), model.weight.detach().float(), 0.25)
    ema_update(tensor_pairs(average, model), 0.25)
    assert torch.equal(average.weight, expected)


def test_optimizer_with_a_scheduler_can_be_pickled():
    _, optimizer = optimized(Muon)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # replaces the method `step` of this object
    pickle.loads(pickle.dumps(optimizer)).step()


@each_optimizer
def test_parameters_can_be_added(make):
    _, optimizer = optimized(make)
    added = nn.Parameter(torch.zeros(3, 3))
    optimizer.add_param_group({"params": added, "lr": 0.01})
    added.grad = torch.ones(3, 3)
    optimizer.step()
    torch.testing.assert_close(added.detach(), torch.full((3, 3), -0.01))  # a step of AdamW
    if isinstance(optimizer, SAM):
        with optimizer.moved():
            assert (added > -0.01).all()


@pytest.mark.parametrize("make", [AdamW, Muon, ScheduleFree])
def test_closure_computes_the_gradients(make):
    (alone, other), optimizer = optimized(make)
    (expected, bias), reference = optimized(make)

    def closure():
        optimizer.zero_grad()
        loss = (alone**2).sum() + other.sum()
        loss.backward()
        return loss

    expected.grad, bias.grad = 2 * expected.detach(), torch.ones(4)
    reference.step()
    loss = ((alone**2).sum() + other.sum()).item()
    assert optimizer.step(closure).item() == loss
    assert torch.equal(alone, expected) and torch.equal(other, bias)


@each_optimizer
@pytest.mark.parametrize("unscaled", [False, True])
def test_gradient_scaler_skips_a_step_that_overflows(make, unscaled):
    parameters, optimizer = optimized(make)
    scaler, steps = torch.amp.GradScaler("cpu", init_scale=4.0), []
    for overflow in (True, False):
        before = [p.detach().clone() for p in parameters]
        optimizer.zero_grad()
        scaler.scale(sum(p.sum() for p in parameters)).backward()
        if overflow:
            parameters[0].grad[0, 0] = float("inf")
        if unscaled:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        steps.append([p.detach() - old for p, old in zip(parameters, before)])
    assert not any(step.any() for step in steps[0])
    expected, reference = optimized(make)
    start = [p.detach().clone() for p in expected]
    reference.step()
    for step, p, old in zip(steps[1], expected, start):
        torch.testing.assert_close(step, p.detach() - old)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_schedule_free_counts_in_float32(dtype):
    (p, _), optimizer = optimized(ScheduleFree, dtype)
    set_rate(optimizer, 1e-4)
    for _ in range(300):
        optimizer.step()
    copied = optimized(ScheduleFree, dtype)
    copied[1].load_state_dict(optimizer.state_dict())
    for one, each in ((p, optimizer), (copied[0][0], copied[1])):
        state = each.state[one]
        assert state["step"] == 300 and state["lr_max"].dtype == torch.float32
        assert state["weight_sum"].item() == pytest.approx(300 * 1e-8, rel=1e-4)
    assert p.isfinite().all() and optimizer.averaged(p).isfinite().all()


@pytest.mark.parametrize("make", [AdamW, Muon, ScheduleFree, partial(SAM, base=Muon)])
def test_state_of_another_optimizer_is_refused(make):
    saved = {}
    for kind in (AdamW, Muon, ScheduleFree, SAM):
        w, b = torch.ones(2, 2, requires_grad=True), torch.ones(2, requires_grad=True)
        optimizer = kind(groups_of([w], [b]))
        (w.sum() + b.sum()).backward()
        getattr(optimizer, "base", optimizer).step()
        saved[kind] = optimizer.state_dict()
    own = make.keywords["base"] if isinstance(make, partial) else make
    optimizer = make(groups_of([torch.ones(2, 2)], [torch.ones(2)]))
    optimizer.load_state_dict(saved[own])
    for kind in saved.keys() - ({own} | ({SAM} if own is AdamW else set())):
        with pytest.raises(ValueError, match=f"{own.__name__} got the state of another optimizer, without .*; expected what"):
            optimizer.load_state_dict(saved[kind])


def test_schedule_free_leaves_half_precision_weights_without_a_gradient_as_they_are():
    """eps is 0 in float16, and so is the square of a small gradient."""
    p = nn.Parameter(torch.ones(4).half())
    optimizer = ScheduleFree(groups_of(others=[p]))
    set_rate(optimizer, 0.01)
    for _ in range(3):
        p.grad = torch.tensor([1e-4, 0, 0, -1.0]).half()
        optimizer.step()
    exact = nn.Parameter(torch.ones(4))
    reference = ScheduleFree(groups_of(others=[exact]))
    set_rate(reference, 0.01)
    for _ in range(3):
        exact.grad = torch.tensor([1e-4, 0, 0, -1.0])
        reference.step()
    assert p[1] == p[2] == 1 and torch.allclose(p.float(), exact, atol=2e-3)


def test_schedule_free_trains_in_bfloat16():
    """On a quadratic function, about as in float32."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        p = nn.Parameter(torch.ones(4, dtype=dtype))
        optimizer = ScheduleFree(groups_of(others=[p]))
        set_rate(optimizer, 0.1)
        for _ in range(200):
            p.grad = p.detach().clone()
            optimizer.step()
        found.append(optimizer.averaged(p).abs().max().item())
    assert found[0] < 0.05 and found[1] < 0.05


def test_record_names_the_optimizer_and_older_runs_keep_their_fingerprints(tmp_path):
    run = SHORT.vary(optimizer=partial(SAM, rho=0.1, base=partial(Muon, nesterov=False)))
    plain = describe(run)
    assert plain["optimizer"]["call"] == "smallvit.optimizers.SAM" and plain["optimizer"]["base"]["nesterov"] is False
    assert rebuild(plain) == run != SHORT
    old = describe(SHORT)
    assert old.pop("optimizer") == {"call": "smallvit.optimizers.AdamW"}
    assert fingerprint(rebuild(old)) == fingerprint(SHORT) == fingerprint(SHORT.vary(optimizer=AdamW))


def test_options_of_the_optimizer_are_varied_and_tuned_as_those_of_the_model():
    run = SHORT.vary(optimizer=SAM).vary(rho=0.2, depth=1)
    assert run.optimizer([{"params": []}]).rho == 0.2 and run.model.keywords["depth"] == 1
    with pytest.raises(ValueError, match="no option 'rho'"):
        SHORT.vary(rho=0.2)
    tune = Tune({"lr": (3e-4, 6e-3), "rho": [0.05, 0.1]})
    plain = SHORT.vary(labels=None)
    entries = ablate({"AdamW": plain, "SAM": plain.vary(optimizer=SAM)}, labels=[50], seeds=range(1), tune=tune, references=False)
    assert {arm: [*ranges] for arm, ranges in arm_ranges(entries).items()} == {"AdamW": ["lr"], "SAM": ["lr", "rho"]}


def test_references_are_trained_with_adamw():
    plain = SHORT.vary(labels=None)
    runs = ablate({"Muon": plain.vary(optimizer=Muon), "AdamW": plain}, labels=[50], seeds=range(1))
    assert {entry.run.optimizer for entry in runs if entry.role == "reference"} == {AdamW}


class Halved(AdamW):
    """A class of a user's own."""

    def step(self, closure=None):
        set_rate(self, self.param_groups[0]["lr"] / 2)
        super().step()


def test_optimizer_of_your_own_is_a_subclass():
    assert issubclass(Halved, Optimizer)
    trainings = training_of(SHORT), training_of(SHORT.vary(lr=SHORT.lr / 2))
    trainings[0].optimizer = Halved(trainings[0].optimizer.param_groups)  # in a recipe, it would be a setting of the run
    for training in trainings:
        training.train_step()
    one, other = (training.objective.state_dict() for training in trainings)
    assert all(torch.allclose(one[name], other[name], atol=1e-7) for name in one)


OWN = '''"""Is plain gradient descent worse?"""
from functools import partial
import torch
from smallvit import Optimizer, PatchEmbed, Run, ViT, ablate, digits

class SGD(Optimizer, torch.optim.SGD):
    """Gradient descent with momentum."""
    passes, averages = 1, False

    def __init__(self, groups, *, momentum: float = 0.9):
        super().__init__(groups, momentum=momentum)

    def initial_state(self, group, index):
        return {"momentum_buffer": torch.zeros_like(group["params"][index])}

vit = partial(ViT, tokenizer=partial(PatchEmbed, patch=4), dim=8, depth=1, heads=2)
adam = Run(data=digits, model=vit, steps=3, batch=8)
RUNS = ablate({"AdamW": adam, "SGD": adam.vary(optimizer=SGD, lr=0.05)}, labels=[50], seeds=range(2), references=False)
'''


def test_optimizer_of_your_own_may_inherit_from_the_base_class_alone(tmp_path):
    (tmp_path / "descent.py").write_text(OWN)
    runs = [entry.run for entry in load_recipe(tmp_path / "descent.py").RUNS if entry.arm == "SGD"]
    alone = [fit(run, tmp_path / f"{run.seed}") for run in runs]
    together = fit_stacked(runs, [tmp_path / f"stacked {run.seed}" for run in runs])
    assert [record.curve[-1][1] for record in together] == pytest.approx([record.curve[-1][1] for record in alone], abs=1e-4)


STRANGE = '''"""Optimizers and a pool that do what those of smallvit do not."""
from functools import partial
import torch
from torch import nn
from smallvit import SAM, AdamW, Muon, PatchEmbed, Run, ScheduleFree, Supervised, ViT, ablate, digits

class Lookback(AdamW):
    """The mean of a gradient and the one before it."""

    @torch.no_grad()
    def step(self, closure=None):
        new = {p: p.grad.clone() for group in self.param_groups for p in group["params"] if p.grad is not None}
        for p, gradient in new.items():
            p.grad.add_(self.state[p].get("last", gradient)).div_(2)
        super().step()
        for p, gradient in new.items():
            self.state[p]["last"] = gradient

class Late(AdamW):
    def step(self, closure=None):
        super().step()
        for state in self.state.values():
            if state["step"] >= 3:
                state["last"] = torch.zeros(1)

class Complete(Lookback):
    def initial_state(self, group, index):
        return super().initial_state(group, index) | {"last": torch.zeros_like(group["params"][index])}

class Centred(AdamW):
    """The gradient of each output of a layer has mean 0."""

    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None and p.grad.ndim > 1):
            p.grad.sub_(p.grad.mean(dim=tuple(range(1, p.grad.ndim)), keepdim=True))
        super().step()

class Turned(AdamW):
    """It uses the gradient of each matrix through its transpose."""

    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None and p.grad.ndim in (2, 3)):
            p.grad.copy_(p.grad.t().contiguous().t())
        super().step()

class Every(AdamW):
    """It counts its steps, and takes every second one at ten times the rate."""

    def __init__(self, groups):
        super().__init__(groups)
        self.count = 0

    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            group["lr"] *= 1 + 9 * (self.count % 2)
        super().step()

class Grouped(AdamW):
    """It counts its steps in its groups, and takes every third one at ten times the rate."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] *= 1 + 9 * (group["count"] % 3 == 0)
        super().step()

class Extragradient(AdamW):
    """The gradient of each step is that of the place to which a step of plain gradient descent leads."""
    passes = 2

    @torch.no_grad()
    def two_passes(self, backward, objective, changed, members=()):
        with torch.enable_grad():
            loss = backward()
        weights = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        before = [p.clone() for p in weights]
        for p in weights:
            p.sub_(0.1 * p.grad)
        with torch.enable_grad():
            backward()
        for p, earlier in zip(weights, before):
            p.copy_(earlier)
        return loss

class Counting(nn.Module):
    """The mean of the tokens, three times as large in every third step."""
    class_tokens = calls = 0

    def __init__(self, dim):
        super().__init__()
        self.largest = float("-inf")

    def forward(self, x, size=None, prefix=0):
        if self.training:
            self.calls += 1
            self.largest = max(self.largest, self.calls)
        return x[:, prefix:].mean(1) * (3 if self.training and self.calls % 3 == 0 else 1)

class RunningPool(nn.Module):
    """The mean of the tokens, less its moving average."""
    class_tokens = 0

    def __init__(self, dim):
        super().__init__()
        self.register_buffer("mean", torch.zeros(dim))

    def forward(self, x, size=None, prefix=0):
        x = x[:, prefix:].mean(1)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean

class LateDropout(Supervised):
    """Dropout of pixels in the second half of the training."""

    def forward(self, batch, progress):
        images = batch.images if progress < 0.5 else nn.functional.dropout(batch.images)
        return super().forward(batch._replace(images=images), progress)

class LateCount(Supervised):
    """Every second loss in the second half of the training is ten times as large."""
    calls = 0

    def forward(self, batch, progress):
        if progress >= 0.5:
            self.calls += 1
        return {"loss": super().forward(batch, progress)["loss"] * (1 + 9 * (self.calls % 2))}

class Begun(Supervised):
    """The first loss is a hundred times as large."""

    def __init__(self, model):
        super().__init__(model)
        self.begun = False

    def forward(self, batch, progress):
        factor, self.begun = 1 if self.begun else 100, True
        return {"loss": super().forward(batch, progress)["loss"] * factor}

class Relative(Supervised):
    """The loss relative to a moving average, which is a tensor, but no buffer."""

    def __init__(self, model, inplace: bool = False):
        super().__init__(model)
        self.inplace, self.calls, self.mean, self.last = inplace, torch.zeros(()), torch.ones(()), None

    def forward(self, batch, progress):
        loss = super().forward(batch, progress)["loss"]
        if self.inplace:
            self.calls.add_(1)
            return {"loss": loss / self.calls}
        self.mean = self.last = 0.9 * self.mean + 0.1 * loss.detach()
        return {"loss": loss / self.mean}

class Decoupled(AdamW):
    """Weight decay that does not depend on the learning rate."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.mul_(0.99)
        super().step()

class OwnMuon(Muon):
    """It does what Muon does."""

class OwnSAM(SAM):
    """It does what SAM does."""

class OwnFree(ScheduleFree):
    """It does what ScheduleFree does."""

vit = partial(ViT, tokenizer=partial(PatchEmbed, patch=4), dim=8, depth=1, heads=2)
plain = Run(data=digits, model=vit, steps=8, batch=8, labels=50, val=20)
arms = {each.__name__: plain.vary(optimizer=each) for each in (Lookback, Late, Complete, Centred, Turned, Every, Grouped)}
arms |= {"SAM": plain.vary(optimizer=partial(SAM, base=Centred)), "pool": plain.vary(pool=RunningPool)}
arms |= {"counting": plain.vary(pool=Counting), "SAM, every": plain.vary(optimizer=partial(SAM, base=Every))}
arms |= {each.__name__: plain.vary(objective=each) for each in (LateDropout, LateCount, Begun, Relative)}
arms |= {"in place": plain.vary(objective=partial(Relative, inplace=True))}
arms |= {each.__name__: plain.vary(optimizer=each) for each in (Decoupled, OwnMuon, OwnSAM)}
arms |= {"Extragradient": plain.vary(optimizer=Extragradient, clip=0.1)}
arms |= {"OwnFree": plain.vary(optimizer=OwnFree, schedule="constant", ema=0.0)}
RUNS = ablate(arms, labels=[50], seeds=range(2), references=False)
'''


@pytest.fixture(scope="module")
def strange(tmp_path_factory) -> dict[str, list[Run]]:
    """The runs of each arm of a recipe with unusual parts."""
    file = tmp_path_factory.mktemp("recipe") / "strange.py"
    file.write_text(STRANGE)
    runs = load_recipe(file).RUNS
    return {arm: [entry.run for entry in runs if entry.arm == arm] for arm in dict.fromkeys(entry.arm for entry in runs)}


@pytest.mark.parametrize("arm", slow_after(1, ["Lookback", "Late"]))
def test_state_that_a_resumed_run_would_lack_is_refused_when_it_appears(arm, strange, tmp_path):
    message = rf"{arm} keeps \['exp_avg', 'exp_avg_sq', 'last', 'step'\] .* initial_state returns \['exp_avg', 'exp_avg_sq', 'step'\]"
    with pytest.raises(ValueError, match=message):
        fit(strange[arm][0], tmp_path / "alone")
    with pytest.raises(ValueError, match=message):
        fit_stacked(strange[arm], [tmp_path / "0", tmp_path / "1"])


def test_replaced_buffer_is_refused_by_sam_and_not_by_its_base(strange, tmp_path):
    (run, *_) = strange["pool"]
    fit(run, tmp_path / "base")
    fit(run.vary(optimizer=partial(SAM, rho=0)), tmp_path / "off")
    with pytest.raises(ValueError, match=r"replaces a buffer .* second pass of SAM .*; expected a change in place"):
        fit(run.vary(optimizer=SAM), tmp_path / "SAM")


def test_plain_numbers_change_once_in_a_step_of_sam(strange):
    calls = []
    for optimizer in (AdamW, SAM, strange["Extragradient"][0].optimizer):
        training = training_of(strange["counting"][0].vary(optimizer=optimizer))
        training.objective.train()
        for _ in range(3):
            training.train_step()
        calls.append(training.objective.model.pool.calls)
    assert calls == [3, 3, 3]


@pytest.mark.parametrize("arm", slow_after(5, ["Complete", "SAM, every", "counting", "Grouped", "Begun", "Every", "SGD"]))
def test_killed_run_with_an_optimizer_of_your_own_ends_with_the_same_bits(arm, strange, tmp_path, monkeypatch):
    (tmp_path / "descent.py").write_text(OWN)
    if arm == "SGD":
        run = next(entry.run for entry in load_recipe(tmp_path / "descent.py").RUNS if entry.arm == arm).vary(steps=8)
    else:
        run = strange[arm][0]
    fit(run, tmp_path / "whole")
    watched = []
    killed(run, tmp_path / "killed", monkeypatch, watch=lambda step, _: watched.append(step))
    assert watched.count(1) == 1, "it began again"
    one, other = (load_file(tmp_path / name / WEIGHTS) for name in ("whole", "killed"))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("arm", "reason"),
    slow_after(9, [
        ("LateDropout", "the model draws random numbers inside a step"),
        ("LateCount", "a step changes the attribute LateCount.calls"),
        ("Relative", "a step changes the attribute Relative.last"),
        ("in place", "a step changes the attribute Relative.calls"),
        ("Centred", "Centred changes weights in a stack otherwise"),
        ("pool", "replaces its buffer model.pool.mean"),
        ("counting", "a step changes the attribute Counting.largest; expected a buffer"),
        ("SAM, every", "a step changes the attribute Every.count of the optimizer"),
        ("Grouped", "a step changes the attribute Grouped.param_groups.0.count of the optimizer"),
        ("SAM", "Centred changes weights in a stack otherwise"),
        ("Turned", "Turned changes weights in a stack otherwise"),
        ("Every", "a step changes the attribute Every.count of the optimizer"),
        ("Begun", "a step changes the attribute Begun.begun"),
    ]),
)
def test_parts_that_a_stack_would_compute_otherwise_are_trained_alone(arm, reason, strange, tmp_path):
    runs = [run.vary(steps=4) for run in strange[arm]]
    with pytest.raises(NotStackable, match=reason):
        Stack([training_of(run) for run in runs])
    alone = [fit(run, tmp_path / f"{run.seed}") for run in runs]
    together = fit_stacked(runs, [tmp_path / f"stacked {run.seed}" for run in runs])
    assert [record.stacked for record in together] == [None, None] and [r.test for r in together] == [r.test for r in alone]


def test_optimizer_whose_step_is_no_multiple_of_the_learning_rate_is_stacked_for_equal_rates_only(strange):
    with pytest.raises(NotStackable, match="Decoupled changes weights in a stack otherwise"):
        Stack([training_of(run.vary(lr=rate)) for run, rate in zip(strange["Decoupled"], (1e-3, 1e-2))])
    Stack([training_of(run) for run in strange["Decoupled"]])
    for arm in ("Complete", "OwnMuon", "OwnFree"):
        Stack([training_of(run.vary(lr=rate)) for run, rate in zip(strange[arm], (1e-3, 1e-2))])


def test_several_processes_refuse_every_kind_of_sam(strange):
    with pytest.raises(ValueError, match="SAM moves the weights along the gradient of a whole batch"):
        check_divisible(strange["OwnSAM"][0], 2)
    check_divisible(strange["OwnMuon"][0], 2)


def test_optimizer_of_your_own_may_have_two_passes(strange, tmp_path):
    runs = strange["Extragradient"]
    alone = [fit(run, tmp_path / f"{run.seed}") for run in runs]
    together = fit_stacked(runs, [tmp_path / f"stacked {run.seed}" for run in runs])
    assert [record.stacked for record in together] == [2, 2] and {record.images_seen for record in alone} == {8 * 8 * 2}
    assert [record.curve[-1][1] for record in together] == pytest.approx([record.curve[-1][1] for record in alone], abs=1e-4)
    fit(runs[0].vary(optimizer=AdamW), tmp_path / "one pass")
    one, two = (load_file(tmp_path / name / WEIGHTS)["head.weight"] for name in ("one pass", f"{runs[0].seed}"))
    assert (one - two).abs().max() > 1e-4
    with pytest.raises(ValueError, match="Extragradient moves the weights along the gradient of a whole batch"):
        check_divisible(runs[0], 2)


def test_average_follows_a_buffer_that_the_model_replaces(strange, tmp_path):
    run = strange["pool"][0]
    fit(run.vary(ema=0.0), tmp_path / "plain")
    fit(run.vary(ema=0.5), tmp_path / "average")
    newest, average = (load_file(tmp_path / name / WEIGHTS)["pool.mean"] for name in ("plain", "average"))
    assert newest.norm() > 0 and 0.1 < (average @ newest) / (newest @ newest) < 1


REFUSED = [
    (lambda: SHORT.vary(optimizer=partial(Muon, scale="spectral")), "scale of Muon is 'spectral'; expected one of 'match_rms_adamw'"),
    (lambda: SHORT.vary(optimizer=partial(Muon, momentum=1.0)), "momentum of Muon is 1.0; expected at least 0"),
    (lambda: SHORT.vary(optimizer=partial(Muon, iterations=0)), "iterations of Muon is 0; expected a whole number"),
    (lambda: SHORT.vary(optimizer=partial(Muon, moment=1.0)), "Muon has no option 'moment'; did you mean 'momentum'"),
    (lambda: SHORT.vary(optimizer=partial(SAM, rho=-0.1)), "rho of SAM is -0.1; expected a number, at least 0"),
    (lambda: SHORT.vary(optimizer=partial(SAM, base=SAM)), "base of SAM makes SAM; expected AdamW, Muon or ScheduleFree"),
    (lambda: SAM(groups_of(), base="adamw"), "base of SAM is 'adamw'; expected an optimizer class, such as AdamW or Muon"),
    (lambda: SHORT.vary(optimizer=ScheduleFree), "schedule='cosine' and ema=0.05; set schedule='constant' and ema=0.0"),
    (lambda: SHORT.vary(optimizer=partial(SAM, base=ScheduleFree)), "ScheduleFree replaces the schedule"),
    (lambda: FREE.vary(optimizer=partial(ScheduleFree, beta1=1.0)), "beta1 of ScheduleFree is 1.0"),
    (lambda: FREE.vary(optimizer=partial(ScheduleFree, eps=0.0)), "beta2 and eps of ScheduleFree"),
    (lambda: SHORT.vary(optimizer=Supervised), "optimizer is Supervised; expected AdamW, Muon, SAM, ScheduleFree"),
    (lambda: training_of(SHORT.vary(optimizer=Muon, model=SmallCNN)), "Muon is for linear layers inside blocks and SmallCNN has none"),
    (lambda: training_of(FREE.vary(optimizer=partial(SAM, base=ScheduleFree), pool=Projected)), "batch normalization, .* of ScheduleFree"),
    (lambda: training_of(FREE.vary(pool=Projected)), "has batch normalization, .* use AdamW, or a model without it"),
    (lambda: training_of(FREE.vary(objective=DINO, unlabelled=True, augment=augment.digit_crops())), "DINO evaluates another model"),
    (
        lambda: ScheduleFree([{"params": []}]).check_objective(LearnThresholds(TINY_VIT((8, 8), 1, 10, reduction=LearnedThresholds))),
        "LearnThresholds limits weights after each step",
    ),
    (lambda: Muon([{"params": [nn.Parameter(torch.ones(2, 2))], "parts": [1, 1]}]), "1 parameters with 2 numbers in 'parts'; expected one"),
    (lambda: Muon(nn.Linear(2, 2).parameters()), "Muon got parameters that are not in groups with 'parts'; expected smallvit.optim"),
    (lambda: SAM([*nn.Linear(2, 2).parameters()]), "SAM got parameters that are not in groups with 'decays'"),
    (lambda: optimized(SAM)[1].step(lambda: 0.0), r"SAM.step got a closure; expected none: call two_passes"),
    (lambda: check_divisible(SHORT.vary(optimizer=SAM), 2), "SAM .* use one process"),
]


@pytest.mark.parametrize("make, message", REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_bad_input_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
