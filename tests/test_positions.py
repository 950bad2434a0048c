import inspect
from functools import partial
from itertools import product
from math import cos, sin

import pytest
import torch
from lightly.models.utils import get_2d_sine_cosine_positional_embedding
from timm.layers import resample_abs_pos_embed
from timm.layers.pos_embed_sincos import build_sincos2d_pos_embed
from torch import nn

from smallvit import Learned, SinCos1d, SinCos2d, positions

EVERY = [Learned, partial(Learned, on_prefix=False), SinCos2d, SinCos1d]
every = pytest.mark.parametrize("make", EVERY, ids=["Learned", "Learned(on_prefix=False)", "SinCos2d", "SinCos1d"])
D = 8


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def added(module, grid, prefix, b=1):
    """What a position adds to the tokens of an image."""
    return module(torch.zeros(b, prefix + grid[0] * grid[1], module.table.shape[1], dtype=module.table.dtype), grid)


# The contract


def test_every_class_is_held_to_the_contract():
    found = {c.__name__ for c in vars(positions).values() if inspect.isclass(c) and issubclass(c, nn.Module)}
    assert found == {"Learned", "SinCos1d", "SinCos2d"}


@every
@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_each_token_gets_its_own_place_on_any_grid(make, prefix):
    module = make(D, (3, 5), prefix)
    for grid in ((3, 5), (5, 3), (6, 10), (2, 2), (1, 1)):
        place = added(module, grid, prefix, b=2)
        assert place.shape == (2, prefix + grid[0] * grid[1], D)
        assert torch.equal(place[0], place[1])
        assert len(place[0, prefix:].unique(dim=0)) == grid[0] * grid[1]
        x = torch.randn(2, prefix + grid[0] * grid[1], D)
        assert torch.equal(module(x, grid), x + place)


@every
def test_the_prefix_is_the_same_on_every_grid(make):
    module = make(D, (3, 5), 2)
    for grid in ((3, 5), (6, 10), (2, 7)):
        prefix = added(module, grid, 2)[0, :2]
        assert torch.equal(prefix, module.table[:2] if make is Learned else torch.zeros(2, D))


@every
def test_tokens_that_do_not_fill_the_grid_are_an_error(make):
    module = make(D, (3, 5), 2)
    for n in (15 + 3, 15 - 1, 2):
        with pytest.raises(ValueError, match=rf"got {n} tokens; expected 2 prefix tokens and a grid of 3 x 5"):
            module(torch.zeros(1, n, D), (3, 5))


# Learned


def test_learned_positions_learn_on_any_grid_and_the_fixed_ones_are_not_saved():
    for grid in ((3, 5), (4, 4)):
        module = Learned(D, (3, 5), 1)
        added(module, grid, 1).square().sum().backward()
        assert (module.table.grad != 0).all()
    for fixed in (SinCos1d, SinCos2d):
        assert not list(fixed(D, (3, 5), 1).parameters())
        assert not fixed(D, (3, 5), 1).state_dict()


def test_learned_positions_start_with_the_given_spread():
    assert abs(Learned(64, (8, 8), 1).table.std() - 1) < 0.05
    assert abs(Learned(64, (8, 8), 1, std=0.2).table.std() - 0.2) < 0.01


# Fixed


@pytest.mark.parametrize("dim", [4, 16, 64])
@pytest.mark.parametrize("grid", [(1, 1), (3, 3), (2, 5), (7, 4)])
@pytest.mark.parametrize("temperature", [None, 10])
def test_sincos2d_tells_column_then_row(dim, grid, temperature):
    expected = torch.zeros(grid[0] * grid[1], dim, dtype=torch.float64)
    for row, column, k in product(range(grid[0]), range(grid[1]), range(dim // 4)):
        frequency = (temperature or 10_000) ** (-4 * k / dim)
        for quarter, value in enumerate(
            (sin(column * frequency), cos(column * frequency), sin(row * frequency), cos(row * frequency))
        ):
            expected[row * grid[1] + column, quarter * dim // 4 + k] = value
    assert torch.equal(added(SinCos2d(dim, grid, 0, temperature=temperature), grid, 0)[0], expected.float())


@pytest.mark.parametrize("dim", [4, 16, 64])
@pytest.mark.parametrize("grid", [(1, 1), (3, 3), (2, 5), (7, 4)])
@pytest.mark.parametrize("temperature", [None, 10])
def test_sincos1d_is_that_of_the_first_transformer(dim, grid, temperature):
    expected = torch.zeros(grid[0] * grid[1], dim, dtype=torch.float64)
    for place, k in product(range(grid[0] * grid[1]), range(dim // 2)):
        expected[place, 2 * k] = sin(place / (temperature or 10_000) ** (2 * k / dim))
        expected[place, 2 * k + 1] = cos(place / (temperature or 10_000) ** (2 * k / dim))
    assert torch.equal(added(SinCos1d(dim, grid, 0, temperature=temperature), grid, 0)[0], expected.float())


@pytest.mark.parametrize("side", [2, 7, 14])
def test_sincos2d_equals_mae_as_lightly_has_it(side):
    theirs = torch.from_numpy(get_2d_sine_cosine_positional_embedding(32, side, cls_token=True)).float()
    assert (added(SinCos2d(32, (side, side), 1), (side, side), 1)[0] - theirs).abs().max() < 2e-6


@pytest.mark.parametrize("grid", [(7, 7), (3, 6)])
@pytest.mark.parametrize("temperature", [10_000, 20])
def test_sincos2d_equals_timm_after_the_documented_reorderings(grid, temperature):
    ours = added(SinCos2d(32, grid, 0, temperature=temperature), grid, 0)[0]
    sin_x, cos_x, sin_y, cos_y = ours.chunk(4, dim=1)
    for interleaved, halves in ((True, (sin_y, cos_y, sin_x, cos_x)), (False, (sin_y, sin_x, cos_y, cos_x))):
        theirs = build_sincos2d_pos_embed(grid, 32, temperature=temperature, interleave_sin_cos=interleaved)
        assert (torch.cat(halves, dim=1) - theirs).abs().max() < 2e-6


# Another grid


@pytest.mark.parametrize("own", [(4, 4), (3, 6)])
@pytest.mark.parametrize("grid", [(8, 8), (7, 5), (2, 3), (6, 3), (2, 9), (1, 1)])
@pytest.mark.parametrize(("prefix", "on_prefix"), [(0, True), (1, True), (3, True), (3, False)])
def test_resampling_is_timms(own, grid, prefix, on_prefix):
    module = Learned(D, own, prefix, on_prefix=on_prefix).double()
    extra = prefix if on_prefix else 0
    theirs = resample_abs_pos_embed(module.table[None], grid, old_size=own, num_prefix_tokens=extra)
    assert (added(module, grid, prefix)[:, prefix - extra :] - theirs).abs().max() <= 1e-10


def test_the_own_grid_is_exact_and_the_same_count_in_another_shape_is_not():
    module = Learned(D, (3, 6), 1)
    assert torch.equal(added(module, (3, 6), 1)[0], module.table)
    assert not torch.equal(added(module, (6, 3), 1)[0], module.table)


def test_a_constant_field_stays_constant_and_a_slope_keeps_its_order():
    module = Learned(2, (4, 5), 0)
    with torch.no_grad():
        module.table[:, 0] = 0.7
        module.table[:, 1] = torch.arange(5.0).repeat(4)
    table = added(module, (8, 11), 0)[0].reshape(8, 11, 2)
    assert (table[..., 0] - 0.7).abs().max() < 1e-6
    assert (table[:, 1:, 1] > table[:, :-1, 1]).all()
    assert (table[1:] - table[:-1]).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@every
def test_half_precision_stays_half(make, dtype):
    module = make(D, (3, 5), 1).to(dtype)
    for grid in ((3, 5), (4, 4)):
        place = added(module, grid, 1)
        assert place.dtype == dtype and place.isfinite().all()


# Bad input


def test_a_width_that_cannot_hold_the_sines_is_named():
    with pytest.raises(ValueError, match=r"width 10 is not divisible by 4, .*; take 12"):
        SinCos2d(10, (2, 2), 0)
    with pytest.raises(ValueError, match="width 7 is odd; sine and cosine come in pairs, take 8"):
        SinCos1d(7, (2, 2), 0)


@pytest.mark.parametrize("make", [SinCos1d, SinCos2d])
def test_a_temperature_that_turns_the_waves_round_is_refused(make):
    with pytest.raises(ValueError, match=r"temperature is 0\.5; expected 1 or more"):
        make(8, (2, 2), 0, temperature=0.5)
