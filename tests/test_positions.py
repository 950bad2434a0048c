"""Positions: the contract of all, the formulas of the fixed ones, parity with timm and lightly, and other grids."""

import inspect
import math
from functools import partial
from itertools import product
from math import cos, sin

import pytest
import torch
from lightly.models.utils import get_2d_sine_cosine_positional_embedding
from timm.layers import resample_abs_pos_embed
from timm.layers.pos_embed_sincos import build_sincos2d_pos_embed
from torch import nn
from toys import assert_close, default_dtype, option_id, slow_after

from smallvit import (
    Learned,
    PatchEmbed,
    Resized,
    Run,
    ShiftedPatchEmbed,
    SinCos1d,
    SinCos2d,
    ViT,
    describe,
    fingerprint,
    initialize,
    positions,
    rebuild,
)

every = pytest.mark.parametrize("make", [Learned, partial(Learned, on_prefix=False), SinCos2d, SinCos1d], ids=option_id)
PAPER = partial(SinCos2d, temperature=None, centered=False, amplitude=1.0)
D = 8


def added(module, grid, prefix, b=1, dtype=None):
    """What a position module adds to the tokens of an image."""
    return module(torch.zeros(b, prefix + grid[0] * grid[1], module.table.shape[1], dtype=dtype or module.table.dtype), grid)


# The contract


def test_every_class_is_tested():
    found = {c.__name__ for c in vars(positions).values() if inspect.isclass(c) and issubclass(c, nn.Module)}
    assert found == {"Learned", "FixedTable", "SinCos1d", "SinCos2d", "PEG"}  # PEG, which depends on the image, has its own file


@every
@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_each_token_gets_its_own_position_on_any_grid(make, prefix):
    module = make(D, (3, 5), prefix)
    for grid in ((3, 5), (5, 3), (6, 10), (2, 2), (1, 1)):
        position = added(module, grid, prefix, b=2)
        assert position.shape == (2, prefix + grid[0] * grid[1], D)
        assert torch.equal(position[0], position[1])
        assert len(position[0, prefix:].unique(dim=0)) == grid[0] * grid[1]
        x = torch.randn(2, prefix + grid[0] * grid[1], D)
        assert torch.equal(module(x, grid), x + position)


@every
def test_prefix_positions_are_equal_on_every_grid(make):
    module = make(D, (3, 5), 2)
    for grid in ((3, 5), (6, 10), (2, 7)):
        prefix = added(module, grid, 2)[0, :2]
        assert torch.equal(prefix, module.table[:2] if make is Learned else torch.zeros(2, D))


@every
def test_wrong_number_of_tokens_is_refused(make):
    module = make(D, (3, 5), 2)
    for n in (15 + 3, 15 - 1, 2):
        with pytest.raises(ValueError, match=rf"got {n} tokens; expected 2 prefix tokens and a grid of 3 x 5"):
            module(torch.zeros(1, n, D), (3, 5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@every
def test_half_precision_stays_half(make, dtype):
    module = make(D, (3, 5), 1).to(dtype)
    for grid in ((3, 5), (4, 4)):
        position = added(module, grid, 1, dtype=dtype)
        assert position.dtype == dtype and position.isfinite().all()


@pytest.mark.parametrize("make", [SinCos1d, SinCos2d])
def test_fixed_tables_are_exact_if_they_are_made_while_half_precision_is_the_default(make):
    expected = make(D, (3, 5), 1).table
    with default_dtype(torch.bfloat16):
        module = make(D, (3, 5), 1)
    assert torch.equal(module.table, expected) and module.table.dtype == torch.float32


@pytest.mark.parametrize("make", [SinCos1d, SinCos2d])
def test_fixed_tables_survive_half_precision(make):
    model = ViT((8, 8), 1, 5, tokenizer=partial(PatchEmbed, patch=2), position=make, dim=16, depth=1, heads=2)
    module, table = model.position, model.position.table.clone()
    model.bfloat16()
    assert model(torch.rand(2, 1, 8, 8).bfloat16()).dtype == torch.bfloat16
    model.float()
    assert torch.equal(module.table, table)
    with torch.autocast("cpu", torch.bfloat16):
        assert added(module, (4, 4), 1, dtype=torch.bfloat16).dtype == torch.float32
    assert module.double().table.dtype == torch.float64


# Learned


def test_learned_positions_train_on_any_grid_and_fixed_ones_are_not_saved():
    for grid in ((3, 5), (4, 4)):
        module = Learned(D, (3, 5), 1)
        added(module, grid, 1).square().sum().backward()
        assert (module.table.grad != 0).all()
    for fixed in (SinCos1d, SinCos2d):
        assert not list(fixed(D, (3, 5), 1).parameters()) and not fixed(D, (3, 5), 1).state_dict()


def test_learned_positions_start_with_the_given_spread():
    assert abs(Learned(64, (8, 8), 1).table.std() - 1) < 0.05
    assert abs(Learned(64, (8, 8), 1, std=0.2).table.std() - 0.2) < 0.01


@pytest.mark.parametrize("dim", [6, 16, 24])
def test_more_prefix_tokens_change_no_shared_position(dim):
    def table(prefix):
        torch.manual_seed(0)
        return Learned(dim, (2, 3), prefix).table

    for prefix in (2, 4):
        assert torch.equal(table(prefix)[:1], table(1)[:1]) and torch.equal(table(prefix)[prefix:], table(1)[1:])


# Fixed


def sincos2d(grid, dim, base):
    """The formula of MAE, number by number."""
    table = torch.zeros(grid[0] * grid[1], dim, dtype=torch.float64)
    for row, column, k in product(range(grid[0]), range(grid[1]), range(dim // 4)):
        x, y = (index * base ** (-4 * k / dim) for index in (column, row))
        for quarter, value in enumerate((sin(x), cos(x), sin(y), cos(y))):
            table[row * grid[1] + column, quarter * dim // 4 + k] = value
    return table


def sincos1d(grid, dim, base):
    """The formula of Vaswani et al. 2017, number by number."""
    table = torch.zeros(grid[0] * grid[1], dim, dtype=torch.float64)
    for index, k in product(range(grid[0] * grid[1]), range(dim // 2)):
        table[index, 2 * k] = sin(index / base ** (2 * k / dim))
        table[index, 2 * k + 1] = cos(index / base ** (2 * k / dim))
    return table


@pytest.mark.parametrize("dim", [4, 16, 64])
@pytest.mark.parametrize("grid", [(1, 1), (3, 3), (2, 5), (7, 4)])
@pytest.mark.parametrize("temperature", [None, 10])
@pytest.mark.parametrize(("make", "formula"), [(SinCos2d, sincos2d), (SinCos1d, sincos1d)])
def test_fixed_positions_follow_their_formula(make, formula, temperature, grid, dim):
    expected = formula(grid, dim, temperature or 10_000).float()
    make = partial(PAPER, temperature=temperature) if make is SinCos2d else partial(make, temperature=temperature)
    assert torch.equal(added(make(dim, grid, 0), grid, 0)[0], expected)
    assert make.func is SinCos1d or expected.square().mean().item() == pytest.approx(0.5)


@pytest.mark.parametrize("side", [2, 7, 14])
def test_sincos2d_equals_mae_in_lightly(side):
    theirs = torch.from_numpy(get_2d_sine_cosine_positional_embedding(32, side, cls_token=True)).float()
    assert (added(PAPER(32, (side, side), 1), (side, side), 1)[0] - theirs).abs().max() < 2e-6


@pytest.mark.parametrize("grid", [(7, 7), (3, 6)])
@pytest.mark.parametrize("temperature", [10_000, 20])
def test_sincos2d_equals_timm_after_the_documented_reordering(grid, temperature):
    ours = added(PAPER(32, grid, 0, temperature=temperature), grid, 0)[0]
    sin_x, cos_x, sin_y, cos_y = ours.chunk(4, dim=1)
    for interleaved, halves in ((True, (sin_y, cos_y, sin_x, cos_x)), (False, (sin_y, sin_x, cos_y, cos_x))):
        theirs = build_sincos2d_pos_embed(grid, 32, temperature=temperature, interleave_sin_cos=interleaved)
        assert (torch.cat(halves, dim=1) - theirs).abs().max() < 2e-6


def test_options_of_2d_sines():
    grid = (3, 6)
    plain, centered, unit, loud = (
        SinCos2d(64, grid, 0, **dict(temperature="grid", centered=False, amplitude=1.0) | options).table.double()
        for options in ({}, {"centered": True}, {"amplitude": "unit"}, {"amplitude": 3})
    )
    stretched = [[math.pi * place * 6 ** (-k / 16) for k in range(16)] for place in range(6)]
    for token in range(18):
        row, column = divmod(token, 6)
        expected = [f(angle) for place in (column, row) for f in (sin, cos) for angle in stretched[place]]
        assert torch.allclose(plain[token], torch.tensor(expected).double(), atol=1e-5)
    assert torch.allclose(centered, plain - plain.mean(0), atol=1e-6) and torch.allclose(loud, 3 * plain)
    assert (unit - unit.mean(0)).square().mean().item() == pytest.approx(1, abs=1e-5)
    default = SinCos2d(64, grid, 0).table
    assert default.mean(0).abs().max() < 1e-5 and default.square().mean().item() == pytest.approx(1, abs=1e-5)
    x = torch.randn(1, 18, 64)
    assert torch.equal(SinCos2d(64, grid, 0, amplitude=0)(x, grid), x)
    assert torch.linalg.matrix_rank(SinCos2d(64, grid, 0, temperature=1, centered=False).table) == 4
    assert (SinCos2d(64, (1, 1), 0).table == 0).all()


@pytest.mark.parametrize(("side", "dim", "shares"), [(4, 64, {10_000: 0.08, 10: 0.24}), (7, 64, {10_000: 0.14, 7: 0.54}), (14, 192, {20: 0.58})])
def test_share_of_the_sines_that_varies_over_the_grid(side, dim, shares):
    for temperature, share in shares.items():
        table = PAPER(dim, (side, side), 0, temperature=temperature).table
        assert ((table - table.mean(0)).square().mean() / table.square().mean()).item() == pytest.approx(share, abs=0.006)


def test_products_of_2d_sines_depend_on_the_offset_alone():
    table = PAPER(32, (4, 5), 0, temperature=10).table.double()
    products = (table @ table.T).reshape(4, 5, 4, 5)
    assert torch.allclose(products[1:, 1:, 1:, 1:], products[:-1, :-1, :-1, :-1], atol=1e-5)


def test_published_sines_keep_the_fingerprints_of_old_runs():
    old = {"call": "smallvit.positions.SinCos2d", "temperature": None}
    run = describe(Run(model=partial(ViT, position=SinCos2d)))
    assert run["model"]["position"]["temperature"] == "grid"
    run["model"]["position"] = old
    for temperature in (None, 10_000, 10_000.0):
        assert fingerprint(Run(model=partial(ViT, position=partial(PAPER, temperature=temperature)))) == fingerprint(rebuild(run))
    assert torch.equal(rebuild(old)(32, (4, 4), 0).table, PAPER(32, (4, 4), 0).table)


@pytest.mark.parametrize(
    ("tokenizer", "dim", "std"),
    [
        (partial(PatchEmbed, patch=4), 64, 0.63),
        (partial(PatchEmbed, patch=4), 192, 0.39),
        (partial(PatchEmbed, patch=7), 64, 0.93),
        (partial(PatchEmbed, patch=4, kernel=8), 64, 1.0),
        (partial(ShiftedPatchEmbed, patch=4), 64, 1.05),
        (partial(Resized, size=56, tokenizer=partial(PatchEmbed, patch=8)), 64, 1.0),
    ],
)
def test_std_of_a_patch_is_that_of_the_patch_tokens(tokenizer, dim, std):
    options = dict(dim=dim, heads=1, depth=0, tokenizer=tokenizer)
    one, patches = (initialize(ViT((28, 28), 1, 3, position=partial(Learned, std=std), **options), 0) for std in (1.0, "patch"))
    assert torch.allclose(patches.position.table, patches.patch_std() * one.position.table)
    assert patches.patch_std() == pytest.approx(std, abs=0.006)
    if isinstance(patches.tokenizer, PatchEmbed):
        tokens = patches.tokenizer(torch.randn(64, 1, 28, 28))
        assert tokens.std().item() == pytest.approx(patches.patch_std(), rel=0.1)


# Another grid


@pytest.mark.parametrize("own", [(4, 4), (3, 6)])
@pytest.mark.parametrize("grid", [(8, 8), (7, 5), (2, 3), (6, 3), (2, 9), (1, 1)])
@pytest.mark.parametrize(("prefix", "on_prefix"), [(0, True), (1, True), (3, True), (3, False)])
def test_resampling_equals_timm(own, grid, prefix, on_prefix):
    module = Learned(D, own, prefix, on_prefix=on_prefix)
    extra = prefix if on_prefix else 0
    theirs = resample_abs_pos_embed(module.table[None], grid, old_size=own, num_prefix_tokens=extra)
    assert (added(module, grid, prefix)[:, prefix - extra :] - theirs).abs().max() <= 1e-10


def test_resampling_in_float64_is_computed_in_float64():
    table = torch.randn(13, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: positions.resample(t, (3, 4), (2, 5)), table)
    assert positions.resample(table, (3, 4), (2, 5)).dtype == torch.float64


def test_own_grid_is_exact_and_an_equal_count_in_another_shape_is_resampled():
    module = Learned(D, (3, 6), 1)
    assert torch.equal(added(module, (3, 6), 1)[0], module.table)
    assert not torch.equal(added(module, (6, 3), 1)[0], module.table)


@pytest.mark.parametrize("make", slow_after(1, [Learned, partial(Learned, on_prefix=False), SinCos2d, SinCos1d]), ids=option_id)
def test_exported_model_takes_images_of_any_size(make):
    model = ViT((8, 8), 1, 3, tokenizer=partial(PatchEmbed, patch=4), dim=8, depth=1, heads=2, position=make).eval()
    sides = {axis: 4 * torch.export.Dim(f"side{axis}", min=1, max=9) for axis in (2, 3)}
    program = torch.export.export(model, (torch.rand(2, 1, 12, 16),), dynamic_shapes=({0: torch.export.Dim("batch"), **sides},))
    for size in ((8, 8), (8, 16), (12, 8), (20, 24)):
        images = torch.rand(3, 1, *size)
        assert_close(program.module()(images), model(images), 1e-6)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*is deprecated")
@pytest.mark.parametrize("make", slow_after(2, [Learned, SinCos2d, partial(Learned, on_prefix=False), SinCos1d]), ids=option_id)
def test_traced_model_computes_the_same_or_stops_for_images_of_another_size(make):
    model = ViT((8, 8), 1, 3, tokenizer=partial(PatchEmbed, patch=4), dim=8, depth=1, heads=2, position=make).eval()
    traced, images = torch.jit.trace(model, torch.rand(2, 1, 8, 8)), torch.rand(2, 1, 12, 16)
    try:
        found = traced(images)
    except RuntimeError:
        return
    assert_close(found, model(images), 1e-6)


def test_resampling_keeps_a_constant_and_the_order_of_a_slope():
    module = Learned(2, (4, 5), 0)
    with torch.no_grad():
        module.table[:, 0] = 0.7
        module.table[:, 1] = torch.arange(5.0).repeat(4)
    table = added(module, (8, 11), 0)[0].reshape(8, 11, 2)
    assert (table[..., 0] - 0.7).abs().max() < 1e-6
    assert (table[:, 1:, 1] > table[:, :-1, 1]).all()
    assert (table[1:] - table[:-1]).abs().max() < 1e-6


# Bad input


@pytest.mark.parametrize(
    ("wrong", "key_words"),
    [
        (lambda: SinCos2d(10, (2, 2), 0), "width 10 is not divisible by 4.* use 12"),
        (lambda: SinCos1d(7, (2, 2), 0), "width 7 is odd.* use 8"),
        (lambda: SinCos1d(8, (2, 2), 0, temperature=0.5), r"temperature is 0\.5; expected 1 or more"),
        (lambda: SinCos2d(8, (2, 2), 0, temperature=0.5), r"temperature is 0\.5; expected 1 or more"),
        (lambda: SinCos2d(8, (2, 2), 0, temperature="image"), "temperature is 'image'; expected a number or 'grid'"),
        (lambda: SinCos2d(8, (2, 2), 0, amplitude="one"), "amplitude is 'one'; expected a number or 'unit'"),
        (lambda: Learned(8, (2, 2), 0, std="patches"), "std is 'patches'; expected a number or 'patch'"),
    ],
)
def test_bad_input_is_refused(wrong, key_words):
    with pytest.raises(ValueError, match=key_words):
        wrong()
