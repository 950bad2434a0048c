"""The native kernel: blocks computed by C++ equal those of PyTorch, and what it cannot compute is left to PyTorch."""

import copy
import gc
import math
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.utils.checkpoint import checkpoint
from toys import slow_after

from smallvit import (
    DINO,
    MAE,
    Attention,
    Block,
    LearnedPrune,
    LocalityAttention,
    MeanTokens,
    Merge,
    PatchEmbed,
    Pixels,
    Prune,
    Run,
    ViT,
    augment,
    flops,
    from_timm,
    linear_probe,
    load,
    load_all,
    native,
    native_kernel,
)
from smallvit.attention_positions import places_of
from smallvit.numerics import Numerics, NumericsContext, check_numerics, uses_native_kernel
from smallvit.objectives import SemiSupervised
from smallvit.recipe import load_recipe
from smallvit.record import WEIGHTS
from smallvit.reduction import LayerContext
from smallvit.storage import cache_folder
from smallvit.train import evaluation, fit, fit_stacked, loop
from smallvit.train.flat_adamw import FlatAdamW, lay_in_a_row
from smallvit.vit import Blocks, LayerScale

NATIVE = Numerics(kernel="native")
VIT = partial(ViT, tokenizer=partial(PatchEmbed, patch=2), dim=32, depth=2, heads=2)
RUN = Run(model=VIT, labels=50, val=20, steps=12, batch=8, augment=augment.digits())
MISSING = native.reason_against() or ""
pytestmark = pytest.mark.skipif(MISSING.startswith("no C++ compiler"), reason=MISSING)  # one that fails is no reason to skip


def forget_compiler():
    """Let the next call look for a compiler again."""
    native.compiler.library.cache_clear()
    native.compiler.reason_against.cache_clear()


def make_blocks(depth=2, dim=32, heads=2, attention=Attention, drop_path=0.0, **options) -> Blocks:
    """Blocks with random weights, also where the usual start is 0 or 1, so that no gradient is 0 by accident."""
    blocks = Blocks(Block(dim, heads, attention, None, drop_path, **options) for _ in range(depth))
    for parameter in blocks.parameters():
        nn.init.normal_(parameter, std=0.3 if parameter.ndim == 1 else dim**-0.5)
    for block in blocks:
        block.norm1.weight.data += 1
        block.norm2.weight.data += 1
    return blocks


def test_own_code_predicts_and_trains_with_the_kernel_and_models_are_as_before(monkeypatch):
    calls, usual = [], native.blocks.NativeBlocks.__call__
    monkeypatch.setattr(native.blocks.NativeBlocks, "__call__", lambda self, *inputs: (calls.append(1), usual(self, *inputs))[1])
    close = partial(torch.testing.assert_close, rtol=0, atol=2e-6)
    model, other = (VIT((8, 8), 1, 10) for _ in range(2))
    other.load_state_dict(model.state_dict())
    x, targets = torch.randn(5, 1, 8, 8), torch.arange(5)
    before = model(x).detach()
    with native_kernel(model, other):
        close(model(x), before)
        close(other(x), before)
        assert len(calls) == 2
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other)]
        torch.nn.functional.cross_entropy(model(x), targets).backward()
        optimizers[0].step()
    assert torch.equal(other(x), before) and len(calls) == 3
    torch.nn.functional.cross_entropy(other(x), targets).backward()
    optimizers[1].step()
    close(model(x), other(x))


def test_kernel_in_own_code_can_be_nested_and_takes_what_load_returns(monkeypatch, tmp_path):
    fit(RUN, tmp_path)
    trained, images = load(tmp_path), torch.zeros(3, 1, 8, 8, dtype=torch.uint8)
    before = trained.predict_proba(images)
    calls, usual = [], native.blocks.NativeBlocks.__call__
    monkeypatch.setattr(native.blocks.NativeBlocks, "__call__", lambda self, *inputs: (calls.append(1), usual(self, *inputs))[1])
    for loaded in (trained, load_all([tmp_path])):
        with native_kernel(loaded):
            with native_kernel(loaded):
                loaded.predict_proba(images)
            torch.testing.assert_close(loaded.predict_proba(images), before, rtol=0, atol=2e-6)
    assert len(calls) == 4 and torch.equal(trained.predict_proba(images), before)


def test_hook_of_the_tokenizer_is_called_with_the_kernel():
    model, calls = VIT((8, 8), 1, 10), []
    model.tokenizer.proj.register_forward_hook(lambda *_: calls.append(1))
    with native_kernel(model):
        model(torch.randn(2, 1, 8, 8))
    assert calls == [1]


def test_kernel_in_own_code_needs_blocks_of_a_vit():
    timm_model = timm.models.VisionTransformer(img_size=8, patch_size=4, embed_dim=16, depth=1, num_heads=1)
    for models in ((), (timm_model,), ([timm_model],)):
        with pytest.raises(ValueError, match=r"has no blocks of a smallvit ViT.*from_timm"), native_kernel(*models):
            pass
    with native_kernel(from_timm(timm_model)):
        pass


def native_call(blocks: Blocks):
    ((_, call),) = native.native_blocks(nn.ModuleList([blocks]))
    return call


def results(blocks, call, x, direction, **inputs) -> list:
    """The output, and the gradients of the input and of all weights."""
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    out, _ = call(x, **inputs)
    weights = [p for p in blocks.parameters() if p.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, [x, *weights], direction)]


def error(found, exact) -> float:
    """The largest difference between two lists of tensors, each relative to the norm of the exact tensor; NaN if one is NaN."""
    return torch.stack([(f.double() - e).norm() / (e.norm() + 1e-20) for f, e in zip(found, exact, strict=True)]).max().item()


def test_error_of_a_tensor_that_is_not_a_number_is_not_a_number():
    exact = [torch.ones(2).double()] * 3
    for place in range(3):
        found = [torch.full((2,), float("nan")) if index == place else torch.ones(2) for index in range(3)]
        assert math.isnan(error(found, exact))
    assert error([torch.ones(2), torch.ones(2), torch.full((2,), 1.5)], exact) == 0.5


ATTENTIONS = {
    "plain": Attention,
    "no bias": partial(Attention, qkv_bias=False),
    "wide heads": partial(Attention, head_dim=32),
    "LSA": LocalityAttention,
    "LSA, mask alone": partial(LocalityAttention, temperature="fixed"),
    "LSA, temperature alone": partial(LocalityAttention, mask_self=False),
}


@pytest.mark.parametrize("examples", slow_after(1, [25, 60]))
def test_outputs_and_all_gradients_equal_those_of_pytorch(examples):
    chosen = settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    chosen(given(st.data())(compare_gradients))()


def compare_gradients(data):
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 99)))
    b, n, heads = draw(st.integers(1, 9)), draw(st.sampled_from([1, 2, 5, 16, 17, 33, 50, 130])), draw(st.integers(1, 3))
    dim = 16 * heads * draw(st.integers(1, 3))
    blocks = make_blocks(
        draw(st.integers(1, 3)), dim, heads, ATTENTIONS[draw(st.sampled_from(sorted(ATTENTIONS)))],
        draw(st.sampled_from([0.0, 0.5])), mlp_ratio=draw(st.sampled_from([1.0, 1.3, 2.0, 3.0])),
        activation=draw(st.sampled_from(["gelu", "relu", "swiglu", "geglu"])),
    )  # fmt: skip
    for parameter in blocks.parameters():
        parameter.requires_grad_(draw(st.integers(0, 5)) > 0)
    x, direction, inputs = torch.randn(b, n, dim), torch.randn(b, n, dim), {}
    if draw(st.booleans()):
        inputs["size"] = torch.randint(0, 4, (b, n)).float().index_fill(1, torch.tensor([0]), 1.0)
    if draw(st.booleans()):
        shape = draw(st.sampled_from([(n,), (n, n), (b, 1, 1, n), (1, heads, n, n), (b, 1, n, n)]))
        mask = torch.rand(shape) > 0.4
        mask[..., 0] = True
        inputs["mask"] = mask
    exact = copy.deepcopy(blocks).double()
    in_double = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    expected = results(exact, exact, x.double(), direction.double(), **in_double)
    before = torch.get_num_threads()
    torch.set_num_threads(draw(st.sampled_from([1, 2])))
    try:
        found = results(blocks, native_call(blocks), x, direction, **inputs)
    finally:
        torch.set_num_threads(before)
    eager = results(blocks, blocks, x, direction, **inputs)
    assert error(found, expected) < 4 * error(eager, expected) + 1e-5


@pytest.mark.parametrize("tiles", [True, False], ids=["tiles", "vectors"])
@pytest.mark.parametrize(
    ("images", "tokens", "dim", "heads", "attention", "drop_path", "activation"),
    [
        (4, 17, 64, 4, "plain", 0.0, "gelu"), (3, 5, 48, 3, "LSA", 0.5, "gelu"), (1, 1, 16, 1, "no bias", 0.0, "gelu"),
        (33, 17, 32, 2, "plain", 0.0, "gelu"), (2, 130, 96, 2, "wide heads", 0.0, "gelu"), (9, 17, 32, 2, "plain", 0.0, "swiglu"),
        (3, 33, 64, 4, "plain", 0.5, "geglu"),
    ],
)  # fmt: skip
def test_half_precision_is_as_exact_as_that_of_pytorch(
    tiles, images, tokens, dim, heads, attention, drop_path, activation, monkeypatch
):
    if not native.compiler.library().blocks_has_bf16():
        pytest.skip("this processor has no products of bf16")
    if tiles and not native.branches.has_tiles():
        pytest.skip("this processor has no tile registers")
    monkeypatch.setattr(native.branches, "has_tiles", lambda: tiles)
    torch.manual_seed(0)
    blocks = make_blocks(3, dim, heads, ATTENTIONS[attention], drop_path, activation=activation)
    x, direction = torch.randn(images, tokens, dim), torch.randn(images, tokens, dim)
    double = copy.deepcopy(blocks).double()
    exact = results(double, double, x.double(), direction.double())
    with torch.autocast("cpu", torch.bfloat16):
        eager, found = results(blocks, blocks, x, direction), results(blocks, native_call(blocks), x, direction)
    assert found[0].dtype == torch.float32
    assert 1e-4 < error(found, exact) < 1.5 * error(eager, exact)


def test_patches_are_embedded_by_a_matrix_product_only_while_the_kernel_is_in_use():
    model = VIT((8, 8), 1, 10)
    context = NumericsContext(model, NATIVE)
    with context.active():
        assert model.tokenizer.linear
    assert not model.tokenizer.linear
    overlapping = ViT((8, 8), 1, 10, tokenizer=partial(PatchEmbed, patch=2, kernel=4), dim=32, depth=1, heads=2)
    with NumericsContext(overlapping, NATIVE).active():
        assert overlapping(torch.zeros(1, 1, 8, 8)).shape == (1, 10)


def test_only_the_class_token_is_normalized_while_the_kernel_is_in_use():
    torch.manual_seed(0)
    model, x, seen = VIT((8, 8), 1, 10), torch.randn(3, 1, 8, 8), []
    loss = model.double()(x.double()).square().sum()
    exact = torch.autograd.grad(loss, [*model.norm.parameters(), model.prefix])
    with NumericsContext(model.float(), NATIVE).active():
        assert model.skips_unused_norms
        found = torch.autograd.grad(model(x).square().sum(), [*model.norm.parameters(), model.prefix])
        assert error(found, exact) < 1e-5
        model.norm.register_forward_hook(lambda module, inputs, out: seen.append(out.shape))
        assert torch.equal(model.features(x), model.tokens(x)[0][:, 0]) and seen == 2 * [(3, 17, 32)]
    assert not model.skips_unused_norms
    mean = ViT((8, 8), 1, 10, tokenizer=partial(PatchEmbed, patch=2), dim=32, depth=1, heads=2, pool=MeanTokens)
    with NumericsContext(mean, NATIVE).active():
        assert not mean.skips_unused_norms


class Doubled(ViT):
    def pooled(self, x, size):
        return 2 * super().pooled(x, size)


def test_all_tokens_are_normalized_if_somebody_sees_them():
    model, x, seen = VIT((8, 8), 1, 10).eval(), torch.randn(3, 1, 8, 8), []
    own = Doubled((8, 8), 1, 10, tokenizer=partial(PatchEmbed, patch=2), dim=32, depth=1, heads=2).eval()
    replaced = VIT((8, 8), 1, 10).eval()
    replaced.pooled = lambda x, size: x[:, 1]
    for each in (own, replaced):
        expected = each(x)
        with native_kernel(each):
            torch.testing.assert_close(each(x), expected, rtol=0, atol=2e-5)
    with native_kernel(model):
        with torch.no_grad():
            expected = model.tokens(x)[0]
        handle = model.pool.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
        model(x)
        torch.testing.assert_close(seen.pop(), expected)
        handle.remove()
        model.norm.register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0]))
        model(x).sum().backward()
        assert seen[0].shape == (3, 17, 32)


def test_patches_are_embedded_by_the_convolution_if_it_has_been_changed():
    model, x = VIT((8, 8), 1, 10).eval(), torch.randn(3, 1, 8, 8)
    with native_kernel(model):
        changed_forward(model.tokenizer.proj)
        found = model.embed(x)
    assert torch.equal(found, model.embed(x))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"])
def test_copy_that_is_made_inside_does_not_use_the_kernel(copied):
    model = VIT((8, 8), 1, 10)
    with native_kernel(model):
        other = copied(model)
    assert other.tokenizer.linear is False and other.skips_unused_norms is False
    assert other.blocks._compiled_call_impl is None


def test_speedup_of_a_reduction_compares_with_a_model_that_uses_the_native_kernel_too(monkeypatch):
    used = []

    def fixed_times(calls, repeats):
        used.extend(uses_native_kernel(call.func) for call in calls)
        return [2.0, 8.0, 5.0, 3.0]

    monkeypatch.setattr(flops, "milliseconds", fixed_times)
    model = VIT((28, 28), 1, 10, reduction=partial(Merge, r=5)).eval()
    with native_kernel(model):
        assert flops.speedup(model, torch.rand(2, 1, 28, 28)) == (2.0, 1.5)
    assert used == [True, False, False, True] and not uses_native_kernel(model)
    model.blocks.compile(backend="eager")
    assert not uses_native_kernel(model)


def test_contexts_of_several_threads_leave_the_model_as_before():
    model = VIT((8, 8), 1, 10)
    entered, left = threading.Event(), threading.Event()

    def other():
        with native_kernel(model):
            entered.set()
            left.wait(10)

    thread = threading.Thread(target=other)
    with native_kernel(model):
        thread.start()
        entered.wait(10)
    assert model.blocks._compiled_call_impl is not None and model.tokenizer.linear and model.skips_unused_norms
    left.set()
    thread.join()
    assert model.blocks._compiled_call_impl is None and "_compiled_call_impl" not in vars(model.blocks)
    assert model.tokenizer.linear is False and model.skips_unused_norms is False


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("-mavx2", "-mfma"), ()], ids=["AVX2", "portable"])
def test_other_processors(flags, tmp_path, monkeypatch):
    if "x86" not in os.uname().machine:
        pytest.skip("these flags are those of x86 processors")
    if flags and "avx2" not in native.compiler.processor():
        pytest.skip("this processor has no AVX2")
    monkeypatch.setenv("SMALLVIT_CACHE", str(tmp_path))
    monkeypatch.setattr(native.compiler, "FOR_THIS_PROCESSOR", (flags,))
    forget_compiler()
    try:
        assert native.compiler.library().blocks_lanes() == (8 if flags else 4)
        for options in (*({"attention": attention} for attention in ATTENTIONS.values()), {"activation": "swiglu"}):
            blocks, x, direction = make_blocks(**options), torch.randn(3, 19, 32), torch.randn(3, 19, 32)
            found = results(blocks, native_call(blocks), x, direction)
            assert error(found, [each.double() for each in results(blocks, blocks, x, direction)]) < 1e-5
        blocks, x = merging_blocks(), torch.randn(3, 17, 32)
        torch.testing.assert_close(native_call(blocks)(x)[0], blocks(x)[0], rtol=0, atol=2e-5)
    finally:
        forget_compiler()


@pytest.mark.parametrize("threads", [1, 2])
def test_same_call_gives_the_same_bits(threads):
    blocks, x, direction = make_blocks(drop_path=0.3), torch.randn(40, 33, 32), torch.randn(40, 33, 32)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        first, second = (results(blocks, native_call(blocks), x, direction) for _ in range(2))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_nan_in_one_image_stays_in_that_image():
    blocks, x = make_blocks(), torch.randn(5, 17, 32)
    x[2, 4, 7] = float("nan")
    with torch.no_grad():
        expected, found = blocks(x)[0], native_call(blocks)(x)[0]
    assert torch.equal(expected.isnan(), found.isnan()) and found[2].isnan().all()
    assert not found[[0, 1, 3, 4]].isnan().any()


def test_query_that_may_attend_to_nothing_gives_nan_as_in_pytorch():
    blocks, x, mask = make_blocks(1), torch.randn(2, 5, 32), torch.ones(5, 5, dtype=torch.bool)
    mask[3] = False
    with torch.no_grad():
        expected, found = blocks(x, mask=mask)[0], native_call(blocks)(x, mask=mask)[0]
    assert torch.equal(expected.isnan(), found.isnan()) and found[:, 3].isnan().all()


# What the kernel leaves to PyTorch


class OwnAttention(Attention):
    """A subclass that computes something else."""

    def forward(self, x, size=None, mask=None):
        output = super().forward(x, size, mask)
        return output._replace(x=2 * output.x)


UNSUPPORTED = {
    "another attention": ({"attention": OwnAttention}, "OwnAttention computes"),
    "normalized queries": ({"attention": partial(Attention, qk_norm=True)}, "computes its logits in another way"),
    "one temperature for all heads": ({"attention": partial(LocalityAttention, temperature="per layer")}, "computes its logits in another way"),
    "post-norm": ({"norm_first": False}, "norms follow"),
    "LayerScale": ({"layer_scale": 0.1}, "LayerScale"),
    "narrow heads": ({"dim": 48, "heads": 6}, "multiple of 16"),
}


class Twice(nn.Module):
    """A part of a branch that looks like a LayerScale without factors."""

    factor = None

    def forward(self, x):
        return 2 * x


ODD_PARTS = {
    "LayerScale in the MLP": (lambda block: block.branch2.__setitem__(1, LayerScale(32, 0.1)), "LayerScale"),
    "own part": (lambda block: block.branch1.__setitem__(0, nn.Tanh()), "a branch has other parts"),
    "own scale": (lambda block: block.branch1.__setitem__(1, Twice()), "a branch has other parts"),
    "longer branch": (lambda block: block.branch2.append(nn.Tanh()), "a branch has other parts"),
    "no stochastic depth": (lambda block: block.branch2.__setitem__(2, nn.Identity()), "a branch has other parts"),
    "no dropout": (lambda block: block.mlp.__setitem__(2, nn.Tanh()), "its MLP has other parts"),
    "other dropout": (lambda block: block.mlp.__setitem__(2, nn.Dropout1d(0.5)), "its MLP has other parts"),
    "shorter MLP": (lambda block: block.mlp.__delitem__(2), "its MLP has other parts"),
    "longer MLP": (lambda block: block.mlp.append(nn.Dropout(0.5)), "its MLP has other parts"),
    "no MLP": (lambda block: setattr(block, "mlp", nn.Identity()), "its MLP has other parts"),
    "normalized keys": (lambda block: setattr(block.attention, "k_norm", nn.LayerNorm(16)), "computes its logits in another way"),
    "norm of two axes": (lambda block: setattr(block, "norm1", nn.LayerNorm((17, 32))), "more than one axis"),
}


@pytest.mark.parametrize("case", ODD_PARTS)
def test_blocks_with_other_parts_are_computed_by_pytorch_with_a_note(case, capsys):
    change, reason = ODD_PARTS[case]
    blocks, x = make_blocks(), torch.randn(3, 17, 32)
    change(blocks[0])
    native.blocks.note.cache_clear()
    call = native_call(blocks)
    assert "PyTorch computes 1 of 2 blocks: " in (text := capsys.readouterr().err) and reason in text
    found, expected = (results(blocks, each, x, x)[0] for each in (call, blocks))
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_blocks_are_computed_by_pytorch_with_a_note(case, capsys):
    options, reason = UNSUPPORTED[case]
    native.blocks.note.cache_clear()
    assert native.native_blocks(nn.ModuleList([make_blocks(**options)])) == []
    assert "PyTorch computes 2 of 2 blocks: " in (text := capsys.readouterr().err) and reason in text


class UnknownPrune(Prune):
    """A subclass, of which nobody knows what it needs."""


def test_supported_blocks_between_unsupported_ones_are_computed_natively(capsys):
    native.blocks.note.cache_clear()
    prune = UnknownPrune(LayerContext(layer=1, depth=4, dim=32, prefix=1, patches=16), keep=0.75, layers=(1,))
    blocks = make_blocks(4)
    blocks[1].reduction = prune
    call = native_call(blocks)
    assert [type(part).__name__ for part in call.args[0]] == ["NativeBlocks", "Block", "NativeBlocks"]
    assert "1 of 4 blocks: UnknownPrune does not say what it needs of the attention" in capsys.readouterr().err
    x, direction = torch.randn(3, 17, 32), torch.randn(3, 14, 32)  # one of them is the mean of the dropped ones
    expected = results(blocks, blocks, x, direction)
    assert error(results(blocks, call, x, direction), [each.double() for each in expected]) < 1e-5
    ones = torch.ones(3, 17)
    assert torch.equal(call(x, ones)[1], blocks(x, ones)[1])


def merging_blocks(depth=3, r: int | tuple = 4, patches=16, **options) -> Blocks:
    blocks = make_blocks(depth, **options)
    for layer, block in enumerate(blocks):
        block.reduction = Merge(LayerContext(layer, depth, block.norm1.normalized_shape[0], 1, True, patches), r=r)
    return blocks


@pytest.mark.parametrize("in_place", slow_after(1, [True, False]), ids=["gradients in place", "gradients"])
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("r", slow_after(1, [(0, 5, 2), 3]), ids=str)
def test_blocks_that_merge_are_computed_natively(r, attention, in_place, capsys):
    native.blocks.note.cache_clear()
    torch.manual_seed(0)
    blocks = merging_blocks(r=r, attention=ATTENTIONS[attention])
    exact, call = copy.deepcopy(blocks).double(), native_call(blocks)
    (part,) = call.args[0]
    assert type(part) is native.blocks.NativeBlocks and len(part.parts) == 4 and not capsys.readouterr().err
    left = 17 - (9 if r == 3 else 7)
    x, direction, inputs = torch.randn(40, 17, 32), torch.randn(40, left, 32), {"size": torch.randint(1, 4, (40, 17)).float()}
    if in_place:
        for p in blocks.parameters():
            p.grad = torch.zeros_like(p)
        x.requires_grad_()
        with native.gradients_in_place():
            out, size = call(x, **inputs)
        out.backward(direction)
        found = [out.detach(), x.grad, *(p.grad for p in blocks.parameters())]
        x = x.detach()
    else:
        found, size = results(blocks, call, x, direction, **inputs), call(x, **inputs)[1]
    doubles = {name: tensor.double() for name, tensor in inputs.items()}
    assert error(found, results(exact, exact, x.double(), direction.double(), **doubles)) < 1e-5
    assert torch.equal(size, exact(x.double(), **doubles)[1].float())
    with torch.no_grad():
        torch.testing.assert_close(call(x, **inputs)[0], found[0], rtol=0, atol=0)


def pruning_blocks(depth=3, reduction=Prune, **options) -> Blocks:
    """Blocks of which the first prunes nothing."""
    own = {name: options.pop(name) for name in ("keep", "fuse", "layers") if name in options}
    blocks = make_blocks(depth, **options)
    for layer, block in enumerate(blocks):
        block.reduction = reduction(LayerContext(layer, depth, 32, 1, True, 16), **{"keep": 0.5, "layers": (1, 2), **own})
    return blocks


@pytest.mark.parametrize("in_place", slow_after(1, [True, False]), ids=["gradients in place", "gradients"])
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("fuse", slow_after(1, ["sum", "mean", "none"]))
def test_blocks_that_prune_are_computed_natively(fuse, attention, in_place, capsys):
    native.blocks.note.cache_clear()
    torch.manual_seed(0)
    blocks = pruning_blocks(fuse=fuse, attention=ATTENTIONS[attention])
    exact, call = copy.deepcopy(blocks).double(), native_call(blocks)
    (part,) = call.args[0]
    assert type(part) is native.blocks.NativeBlocks and not capsys.readouterr().err
    left = 5 if fuse == "none" else 7  # 16 patches, 8 and the fused one, 5 and the fused one
    x, direction, inputs = torch.randn(40, 17, 32), torch.randn(40, left, 32), {"size": torch.randint(1, 4, (40, 17)).float()}
    if in_place:
        for p in blocks.parameters():
            p.grad = torch.zeros_like(p)
        x.requires_grad_()
        with native.gradients_in_place():
            out, size = call(x, **inputs)
        out.backward(direction)
        found = [out.detach(), x.grad, *(p.grad for p in blocks.parameters())]
        x = x.detach()
    else:
        found, size = results(blocks, call, x, direction, **inputs), call(x, **inputs)[1]
    doubles = {name: tensor.double() for name, tensor in inputs.items()}
    assert error(found, results(exact, exact, x.double(), direction.double(), **doubles)) < 1e-5 and part.calls
    assert torch.equal(size, exact(x.double(), **doubles)[1].float())
    with torch.no_grad():
        torch.testing.assert_close(call(x, **inputs)[0], found[0], rtol=0, atol=0)
        torch.testing.assert_close(call(x)[0], exact(x.double())[0].float(), rtol=0, atol=2e-5)


def test_learned_pruning_is_computed_natively_until_sizes_have_a_gradient(monkeypatch):
    torch.manual_seed(0)
    blocks, x, direction = pruning_blocks(reduction=LearnedPrune), torch.randn(6, 17, 32), torch.randn(6, 17, 32)
    (part,), calls = native_call(blocks).args[0], []
    monkeypatch.setattr(native.blocks, "rest", lambda *rest, own=native.blocks.rest: calls.append(len(rest[0])) or own(*rest))
    torch.manual_seed(1)
    found = results(blocks, part, x, direction)
    torch.manual_seed(1)
    expected = results(blocks, blocks, x, direction)
    assert error(found, [each.double() for each in expected]) < 1e-5 and part.calls and calls == [2]
    for training in (False, True):
        blocks.train(training)
        with torch.no_grad():
            calls = part.calls
            torch.manual_seed(1)
            found, size = part(x)
            torch.manual_seed(1)
            expected, expected_size = blocks(x)
        assert part.calls == calls + 1 and (torch.equal(size, expected_size) if training else size is expected_size is None)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def test_blocks_that_prune_and_skip_branches_or_have_places():
    torch.manual_seed(0)
    blocks, x = pruning_blocks(drop_path=0.5), torch.randn(6, 17, 32)
    (part,) = native_call(blocks).args[0]
    assert part.fallback(x, None, None, part.weights(), False) is None
    torch.manual_seed(1)
    found, _, places = part(x, None, None, places_of((4, 4), x.device))
    torch.manual_seed(1)
    expected, _, expected_places = blocks(x, None, None, places_of((4, 4), x.device))
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(places.at, expected_places.at, rtol=0, atol=1e-6)


class Needs(nn.Module):
    """A reduction that gives what its function makes of the tokens, and says what it needs."""

    needs = ()

    def __init__(self, change):
        super().__init__()
        self.change, self.weight = change, nn.Parameter(torch.tensor(0.1))

    def forward(self, x, size, key=None, saliency=None):
        return self.change(self, x, size, key, saliency)


class NeedsFirst(Needs):
    needs, first = (), True

    def forward(self, x, size):
        return self.change(self, x, size, None, None)


@pytest.mark.parametrize("kind", [Needs, NeedsFirst])
def test_pytorch_computes_what_follows_sizes_with_a_gradient(kind):
    torch.manual_seed(0)
    blocks, x, direction = make_blocks(4), torch.randn(3, 17, 32), torch.randn(3, 17, 32)
    blocks[1].reduction = kind(lambda own, x, *_: (x, (1 + own.weight * torch.arange(17)).expand(3, 17)))
    exact = copy.deepcopy(blocks).double()
    found, expected = results(blocks, native_call(blocks), x, direction), results(exact, exact, x.double(), direction.double())
    (place,) = (index for index, each in enumerate(found) if not each.ndim)  # the weight; many terms of it cancel each other
    torch.testing.assert_close(found.pop(place), expected.pop(place).float(), rtol=1e-3, atol=0)
    assert error(found, expected) < 1e-5


UNREADABLE = {
    "bf16": torch.Tensor.bfloat16, "float64": torch.Tensor.double, "narrower": lambda x: x[..., :16], "one image": lambda x: x[0],
    "no tokens": lambda x: x[:, :0],
}  # fmt: skip


@pytest.mark.parametrize("change", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_tokens_that_the_kernel_cannot_read_are_left_to_pytorch(change):
    blocks, x = make_blocks(), torch.randn(3, 17, 32)
    blocks[0].reduction = Needs(lambda own, x, size, *_: (change(x), size))
    outcomes = []
    for call in (native_call(blocks), blocks):
        try:
            outcomes.append(call(x)[0].shape)
        except (RuntimeError, ValueError) as error:
            outcomes.append(type(error))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("needs", [(), ("key",)])
def test_reduction_gets_only_the_functions_that_it_needs(needs):
    class Own(Prune):
        pass

    Own.needs, blocks = needs, pruning_blocks()
    blocks[1].reduction = Own(LayerContext(1, 3, 32, 1, True, 16), keep=0.5, layers=(1, 2))
    with pytest.raises(ValueError, match="needs the saliency of the attention"):
        native_call(blocks)(torch.randn(3, 17, 32))


UNKNOWN_NEEDS = {"name": ("salience",), "text": "saliency", "true": True, "property": property(lambda own: ("saliency",))}


@pytest.mark.parametrize("needs", UNKNOWN_NEEDS.values(), ids=UNKNOWN_NEEDS.keys())
def test_unknown_needs_are_left_to_pytorch(needs):
    class Own(Prune):
        pass

    Own.needs, blocks = needs, pruning_blocks()
    blocks[1].reduction = Own(LayerContext(1, 3, 32, 1, True, 16), keep=0.5, layers=(1, 2))
    assert "Own does not say what it needs" in str(native.reason_against_block(blocks[1]))
    assert native_call(blocks)(torch.randn(3, 17, 32))[0].shape == (3, 7, 32)


@pytest.mark.parametrize("make", [merging_blocks, pruning_blocks], ids=["merge", "prune"])
def test_blocks_with_fewer_tokens_are_computed_again_in_the_backward_pass(make):
    blocks, x = make(), torch.randn(8, 17, 32, requires_grad=True)
    call = native_call(blocks)
    for _ in range(3):
        checkpoint(lambda x: call(x)[0], x, use_reentrant=False).square().sum().backward()
    found, x.grad = x.grad, None
    blocks(x)[0].square().sum().backward()
    torch.testing.assert_close(found, 3 * x.grad, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("examples", slow_after(1, [25, 60]))
def test_tokens_are_merged_as_by_pytorch(examples):
    chosen = settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    cases = given(
        images=st.integers(1, 5), patches=st.integers(2, 40), prefix=st.sampled_from([0, 1, 2, 5]), r=st.integers(1, 20),
        key_width=st.sampled_from([16, 48]), sized=st.booleans(), threads=st.sampled_from([1, 2]),
    )  # fmt: skip
    chosen(cases(compare_merging))()


def compare_merging(images, patches, prefix, r, key_width, sized, threads):
    merge = Merge(LayerContext(0, 1, 32, prefix, prefix > 0, patches), r=r)
    n = prefix + patches
    x, keys = torch.randn(images, n, 32, requires_grad=True), torch.randn(images, n, key_width)
    size = torch.randint(0, 5, (images, n)).float() if sized else None
    expected, expected_size = merge(x, size, lambda: keys)
    direction, before = torch.randn_like(expected), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out, new_size, place, share = native.merging.NativeMerge.apply(merge, x, size, keys)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)
    assert torch.equal(new_size, expected_size)
    (d_x,), (d_expected,) = (torch.autograd.grad(each, x, direction) for each in (out, expected))
    torch.testing.assert_close(d_x, d_expected, rtol=0, atol=2e-6)
    whole = torch.zeros_like(out).scatter_add(1, place[..., None].expand_as(x), x * share[..., None])
    torch.testing.assert_close(whole, expected, rtol=0, atol=2e-6)
    alone = torch.zeros_like(new_size).scatter_add(1, place, torch.ones(images, n)).gather(1, place) == 1
    assert torch.equal(out.gather(1, place[..., None].expand_as(x))[alone], x[alone])


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_strange_keys_of_one_image_stay_in_that_image(value):
    merge, x, keys = Merge(LayerContext(0, 1, 32, 1, True, 16), r=5), torch.randn(3, 17, 32), torch.randn(3, 17, 16)
    strange = keys.clone()
    strange[1] = value
    found, expected = (native.merging.merge_tokens(merge, x, None, each) for each in (strange, keys))
    assert all(torch.equal(one[[0, 2]], other[[0, 2]]) for one, other in zip(found, expected))
    assert found[1].sum(1).tolist() == [17, 17, 17] and not found[0].isnan().any()


def test_tokens_with_a_key_that_is_not_a_number_are_merged_as_by_pytorch():
    merge, x = Merge(LayerContext(0, 1, 32, 1, True, 16), r=5), torch.randn(50, 17, 32)
    keys = torch.randn(50, 17, 16)
    keys[torch.arange(50), torch.randint(17, (50,)), 3] = float("nan")
    expected, expected_size = merge(x, None, lambda: keys)
    found, size, _, _ = native.merging.merge_tokens(merge, x, None, keys)
    assert torch.equal(size, expected_size)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


class TooMany(Merge):
    """It asks for more pairs than there can be."""

    needs, merges_best_pairs = ("key",), True

    def count(self, n):
        return 9


def test_more_pairs_than_half_of_the_patches_are_refused():
    blocks = make_blocks(1)
    blocks[0].reduction = TooMany(LayerContext(0, 1, 32, 1, True, 16), r=9)
    with pytest.raises(ValueError, match="TooMany merges 9 pairs of 16 patches; expected at most half"):
        native_call(blocks)(torch.randn(2, 17, 32))


def test_merging_that_is_changed_for_one_block_is_called():
    blocks, x = merging_blocks(2), torch.randn(2, 17, 32)
    call = native_call(blocks)
    blocks[0].reduction.forward = lambda x, size, key=None, saliency=None: (x.flip(1), size)
    found, expected = call(x)[0], blocks(x)[0]
    assert found.shape == (2, 13, 32)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


class Weighted(nn.Module):
    """It gives sizes that it learns."""

    needs = ("key",)

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x, size, key=None, saliency=None):
        return x, self.weight * x.new_ones(x.shape[:2])


def test_sizes_with_a_gradient_are_merged_by_pytorch():
    blocks, x = make_blocks(2), torch.randn(2, 17, 32)
    blocks[0].reduction, blocks[1].reduction = Weighted(), merging_blocks(1)[0].reduction
    size = native_call(blocks)(x)[1]
    size.sum().backward()
    assert blocks[0].reduction.weight.grad == 2 * 17


def test_stack_without_models_is_no_error_of_the_kernel():
    call = native_call(merging_blocks(2))
    with suppress(RuntimeError):  # PyTorch may refuse it; the process goes on
        assert torch.vmap(lambda x: call(x)[0])(torch.randn(0, 2, 17, 32)).shape[0] == 0


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_mlp_without_hidden_units_is_computed(activation):
    blocks, x = make_blocks(mlp_ratio=0.0, activation=activation), torch.randn(2, 17, 32)
    torch.testing.assert_close(native_call(blocks)(x)[0], blocks(x)[0], rtol=0, atol=2e-5)


class Mirror(nn.Module):
    """A reduction that leaves all tokens, in another order."""

    needs = ()

    def forward(self, x, size, key=None, saliency=None):
        return x.flip(1), size


class MirrorFirst(Mirror):
    first = True


class DeclaredFirst(MirrorFirst):
    needs = ()


class Unknown(Merge):
    """A subclass, of which nobody knows what it needs."""


def test_reductions_of_a_user_are_called_or_left_to_pytorch(capsys):
    native.blocks.note.cache_clear()
    torch.manual_seed(0)
    blocks, x = make_blocks(), torch.randn(3, 17, 32)
    blocks[0].reduction = Mirror()
    call = native_call(blocks)
    assert not capsys.readouterr().err
    torch.testing.assert_close(call(x)[0], blocks(x)[0], rtol=0, atol=2e-5)
    blocks[0].reduction = blocks[1].reduction = MirrorFirst()
    assert native.native_blocks(nn.ModuleList([blocks])) == []
    assert "MirrorFirst does not say" in capsys.readouterr().err
    blocks[0].reduction, blocks[1].reduction = DeclaredFirst(), MirrorFirst()
    assert [type(part).__name__ for part in native_call(blocks).args[0]] == ["NativeBlocks", "Block"]
    torch.testing.assert_close(native_call(blocks)(x)[0], blocks(x)[0], rtol=0, atol=2e-5)
    blocks[0].reduction = blocks[1].reduction = MirrorFirst()
    torch.testing.assert_close(call(x)[0], blocks(x)[0], rtol=0, atol=0)  # exchanged after the blocks were looked at
    assert native.reason_against_block(merging_blocks()[0]) is None
    blocks[0].reduction = Unknown(LayerContext(0, 2, 32, 1, True, 16), r=1)
    assert "Unknown does not say" in str(native.reason_against_block(blocks[0]))


def test_merging_blocks_use_the_same_memory_in_each_step(monkeypatch):
    def step():
        out = call(x)[0]
        out.backward(torch.ones_like(out))

    blocks, x = merging_blocks(12, r=1), torch.randn(16, 17, 32, requires_grad=True)
    call = native_call(blocks)
    for _ in range(3):
        step()
    new_memory, made = native.memory.new_memory, []
    monkeypatch.setattr(native.memory, "new_memory", lambda floats: made.append(floats) or new_memory(floats))
    step()
    assert not made


def test_call_in_inference_mode_does_not_harm_a_later_training_step():
    blocks, x = make_blocks(), torch.randn(3, 17, 32)
    call = native_call(blocks)
    with torch.inference_mode():
        call(x)
    call(x)[0].sum().backward()
    assert all(p.grad is not None for p in blocks.parameters())


@pytest.mark.parametrize("make", [merging_blocks, pruning_blocks], ids=["merge", "prune"])
def test_stack_of_models_has_fewer_tokens_as_each_of_them_does(make):
    torch.manual_seed(0)
    members = [make() for _ in range(3)]
    weights, _ = torch.func.stack_module_state(members)
    (part,) = native_call(members[0]).args[0]
    names, x = [*weights], torch.randn(3, 5, 17, 32)

    def output(own, x):
        return torch.func.functional_call(Shell(members[0], part), {f"inner.{name}": own[name] for name in names}, (x,))[0]

    found = torch.vmap(output)(weights, x)
    for each, one, own in zip(members, found, x):
        torch.testing.assert_close(one, each(own)[0], rtol=0, atol=2e-5)


class Shell(nn.Module):
    """Blocks that are called in another way."""

    def __init__(self, inner: nn.Module, call):
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x):
        return self.call(x)


def test_blocks_that_merge_and_have_places_or_masks_or_skipped_branches():
    torch.manual_seed(0)
    blocks, x = merging_blocks(), torch.randn(6, 17, 32)
    (part,) = native_call(blocks).args[0]
    places = places_of((4, 4), x.device)
    found, _, found_places = part(x, None, None, places)
    expected = x, None, places
    for block in blocks:
        expected = block(expected[0], expected[1], None, expected[2])
    torch.testing.assert_close(found, expected[0], rtol=0, atol=2e-5)
    torch.testing.assert_close(found_places.at, expected[2].at, rtol=0, atol=1e-6)
    weights = part.weights()
    assert "mask" in part.fallback(x, None, torch.ones(17, dtype=torch.bool), weights, False)
    assert part.fallback(x, None, None, weights, False) is None
    skipping = merging_blocks(drop_path=0.5)
    (part,) = native_call(skipping).args[0]
    assert "skips the attention" in part.fallback(x, None, None, weights, False)
    torch.manual_seed(1)
    found = part(x)[0]
    torch.manual_seed(1)
    assert torch.equal(found, skipping(x)[0])
    skipping.eval()
    assert part.fallback(x, None, None, weights, False) is None


def test_what_does_not_fit_raises_the_error_of_pytorch():
    blocks, x = make_blocks(), torch.randn(4, 5, 32)
    call = native_call(blocks)
    masks = [torch.ones(shape, dtype=torch.bool) for shape in ((3,), (2, 1, 5, 5), (1, 3, 5, 5), (1, 1, 3, 5))]
    sizes = [torch.ones(2, 5), torch.ones(4, 3)]
    calls = [(x, None, mask) for mask in masks] + [(x, size, None) for size in sizes] + [(torch.randn(4, 5, 48), None, None)]
    for own in calls:
        with pytest.raises(RuntimeError):
            blocks(*own)
        with pytest.raises(RuntimeError):
            call(*own)
    for shape in ((5,), (5, 5), (1, 1, 1, 5), (4, 2, 5, 5)):
        mask = torch.rand(shape) > 0.2
        torch.testing.assert_close(call(x, None, mask)[0], blocks(x, None, mask)[0], rtol=0, atol=2e-5)


def test_a_norm_without_bias_is_left_to_pytorch():
    blocks, x = make_blocks(), torch.randn(4, 5, 32)
    call = native_call(blocks)
    blocks[0].norm1.bias = None  # after the kernel has looked at the blocks
    assert torch.equal(call(x)[0], blocks(x)[0])
    assert "norm" in native.reason_against_block(blocks[0])


class SlowMemory(torch.Tensor):
    """Memory in a pool. Whoever asks for its size gets the answer when somebody else has asked too, or after a moment."""

    asked = threading.Barrier(2)

    def numel(self):
        with suppress(threading.BrokenBarrierError):
            self.asked.wait(timeout=0.2)
        return super().numel()


def test_threads_never_get_the_same_memory():
    pool = native.memory.Pool()
    pool.free = {torch.empty(16).as_subclass(SlowMemory): 0}
    with ThreadPoolExecutor(2) as threads:
        loans = [*threads.map(pool.lend, [16, 16])]
    assert loans[0].pointer.value != loans[1].pointer.value


def test_transforms_of_functions_are_left_to_pytorch():
    blocks, x = make_blocks(), torch.randn(2, 3, 17, 32)
    call = native_call(blocks)

    def loss(call):
        return lambda x: call(x)[0].square().sum()

    transforms = {
        "gradient": lambda f: torch.func.grad(f)(x[0]),
        "gradient for each of several inputs": lambda f: torch.vmap(torch.func.grad(f))(x),
        "gradient of a vmap": lambda f: torch.func.grad(lambda x: torch.vmap(f)(x).sum())(x),
        "vmap of a vmap": lambda f: torch.vmap(torch.vmap(lambda x: f(x[None])))(x),
        "second derivative": lambda f: torch.func.grad(lambda x: torch.func.grad(f)(x).sum())(x[0]),
        "directional derivative": lambda f: torch.func.jvp(f, (x[0],), (x[1],))[1],
    }
    for name, transform in transforms.items():
        assert torch.equal(transform(loss(call)), transform(loss(blocks))), name


def test_replaced_linear_map_is_left_to_pytorch():
    blocks = make_blocks()
    nn.utils.parametrizations.weight_norm(blocks[0].mlp[0])
    call = native_call(blocks)
    assert [type(part).__name__ for part in call.args[0]] == ["Block", "NativeBlocks"]


FALLBACKS = {
    "hook": lambda blocks: blocks[0].attention.qkv.register_forward_hook(lambda *_: None),
    "dropout": lambda blocks: setattr(blocks[1].mlp[2], "p", 0.5),
    "dropout of the map": lambda blocks: setattr(blocks[1].attention, "dropout", 0.5),
}


@pytest.mark.parametrize("case", FALLBACKS)
def test_calls_that_ask_for_more_equal_pytorch_bit_for_bit(case):
    blocks, x, direction = make_blocks(), torch.randn(3, 17, 32), torch.randn(3, 17, 32)
    call = native_call(blocks)
    assert not torch.equal(results(blocks, call, x, direction)[1], results(blocks, blocks, x, direction)[1])
    FALLBACKS[case](blocks)
    found, expected = results(blocks, call, x, direction), results(blocks, blocks, x, direction)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_number_formats_are_left_to_pytorch(dtype):
    blocks = make_blocks().to(dtype)
    x = torch.randn(3, 17, 32, dtype=dtype)
    with torch.no_grad():
        assert torch.equal(native_call(blocks)(x)[0], blocks(x)[0])


def test_size_with_gradient_is_left_to_pytorch():
    blocks, x, size = make_blocks(), torch.randn(3, 17, 32), torch.rand(3, 17).requires_grad_()
    native_call(blocks)(x, size)[0].sum().backward()
    assert size.grad is not None and size.grad.abs().sum() > 0


def test_counting_multiply_adds_sees_every_operation():
    from torch.utils.flop_counter import FlopCounterMode

    blocks, x = make_blocks(), torch.randn(3, 17, 32)
    counts = []
    for call in (blocks, native_call(blocks)):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            call(x)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_second_derivative_is_refused_in_words():
    blocks, x = make_blocks(), torch.randn(2, 5, 32, requires_grad=True)
    out, _ = native_call(blocks)(x)
    with pytest.raises(RuntimeError, match=r"no second derivative; use --numerics kernel=rule, or leave native_kernel\(\)"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


def test_graphs_that_live_at_the_same_time_do_not_share_memory():
    blocks = make_blocks()
    call = native_call(blocks)
    inputs = [torch.randn(3, n, 32, requires_grad=True) for n in (17, 17, 5)]
    outs = [call(x)[0] for x in inputs]
    for _ in range(2):  # twice, with the same graph
        found = [torch.autograd.grad(out.square().sum(), x, retain_graph=True)[0] for out, x in zip(outs, inputs)]
    expected = [torch.autograd.grad(blocks(x)[0].square().sum(), x)[0] for x in inputs]
    assert error(found, [each.double() for each in expected]) < 1e-5


def test_memory_is_used_again():
    blocks, x = make_blocks(), torch.randn(8, 17, 32)
    call = native_call(blocks)
    gc.collect()
    for _ in range(3):
        call(x)[0].sum().backward()
    known = {memory.data_ptr() for memory in native.memory.POOL.free}
    call(x)[0].sum().backward()
    assert {memory.data_ptr() for memory in native.memory.POOL.free} <= known
    large = native.memory.new_memory(native.memory.HUGE_PAGE)
    assert large.shape == (native.memory.HUGE_PAGE,) and large.dtype == torch.float32 and large.fill_(2).sum() == 2 * len(large)


def test_memory_that_is_not_needed_any_more_is_given_back():
    pool = native.memory.Pool()
    large = pool.lend(1_000_000)
    del large
    for _ in range(native.memory.IDLE_LOANS * pool.most):
        pool.lend(100)
    assert 1_000_000 in [memory.numel() for memory in pool.free]
    for _ in range(2):
        pool.lend(100)
    assert [memory.numel() for memory in pool.free] == [100]


def test_few_things_are_kept_for_later_calls():
    blocks = make_blocks(1, attention=LocalityAttention)
    (part,) = native_call(blocks).args[0]
    for n in range(1, 50):
        torch.testing.assert_close(part(x := torch.randn(1, n, 32))[0], blocks(x)[0], rtol=0, atol=2e-5)
    assert len(part.biases) == native.branches.MOST_PROBLEMS


def test_there_are_no_more_threads_than_groups_of_images():
    blocks, before = make_blocks(), torch.get_num_threads()
    (part,) = native_call(blocks).args[0]
    torch.set_num_threads(8)
    try:
        part(torch.randn(20, 17, 32))
    finally:
        torch.set_num_threads(before)
    (problem,) = part.parts[0][0].problems.values()
    assert problem._obj.group == 15 and problem._obj.threads == 2


@pytest.mark.parametrize("of", ["tokens", "weight", "gradient"])
def test_tensors_that_pytorch_negates_when_it_reads_them(of):
    def negated(tensor):
        return torch._neg_view(-tensor)

    blocks, x, direction = make_blocks(), torch.randn(3, 17, 32), torch.randn(3, 17, 32)
    call = native_call(blocks)
    expected = results(blocks, blocks, x, direction)
    if of == "tokens":
        usual, call = call, lambda x: usual(negated(x))
    elif of == "gradient":
        direction = negated(direction)
    else:
        blocks[0].mlp[0].weight = nn.Parameter(negated(blocks[0].mlp[0].weight.detach()))
    assert error(results(blocks, call, x, direction), [each.double() for each in expected]) < 1e-5


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_mlp_without_hidden_units_has_gradients(activation):
    blocks, x = make_blocks(mlp_ratio=0.0, activation=activation), torch.randn(2, 17, 32)
    found, expected = (results(blocks, each, x, x) for each in (native_call(blocks), blocks))
    assert [each.shape for each in found] == [each.shape for each in expected]
    assert error(found, [each.double() for each in expected]) < 1e-5


def test_many_tokens_are_left_to_pytorch():
    blocks = make_blocks(1)
    call = native_call(blocks)
    few, many = (torch.randn(1, native.blocks.MOST_TOKENS + more, 32) for more in (0, 1))
    with torch.no_grad():
        torch.testing.assert_close(call(few)[0], blocks(few)[0], rtol=0, atol=2e-5)
        assert torch.equal(call(many)[0], blocks(many)[0])
        assert not torch.equal(call(few)[0], blocks(few)[0])


def test_tool_that_watches_functions_sees_all_of_them():
    class Count(torch.overrides.TorchFunctionMode):
        count = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.count += func is nn.functional.linear
            return func(*args, **(kwargs or {}))

    blocks, x = make_blocks(), torch.randn(3, 17, 32)
    counts = []
    for call in (blocks, native_call(blocks)):
        with Count() as mode:
            call(x)
        counts.append(mode.count)
    assert counts == [8, 8]


def test_clipping_a_gradient_that_is_not_a_number_gives_weights_that_are_not():
    model = nn.Linear(3, 2)
    optimizer = optimizers(nn.Sequential(model, nn.Linear(2, 2)))
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    flat = FlatAdamW(optimizer)
    model.weight.grad.fill_(float("nan"))
    flat.clip(1.0)
    flat.step()
    assert all(p.isnan().all() for p in flat.parameters)


# Compilation


def test_without_a_compiler_pytorch_computes_all_blocks(tmp_path, monkeypatch, capsys):
    expected = fit(RUN.vary(steps=3), tmp_path / "rule")
    monkeypatch.setenv("SMALLVIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    forget_compiler()
    native.blocks.note.cache_clear()
    try:
        record = fit(RUN.vary(steps=3), tmp_path / "native", numerics=NATIVE)
        assert "the native kernel cannot be used: no C++ compiler was found; install g++" in capsys.readouterr().err
    finally:
        forget_compiler()
    assert abs(record.test["nll"] - expected.test["nll"]) < 1e-5


def test_compiler_that_fails_is_named_with_its_message(tmp_path, monkeypatch):
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho disk quota exceeded\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("SMALLVIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    forget_compiler()
    try:
        assert "could not compile blocks.cpp: disk quota exceeded" in (native.reason_against() or "")
    finally:
        forget_compiler()


@pytest.mark.parametrize(
    ("compiler", "words"),
    [("no-such-compiler", "CXX is 'no-such-compiler', and there is no such program"), ("{folder}/text", "could not be compiled")],
)
def test_compiler_of_the_user_is_used_or_named(compiler, words, tmp_path, monkeypatch):
    (tmp_path / "text").write_bytes(b"\x7fno program")
    (tmp_path / "text").chmod(0o755)
    monkeypatch.setenv("SMALLVIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", compiler.format(folder=tmp_path))
    forget_compiler()
    try:
        assert words in (native.reason_against() or "")
    finally:
        forget_compiler()


def test_compiler_may_have_options(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", f"{sys.executable} -c pass")
    assert native.compiler.find_compiler() == [sys.executable, "-c", "pass"]


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="users of Unix")
def test_code_of_another_user_is_not_loaded(tmp_path, monkeypatch):
    monkeypatch.delenv("SMALLVIT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(native.compiler.os, "access", lambda *_: False)
    monkeypatch.setattr(native.compiler.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = native.compiler.code_folder()
    assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(native.compiler.NotAvailable, match="others can write the cache folder"):
        native.compiler.code_folder()
    folder.chmod(0o700)
    other = os.getuid() + 1
    monkeypatch.setattr(native.compiler.os, "getuid", lambda: other)
    folder.rename(tmp_path / f"smallvit-{other}")
    with pytest.raises(native.compiler.NotAvailable, match="others can write the cache folder"):
        native.compiler.code_folder()


SCRIPT = """
import torch
from smallvit import native
from smallvit.vit import Block, Blocks
from smallvit.attention import Attention
torch.manual_seed(0)
torch.set_num_threads(4)
blocks = Blocks(Block(64, 4, Attention, None, 0.0) for _ in range(4))
[torch.nn.init.normal_(p, std=0.1) for p in blocks.parameters()]
((_, call),) = native.native_blocks(blocks)
x = torch.randn(64, 50, 64, requires_grad=True)
out = call(x)[0]
out.sum().backward()
assert torch.allclose(out, blocks(x)[0], atol=1e-4)
print("fine")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_with_a_small_stack_and_few_open_files():
    command = f"ulimit -s 256; ulimit -n 64; exec {sys.executable} -c '{SCRIPT}'"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=Path(__file__).parent)
    assert done.stdout == "fine\n", done.stderr


COMPILER = """#!/bin/sh
case "$*" in
  *" -o "*) echo compiled >> "{log}"; sleep 0.5; shift $(($# - 1)); cp "{library}" "$1" ;;
  *) echo "a compiler" ;;
esac
"""


@pytest.fixture
def copying_compiler(tmp_path, monkeypatch):
    """A stand-in for the compiler: it copies the library that was compiled before, and notes that in the returned file."""
    compiler, log = tmp_path / "compiler", tmp_path / "log"
    compiler.write_text(COMPILER.format(log=log, library=native.compiler.library()._name))
    compiler.chmod(0o755)
    monkeypatch.setenv("SMALLVIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    forget_compiler()
    yield log
    forget_compiler()


@pytest.mark.parametrize("damage", [lambda whole: whole[: len(whole) // 2], lambda whole: bytes(len(whole))], ids=["cut", "zeros"])
def test_library_that_was_damaged_is_compiled_again(damage, copying_compiler):
    path = Path(native.compiler.library()._name)
    whole = path.read_bytes()
    path.unlink()  # this process has loaded the file; another one takes its place
    path.write_bytes(damage(whole))
    assert not native.compiler.is_whole(path)  # loading it would end this process
    forget_compiler()
    native.compiler.library()
    assert path.read_bytes() == whole and copying_compiler.read_text() == "compiled\n" * 2
    forget_compiler()
    native.compiler.library()
    assert copying_compiler.read_text() == "compiled\n" * 2


def test_process_does_not_wait_for_ever_for_another_one_that_compiles(copying_compiler, monkeypatch):
    from filelock import FileLock

    monkeypatch.setattr(native.compiler, "COMPILE_SECONDS", 0.1)
    path = Path(native.compiler.library()._name)
    forget_compiler()
    with FileLock(path.with_suffix(".lock")):
        assert native.reason_against() is None  # a library that is there needs no lock
        forget_compiler()
        path.with_suffix(".sha256").unlink()
        assert f"could not be compiled or loaded in {path.parent}" in (native.reason_against() or "")


def test_without_a_home_folder_the_kernel_lies_in_a_temporary_folder(tmp_path, monkeypatch):
    def no_home(self):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.delenv("SMALLVIT_CACHE", raising=False)
    assert native.compiler.code_folder().parent == tmp_path
    with pytest.raises(ValueError, match=r"you have no home folder .* set SMALLVIT_CACHE"):
        cache_folder()


def load_library(barrier, names):
    forget_compiler()
    barrier.wait()
    names.put(native.compiler.library()._name)


def test_processes_that_start_together_compile_once(tmp_path, monkeypatch):
    """With a stand-in for the compiler, which copies the library that was compiled before and takes half a second."""
    compiler, log = tmp_path / "compiler", tmp_path / "log"
    compiler.write_text(COMPILER.format(log=log, library=native.compiler.library()._name))
    compiler.chmod(0o755)
    monkeypatch.setenv("SMALLVIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    fork = multiprocessing.get_context("fork")
    barrier, names = fork.Barrier(2), fork.SimpleQueue()
    started = [fork.Process(target=load_library, args=(barrier, names)) for _ in range(2)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0, 0] and log.read_text() == "compiled\n"
    assert {names.get(), names.get()} == {str(path) for path in (tmp_path / "cache").glob("*.so")}


# What changes after the kernel has looked at the blocks


def changed_forward(module: nn.Module):
    """Give one module a forward function of its own, which makes its tokens 1.5 times as large."""
    usual = module.forward

    def forward(*inputs, **options):
        out = usual(*inputs, **options)
        if isinstance(out, torch.Tensor):
            return out * 1.5
        return (out[0] * 1.5, *out[1:]) if type(out) is tuple else out._replace(x=out.x * 1.5)

    module.forward = forward


PARTS = {
    "list of blocks": lambda blocks: blocks,
    "block": lambda blocks: blocks[0],
    "attention": lambda blocks: blocks[0].attention,
    "queries": lambda blocks: blocks[0].attention.qkv,
    "linear map": lambda blocks: blocks[0].mlp[0],
    "norm": lambda blocks: blocks[0].norm1,
    "MLP": lambda blocks: blocks[0].mlp,
    "stochastic depth": lambda blocks: blocks[0].branch1[2],
}


@pytest.mark.parametrize("part", PARTS)
def test_forward_function_of_one_module_is_called(part):
    blocks, x = make_blocks(), torch.randn(3, 17, 32)
    call = native_call(blocks)
    changed_forward(PARTS[part](blocks))
    assert torch.equal(call(x)[0], blocks(x)[0])


class ThreeTimes(Blocks):
    """A list of blocks that does more than to call its blocks."""

    def forward(self, x, size=None, mask=None, places=None):
        x, size = super().forward(x, size, mask, places)
        return 3 * x, size


def test_own_list_of_blocks_is_called(capsys):
    native.blocks.note.cache_clear()
    assert native.native_blocks(nn.ModuleList([ThreeTimes(make_blocks())])) == []
    assert "PyTorch computes 2 of 2 blocks: ThreeTimes is another kind of list" in capsys.readouterr().err
    model, x = VIT((8, 8), 1, 10).eval(), torch.randn(2, 1, 8, 8)
    model.blocks = ThreeTimes(model.blocks)
    expected = model.tokens_before_norm(x)[0]
    with native_kernel(model):
        torch.testing.assert_close(model.tokens_before_norm(x)[0], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", ["forward", "forward pre", "full backward", "global"])
def test_hooks_of_the_list_of_blocks_are_called(kind):
    model, x, seen = VIT((8, 8), 1, 10).eval(), torch.randn(2, 1, 8, 8), []

    def hook(module, *_):
        if module is model.blocks:
            seen.append(kind)

    of_all = nn.modules.module.register_module_forward_hook
    register = of_all if kind == "global" else getattr(model.blocks, f"register_{kind.replace(' ', '_')}_hook")
    handle = register(hook)
    try:
        with native_kernel(model):
            model(x).sum().backward()
    finally:
        handle.remove()
    assert seen == [kind]


class LowRank(nn.Module):
    """A linear map and another one of low rank beside it, as in LoRA."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(base.in_features, 4), nn.Linear(4, base.out_features)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


CHANGES = {
    "linear map": lambda blocks: blocks[0].mlp.__setitem__(0, nn.Linear(32, 128)),
    "LoRA": lambda blocks: setattr(blocks[0].attention, "qkv", LowRank(blocks[0].attention.qkv)),
    "block": lambda blocks: blocks.__setitem__(0, make_blocks(1)[0]),
    "one more block": lambda blocks: blocks.append(make_blocks(1)[0]),
    "one block less": lambda blocks: blocks.__delitem__(1),
    "eps": lambda blocks: setattr(blocks[0].norm1, "eps", 1.0),
    "scale": lambda blocks: setattr(blocks[0].attention, "scale", 3.0),
    "heads": lambda blocks: setattr(blocks[0].attention, "heads", 1),
    "post-norm": lambda blocks: setattr(blocks[0], "norm_first", False),
    "activation": lambda blocks: blocks[0].mlp.__setitem__(1, nn.ReLU()),
    "approximation": lambda blocks: setattr(blocks[0].mlp[1], "approximate", "tanh"),
    "longer MLP": lambda blocks: blocks[0].mlp.append(nn.Tanh()),
    "LayerScale": lambda blocks: blocks[0].branch2.__setitem__(1, LayerScale(32, 0.1)),
    "factor": lambda blocks: setattr(blocks[0].branch1[1], "factor", nn.Parameter(torch.rand(32))),
    "stochastic depth": lambda blocks: blocks[0].branch2.__setitem__(2, nn.Tanh()),
    "parametrization": lambda blocks: nn.utils.parametrize.register_parametrization(blocks[0].mlp[0], "bias", Twice()),
    "smaller MLP": lambda blocks: shrink_mlp(blocks[0].mlp),
}


def shrink_mlp(mlp):
    """Take away half of the hidden units, and leave the modules as they are."""
    for name, weight in (("weight", mlp[0].weight[:64]), ("bias", mlp[0].bias[:64])):
        setattr(mlp[0], name, nn.Parameter(weight.detach().clone()))
    mlp[3].weight = nn.Parameter(mlp[3].weight[:, :64].detach().clone())


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_the_blocks_count(change):
    blocks, x = make_blocks(), torch.randn(3, 17, 32)
    call = native_call(blocks)
    before = call(x)[0]
    CHANGES[change](blocks)
    found = call(x)[0]
    assert torch.equal(found, blocks(x)[0]) and not torch.allclose(found, before, atol=1e-3)


def test_change_of_gates_counts():
    blocks, x = make_blocks(activation="swiglu"), torch.randn(3, 17, 32)
    call = native_call(blocks)
    blocks[1].mlp[1].act = torch.tanh
    assert torch.equal(call(x)[0], blocks(x)[0])


@pytest.mark.parametrize("name", ["norm1.weight", "attention.qkv.weight", "mlp.0.bias", "attention.scale"])
def test_weights_of_another_shape_raise_the_error_of_pytorch(name):
    blocks, x = make_blocks(attention=LocalityAttention), torch.randn(3, 17, 32)
    call = native_call(blocks)
    weight = blocks[0].get_parameter(name)
    weight.data = torch.ones(5, *weight.shape[1:])
    for each in (blocks, call):
        with pytest.raises(RuntimeError, match=r"shape|size"):
            each(x)


def test_weights_on_another_device_raise_the_error_of_pytorch():
    blocks, x = make_blocks(), torch.randn(3, 17, 32)
    call = native_call(blocks)
    blocks[1].to("meta")
    for each in (blocks, call):
        with pytest.raises(RuntimeError, match="meta"):
            each(x)


@pytest.mark.parametrize("attention", ["plain", "LSA"])
@pytest.mark.parametrize("made", ["before", "inside"])
@pytest.mark.parametrize("default", ["device", "number format"])
def test_other_default_device_or_number_format_changes_nothing(default, made, attention):
    blocks, x, direction = make_blocks(attention=ATTENTIONS[attention]), torch.randn(3, 17, 32), torch.randn(3, 17, 32)
    call = native_call(blocks)
    expected = results(blocks, call, x, direction)
    try:
        torch.set_default_device("meta") if default == "device" else torch.set_default_dtype(torch.float64)
        if made == "inside":
            call = native_call(blocks)
        call(x)
        native.memory.POOL.free = {}
        found = results(blocks, call, x, direction)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_models_of_a_stack_skip_different_images(randomness):
    blocks, x, direction = make_blocks(drop_path=0.5), torch.randn(4, 8, 5, 32), torch.randn(4, 8, 5, 32)
    call = native_call(blocks)

    def stacked(each):
        return lambda x: (torch.vmap(lambda own: each(own)[0], randomness=randomness)(x), None)

    found, expected = results(blocks, stacked(call), x, direction), results(blocks, stacked(blocks), x, direction)
    assert error(found, [each.double() for each in expected]) < 1e-5


# Gradients in place


def with_gradients(blocks: Blocks) -> Blocks:
    for p in blocks.parameters():
        p.grad = torch.ones_like(p)
    return blocks


def backward(blocks, call, x, change=None):
    """The gradients of all weights after a step with gradients in place; `change` happens before the backward pass."""
    with native.gradients_in_place():
        loss = call(x)[0].square().sum()
    if change:
        change(blocks)
    loss.backward()
    return [p.grad for p in blocks.parameters()]


@pytest.mark.parametrize("of_tokens", [True, False], ids=["tokens need a gradient", "tokens need none"])
@pytest.mark.parametrize("late", [False, True], ids=["before", "after the forward pass"])
def test_hooks_of_weights_are_called_with_gradients_in_place(late, of_tokens):
    blocks, x, seen = with_gradients(make_blocks()), torch.randn(3, 17, 32, requires_grad=of_tokens), []

    def add_hooks(blocks):
        blocks[0].mlp[0].weight.register_hook(lambda gradient: gradient * 0)
        blocks[1].mlp[0].weight.register_post_accumulate_grad_hook(seen.append)

    if not late:
        add_hooks(blocks)
    backward(blocks, native_call(blocks), x, add_hooks if late else None)
    assert torch.equal(blocks[0].mlp[0].weight.grad, torch.ones(128, 32))
    assert len(seen) == 1 and seen[0] is blocks[1].mlp[0].weight and not torch.equal(seen[0].grad, torch.ones(128, 32))


def forget_gradients(blocks):
    for p in blocks.parameters():
        p.grad = None


def freeze(blocks):
    blocks[0].requires_grad_(False)


def another_gradient(blocks):
    blocks[0].norm1.weight.grad = torch.full((32,), 3.0)


@pytest.mark.parametrize("of_tokens", [True, False], ids=["tokens need a gradient", "tokens need none"])
@pytest.mark.parametrize("change", [None, forget_gradients, freeze, another_gradient])
def test_gradients_in_place_are_those_of_autograd(change, of_tokens):
    blocks, x = with_gradients(make_blocks()), torch.randn(3, 17, 32, requires_grad=of_tokens)
    other = with_gradients(copy.deepcopy(blocks))
    found, expected = backward(blocks, native_call(blocks), x, change), backward(other, other, x, change)
    assert error(found, [each.double() for each in expected]) < 1e-5


@pytest.mark.parametrize("case", ["transposed", "16 bits", "hooks of saved tensors", "computed weight"])
@pytest.mark.parametrize("of_tokens", [True, False], ids=["tokens need a gradient", "tokens need none"])
def test_gradients_to_which_the_kernel_cannot_add_are_left_to_autograd(of_tokens, case):
    blocks, x, weight = with_gradients(make_blocks()), torch.randn(3, 17, 32, requires_grad=of_tokens), None
    (exact,) = torch.autograd.grad(blocks(x)[0].square().sum(), (first := blocks[0].mlp[0].weight))
    call, hooks = native_call(blocks), nullcontext()
    if case == "transposed":
        first.grad = torch.ones(32, 128).t()
    elif case == "16 bits":
        first.grad_dtype = None
        first.grad = torch.ones(128, 32, dtype=torch.float16)
    elif case == "hooks of saved tensors":
        hooks = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved)
    else:
        weight = first.clone()
        weight.retain_grad()
        weight.grad = torch.ones_like(weight)
        blocks[0].mlp[0]._parameters["weight"] = weight
    with hooks:
        backward(blocks, call, x)
    torch.testing.assert_close(first.grad.float(), exact + 1, rtol=2e-3 if case == "16 bits" else 1e-5, atol=1e-4)


def test_weights_that_change_before_the_backward_pass_are_an_error():
    blocks, x = with_gradients(make_blocks()), torch.randn(3, 17, 32, requires_grad=True)

    @torch.no_grad()
    def change(blocks):
        blocks[0].mlp[0].weight.add_(1)

    with pytest.raises(RuntimeError, match="changed in place between the forward and the backward pass"):
        backward(blocks, native_call(blocks), x, change)


def train_with_an_inner_pass(blocks, call, first: int) -> list:
    """The gradients of the weights after three steps that find the gradient of the tokens first, from step `first` on."""
    inner, x = native.InnerPasses(), torch.randn(3, 17, 32, generator=torch.Generator().manual_seed(0))
    for step in range(3):
        with native.gradients_in_place(step > 0, inner):
            images = x.clone().requires_grad_()
            if step >= first:
                (gradient,) = torch.autograd.grad(call(images)[0].square().sum(), images)
                images = (images + 0.1 * gradient.sign()).detach().requires_grad_()
            loss = call(images)[0].square().sum()
        loss.backward()
    return [p.grad for p in blocks.parameters()]


def test_gradients_that_an_objective_computes_itself_stay_out_of_the_weights():
    blocks = make_blocks()
    other = copy.deepcopy(blocks)
    found, expected = (train_with_an_inner_pass(each, call, 0) for each, call in ((blocks, native_call(blocks)), (other, other)))
    assert error(found, [each.double() for each in expected]) < 1e-5
    with pytest.raises(RuntimeError, match=r"did not do so in the first step; .* kernel=rule"):
        train_with_an_inner_pass(blocks, native_call(blocks), 1)


@pytest.mark.parametrize("in_place", [False, True], ids=["by autograd", "in place"])
def test_memory_is_free_after_the_backward_pass_though_the_loss_is_kept(in_place):
    blocks, pool = with_gradients(make_blocks()), native.autograd.POOL
    call, x = native_call(blocks), torch.randn(3, 17, 32, requires_grad=True)
    for keep_graph in (False, True):
        with native.gradients_in_place(in_place):
            out = call(x)[0]
        before = len(pool.free)
        out.sum().backward(retain_graph=keep_graph)
        assert (len(pool.free) > before) is not keep_graph
        if keep_graph:
            expected = x.grad.clone()
            out.sum().backward()
            torch.testing.assert_close(x.grad - expected, expected / 2)


def test_branches_that_all_images_skip_have_gradients_of_zero():
    blocks, x = make_blocks(depth=1, drop_path=0.999), torch.randn(2, 17, 32, requires_grad=True)
    for parameter in blocks.parameters():
        parameter.grad = torch.full_like(parameter, -0.0)
    torch.manual_seed(0)
    for found in backward(blocks, native_call(blocks.train()), x):
        assert torch.equal(found, torch.zeros_like(found)) and not found.signbit().any()


def test_kernel_that_was_chosen_and_used_in_inference_mode_can_train():
    native.autograd.POOL.free.clear()
    blocks, x = make_blocks(), torch.randn(2, 5, 32)
    with torch.inference_mode():
        call = native_call(blocks)
        call(x)
    assert native.autograd.POOL.free and not any(memory.is_inference() for memory in native.autograd.POOL.free)
    call(x)[0].sum().backward()
    assert all(parameter.grad is not None for parameter in blocks.parameters())


def test_several_gradients_at_once_are_refused_in_words():
    blocks, x = make_blocks(), torch.randn(2, 5, 32, requires_grad=True)
    out, _ = native_call(blocks)(x)
    with pytest.raises(RuntimeError, match=r"one gradient at a time, and got several .* leave native_kernel\(\)"):
        torch.autograd.grad(out, x, torch.randn(3, 2, 5, 32), is_grads_batched=True)


# Training


def weights_of(folder) -> dict:
    return load_file(folder / WEIGHTS)


def largest_difference(a, b) -> float:
    a, b = weights_of(a), weights_of(b)
    return torch.stack([(a[name] - b[name]).abs().max() for name in a]).max().item()  # NaN if one is NaN


@pytest.mark.parametrize("steps", slow_after(1, [25, 100]))
def test_many_steps_equal_those_of_pytorch_up_to_rounding(steps, tmp_path):
    run = RUN.vary(steps=steps, lr=1e-3)
    assert run.ema and run.clip
    records = [fit(run, tmp_path / str(numerics.kernel), numerics=numerics) for numerics in (Numerics(), NATIVE)]
    assert [record.kernel for record in records] == ["rule", "native"]
    assert 0 < largest_difference(tmp_path / "None", tmp_path / "native") < 1e-3  # AdamW enlarges rounding at the start
    losses = [[point[1] for point in record.curve] for record in records]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert records[0].trace["batches"] == records[1].trace["batches"]


@pytest.mark.parametrize(
    "run",
    slow_after(2, [
        RUN.vary(block=partial(Block, dropout=0.1)),
        RUN.vary(drop_path=0.4, attention=LocalityAttention),
        RUN.vary(objective=MAE, unlabelled=True),
        RUN.vary(objective=partial(DINO, freeze=0.5), augment=augment.digit_crops(), clip=0.0, unlabelled=True),
        RUN.vary(objective=partial(SemiSupervised, weak=(), strong=augment.digits(), momentum=0.9, threshold=0.0, hard=0.0)),
        RUN.vary(layer_decay=0.7, weight_decay=0.1, ema=0.0),
        RUN.vary(reduction=partial(Merge, r=3)),
        RUN.vary(block=partial(Block, activation="swiglu")),
    ]),
    ids=["dropout", "stochastic depth", "MAE", "DINO", "semi-supervised", "layer decay", "merging", "SwiGLU"],
)
def test_objectives_and_options_train_alike(run, tmp_path):
    run = run.vary(steps=8)
    for numerics in (Numerics(), NATIVE):
        fit(run, tmp_path / str(numerics.kernel), numerics=numerics)
    assert largest_difference(tmp_path / "None", tmp_path / "native") < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"attention": LocalityAttention}, {"reduction": partial(Merge, r=3)}, {"block": partial(Block, activation="swiglu")}],
    ids=["LSA", "merging", "SwiGLU"],
)
def test_stack_equals_single_runs(options, tmp_path):
    runs = [RUN.vary(seed=seed, **options) for seed in range(3)]
    records = fit_stacked(runs, [tmp_path / f"stack{run.seed}" for run in runs], numerics=NATIVE)
    assert [record.stacked for record in records] == [3, 3, 3]
    for run in runs:
        fit(run, tmp_path / f"alone{run.seed}")
        assert largest_difference(tmp_path / f"stack{run.seed}", tmp_path / f"alone{run.seed}") < 1e-3


OWN_BLOCK = """
import torch
from smallvit import Block, Run, ablate
class SkippedAtRandom(Block):
    def forward(self, x, size=None, mask=None, places=None):
        return (x, size) if self.training and torch.rand(()) < 1 / 3 else super().forward(x, size, mask, places)
RUNS = ablate({"a": Run()}, references=False)
"""


@pytest.fixture
def layer_drop(tmp_path):
    """A run with a block that a third of all training batches skip as a whole."""
    (tmp_path / "layer_drop.py").write_text(OWN_BLOCK)
    block = load_recipe(tmp_path / "layer_drop.py").SkippedAtRandom
    return RUN.vary(block=block, ema=0.0, lr=1e-2, weight_decay=1.0)


def test_weights_without_a_gradient_stay_as_they_are_in_this_step(layer_drop, tmp_path):
    """As with PyTorch's AdamW: no weight decay and no momentum, also if the weights got gradients before."""
    for name, numerics in (("native", NATIVE), ("plain", Numerics())):
        fit(layer_drop, tmp_path / name, numerics=numerics)
    assert largest_difference(tmp_path / "native", tmp_path / "plain") < 1e-3


@pytest.mark.parametrize("stop", slow_after(1, [5, 1, 7]))
def test_interrupted_run_ends_with_the_same_bits(stop, layer_drop, tmp_path, monkeypatch):
    run = layer_drop if stop == 7 else RUN
    fit(run, tmp_path / "whole", numerics=NATIVE)
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
    train_step = loop.Training.train_step

    def interrupted(training):
        if training.step == stop:
            raise KeyboardInterrupt
        train_step(training)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop.Training, "train_step", interrupted)
        fit(run, tmp_path / "resumed", numerics=NATIVE)
    fit(run, tmp_path / "resumed", numerics=NATIVE)
    assert largest_difference(tmp_path / "whole", tmp_path / "resumed") == 0


def test_native_and_compiled_are_refused_together():
    with pytest.raises(ValueError, match="native blocks and compiled; expected one or the other"):
        check_numerics(Numerics(kernel="native", compiled=True))


def test_evaluation_uses_the_kernel_only_if_it_predicts_the_same_classes(tmp_path, monkeypatch):
    run = RUN.vary(steps=4)
    agreeing = fit(run, tmp_path / "agreeing", numerics=NATIVE)
    monkeypatch.setattr(evaluation, "LOGIT_TOLERANCE", 0.0)
    differing = fit(run, tmp_path / "differing", numerics=NATIVE)
    plain = fit(run, tmp_path / "plain")
    assert [record.evaluated for record in (agreeing, differing, plain)] == ["native", "rule", "rule"]
    assert agreeing.correct == differing.correct
    monkeypatch.setattr(native.blocks, "MOST_TOKENS", 10)
    assert fit(run, tmp_path / "by PyTorch", numerics=NATIVE).evaluated == "rule"
    assert differing.test["nll"] == pytest.approx(agreeing.test["nll"], abs=1e-5)


# AdamW with a few large tensors


def optimizers(model: nn.Module):
    """AdamW for the matrices and the other parameters of a model, with different decay."""
    groups = [[p for p in model.parameters() if (p.ndim > 1) == matrices] for matrices in (True, False)]
    for group in groups:
        lay_in_a_row(group)
    decays = zip(groups, (0.1, 0.0))
    return torch.optim.AdamW([{"params": group, "weight_decay": decay} for group, decay in decays], lr=1e-2, fused=True)


@pytest.mark.parametrize("largest", [0.1, 1e3])
@pytest.mark.parametrize("case", ["all used", "one never used", "one used late", "one removed late", "one not used late"])
def test_flat_optimizer_takes_the_steps_of_adamw(case, largest):
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(5, 3))]
    models.append(copy.deepcopy(models[0]))
    plain, joined = map(optimizers, models)
    flat = None
    for step in range(6):
        x = torch.randn(8, 5)
        with_third = {"all used": True, "one never used": False, "one used late": step >= 3, "one removed late": True}
        with_third = with_third.get(case, step < 3)
        for model, optimizer in zip(models, (plain, flat or joined)):
            optimizer.zero_grad()
            out = model[1](model[0](x)) + (model[2](x) if with_third else 0)
            out.square().mean().backward()
            if case == "one removed late" and step >= 3:
                model[2].bias.grad = None
        for group in (*plain.param_groups, *joined.param_groups):
            group["lr"] = 1e-2 / (step + 1)
        nn.utils.clip_grad_norm_(models[0].parameters(), largest)
        plain.step()
        if flat is not None and not flat.complete():
            flat.separate()
            flat = None
        flat.clip(largest) if flat else nn.utils.clip_grad_norm_(models[1].parameters(), largest)
        (flat or joined).step()
        if flat is None and not (case.endswith("late") and step >= 3):
            flat = FlatAdamW(joined)
            assert len(flat.flat_parameters) >= 2
        for a, b in zip(*(model.parameters() for model in models)):
            assert torch.allclose(a, b, atol=1e-7)
    states = [optimizer.state_dict()["state"] for optimizer in (plain, joined)]
    assert states[0].keys() == states[1].keys()
    for index, state in states[0].items():
        assert all(torch.allclose(state[name], states[1][index][name], atol=1e-7) for name in state)


def test_reference_models_without_blocks_are_measured_as_without_the_kernel(tmp_path):
    pixels = Run(model=Pixels, labels=50, val=20, steps=0, evaluators=(linear_probe,))
    records = [fit(pixels, tmp_path / str(index), numerics=numerics) for index, numerics in enumerate((Numerics(), NATIVE))]
    assert records[0].test == records[1].test
