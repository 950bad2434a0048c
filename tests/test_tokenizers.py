"""Tokenizers: the contract of all, the equations entry by entry, initial weights and error messages."""

import inspect
import re
import warnings
from functools import partial
from itertools import product
from math import ceil

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn
from toys import assert_close, option_id

from smallvit import ConvStem, ConvTokenizer, PatchEmbed, Resized, ShiftedPatchEmbed, tokenizers

EVERY = [
    partial(PatchEmbed, patch=4),
    partial(PatchEmbed, patch=4, kernel=8),
    partial(PatchEmbed, patch=4, linear=True),
    partial(ShiftedPatchEmbed, patch=4),
    partial(ShiftedPatchEmbed, patch=4, shift="1px cardinal"),
    partial(ShiftedPatchEmbed, patch=4, shift="none", norm=False),
    partial(ConvStem, layers=2),
    ConvTokenizer,
]


every = pytest.mark.parametrize("make", EVERY, ids=option_id)
odd_and_even = pytest.mark.parametrize("patch", [2, 3, 4, 7])
D = 6


def randomized(make, image, channels=2):
    """A tokenizer whose every parameter is drawn from N(0, 1)."""
    module = make(image, channels, D).double().requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_()
    return module


def images(image, channels=2, b=2):
    return torch.randn(b, channels, *image, dtype=torch.float64)


def diagonals(patch):
    """(down, right) in the authors' order: left-up, right-up, left-bottom, right-bottom crops of the padded image."""
    s = patch // 2
    return [(s, s), (s, -s), (-s, s), (-s, -s)]


def pixel(x, image, channel, row, column, fill=0.0):
    inside = 0 <= row < x.shape[2] and 0 <= column < x.shape[3]
    return float(x[image, channel, row, column]) if inside else fill


# The contract


def test_every_class_is_tested():
    own = [c for c in vars(tokenizers).values() if getattr(c, "__module__", "") == tokenizers.__name__]
    found = [c for c in own if inspect.isclass(c) and issubclass(c, nn.Module)]
    assert len(found) == 5 and {getattr(make, "func", make) for make in EVERY} == set(found) - {Resized}


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_resized_gives_the_tokens_of_the_interpolated_image(interpolation):
    inner = partial(PatchEmbed, patch=4)
    module = Resized((8, 12), 3, D, tokenizer=inner, size=16, interpolation=interpolation)
    for image in ((8, 12), (28, 28), (16, 16)):
        x = torch.randn(2, 3, *image)
        large = F.interpolate(x, size=(16, 16), mode=interpolation, antialias=True) if image != (16, 16) else x
        assert torch.equal(module(x), module.tokenizer(large)) and module.grid(image) == (4, 4)
    half = module.bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16 and half.isfinite().all()


@every
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_tokens_fill_the_grid_for_any_image_and_number_of_channels(make, channels):
    module = make((8, 8), channels, D)
    for image in ((8, 8), (12, 20), (24, 4)):
        rows, columns = module.grid(image)
        assert (rows, columns) == (image[0] // 4, image[1] // 4)
        assert module(torch.randn(3, channels, *image)).shape == (3, rows * columns, D)


@every
def test_tokens_are_in_row_major_order(make):
    module, x = randomized(make, (16, 32)), images((16, 32)).requires_grad_()
    rows, columns = module.grid((16, 32))
    tokens = module(x)
    for row, column in product(range(rows), range(columns)):
        (gradient,) = torch.autograd.grad(tokens[:, row * columns + column].square().sum(), x, retain_graph=True)
        influence = gradient.square().sum((0, 1)) / gradient.square().sum()
        down, right = (influence.sum(1) * torch.arange(16)).sum() / 4, (influence.sum(0) * torch.arange(32)).sum() / 4
        assert abs(down - row - 0.5) < 1
        assert abs(right - column - 0.5) < 1


@every
def test_images_of_a_batch_are_independent(make):
    module, x = randomized(make, (8, 8)), images((8, 8), b=3)
    assert_close(module(x), torch.cat([module(one) for one in x.split(1)]), 1e-12)


# PatchEmbed


@pytest.mark.parametrize(
    "make", [partial(PatchEmbed, patch=3, linear=True), *(partial(PatchEmbed, patch=3, kernel=k) for k in (3, 7))], ids=option_id
)
def test_patch_embed_maps_the_square_around_each_patch_linearly(make):
    """A kernel larger than the patch is centered on it; pixels outside the image are zero."""
    module, x = randomized(make, (6, 9)), images((6, 9))
    kernel = make.keywords.get("kernel", 3)
    expected, margin = torch.zeros(2, 6, D, dtype=torch.float64), (kernel - 3) // 2
    weight = module.proj.weight.tolist()
    for b, row, column, d in product(range(2), range(2), range(3), range(D)):
        expected[b, 3 * row + column, d] = module.proj.bias[d] + sum(
            weight[d][c][u][v] * pixel(x, b, c, 3 * row - margin + u, 3 * column - margin + v)
            for c, u, v in product(range(2), range(kernel), range(kernel))
        )
    assert_close(module(x), expected)


def test_linear_equals_the_convolution_with_the_same_weights():
    conv, linear = (randomized(partial(PatchEmbed, patch=4, linear=on), (8, 8)) for on in (False, True))
    linear.load_state_dict(conv.state_dict())
    x = images((8, 12))
    assert_close(conv(x), linear(x), 1e-12)


# ShiftedPatchEmbed: the copies


@odd_and_even
def test_shifted_copies_are_the_four_corner_crops_of_the_padded_image(patch):
    image = (2 * patch, 3 * patch)
    x, s, (h, w) = images(image, channels=3), patch // 2, image
    padded = F.pad(x, (s, s, s, s))
    crops = [padded[..., down : down + h, right : right + w] for down, right in ((0, 0), (0, 2 * s), (2 * s, 0), (2 * s, 2 * s))]
    shifted = ShiftedPatchEmbed(image, 3, D, patch=patch).shifted(x)
    assert torch.equal(shifted, torch.cat([x, *crops], dim=1))
    for index, crop in enumerate([x, *crops]):
        ours = F.unfold(shifted[:, 3 * index : 3 * index + 3], patch, stride=patch)
        assert torch.equal(ours, F.unfold(crop, patch, stride=patch))


@pytest.mark.parametrize(
    ("shift", "moves"), [("half-patch diagonal", diagonals(4)), ("1px cardinal", [(0, 1), (0, -1), (1, 0), (-1, 0)])]
)
def test_bright_pixel_appears_once_in_each_copy(shift, moves):
    dark = torch.zeros(1, 1, 8, 8)
    dark[0, 0, 3, 4] = 1
    copies = ShiftedPatchEmbed((8, 8), 1, D, patch=4, shift=shift).shifted(dark)[0]
    assert [tuple(copy.nonzero()[0].tolist()) for copy in copies] == [(3, 4)] + [(3 + down, 4 + right) for down, right in moves]
    assert torch.equal(copies.sum((1, 2)), torch.ones(5))


@pytest.mark.parametrize(("shift", "uncovered"), [("half-patch diagonal", 4 * (64 - 36)), ("1px cardinal", 4 * 8), ("none", 0)])
def test_uncovered_pixels_are_filled_with_pad(shift, uncovered):
    copies = ShiftedPatchEmbed((8, 8), 1, D, patch=4, shift=shift, pad=-0.5).shifted(torch.ones(1, 1, 8, 8))
    assert (copies == -0.5).sum() == uncovered
    assert ((copies == -0.5) | (copies == 1)).all()


# ShiftedPatchEmbed: the tokens


def spt_oracle(module, x, patch, moves, norm, pad=0.0):
    """Lee et al. 2021, section 4.1, value by value: gather, LayerNorm, map."""
    b, channels, h, w = x.shape
    weight, bias, out = module.proj.weight, module.proj.bias, []
    for image, row, column in product(range(b), range(h // patch), range(w // patch)):
        values = []
        for (down, right), channel in product([(0, 0), *moves], range(channels)):
            for p, q in product(range(patch), repeat=2):
                values.append(pixel(x, image, channel, row * patch + p - down, column * patch + q - right, pad))
        if norm:
            mean = sum(values) / len(values)
            std = (sum((v - mean) ** 2 for v in values) / len(values) + 1e-5) ** 0.5
            values = [(v - mean) / std * float(g) + float(o) for v, g, o in zip(values, module.norm.weight, module.norm.bias)]
        out.append(weight @ torch.tensor(values, dtype=torch.float64) + bias)
    return torch.stack(out).reshape(b, -1, len(bias))


@odd_and_even
@pytest.mark.parametrize("norm", [True, False])
def test_shifted_patch_embed_follows_the_paper(patch, norm):
    image = (2 * patch, patch)
    module, x = randomized(partial(ShiftedPatchEmbed, patch=patch, norm=norm, pad=0.25), image), images(image)
    assert_close(module(x), spt_oracle(module, x, patch, diagonals(patch), norm, pad=0.25))


@pytest.mark.parametrize(("shift", "moves"), [("1px cardinal", [(0, 1), (0, -1), (1, 0), (-1, 0)]), ("none", [])])
def test_other_shifts_follow_the_same_equations(shift, moves):
    module, x = randomized(partial(ShiftedPatchEmbed, patch=4, shift=shift), (8, 8)), images((8, 8))
    assert_close(module(x), spt_oracle(module, x, 4, moves, norm=True))


@odd_and_even
def test_without_layernorm_it_equals_a_convolution_with_the_composed_kernel(patch):
    image, s = (2 * patch, 3 * patch), patch // 2
    module, x = randomized(partial(ShiftedPatchEmbed, patch=patch, norm=False), image), images(image)
    weight = rearrange(module.proj.weight, "d (m c p q) -> m d c p q", m=5, p=patch, q=patch)
    kernel = torch.zeros(D, 2, patch + 2 * s, patch + 2 * s, dtype=torch.float64)
    for (down, right), part in zip([(0, 0), *diagonals(patch)], weight):
        kernel[:, :, s - down : s - down + patch, s - right : s - right + patch] += part
    convolved = F.conv2d(x, kernel, module.proj.bias, stride=patch, padding=s)
    assert_close(module(x), rearrange(convolved, "b d r c -> b (r c) d"))
    control = PatchEmbed(image, 2, D, patch=patch, kernel=patch + 2 * (patch // 2)).double()
    control.load_state_dict({"proj.weight": kernel, "proj.bias": module.proj.bias})
    assert_close(module(x), control(x))


def test_switched_off_it_equals_patch_embed():
    off = ShiftedPatchEmbed((8, 8), 3, D, patch=4, shift="none", norm=False)
    plain, linear = PatchEmbed((8, 8), 3, D, patch=4), PatchEmbed((8, 8), 3, D, patch=4, linear=True)
    for module in (plain, linear):
        module.load_state_dict({"proj.weight": off.proj.weight.reshape(D, 3, 4, 4), "proj.bias": off.proj.bias})
    x = torch.randn(2, 3, 12, 8)
    assert torch.equal(off(x), linear(x))
    assert_close(off(x), plain(x), 1e-6)


def test_channel_last_weights_of_the_authors_give_the_same_tokens_after_a_permutation():
    module, x = randomized(partial(ShiftedPatchEmbed, patch=4), (8, 8)), images((8, 8))
    weight, scale, offset = (
        rearrange(t, "... (c p q) -> ... (p q c)", c=10, p=4)
        for t in (module.proj.weight, module.norm.weight, module.norm.bias)
    )
    patches = rearrange(module.shifted(x), "b c (r p) (s q) -> b (r s) (p q c)", p=4, q=4)
    theirs = F.linear(F.layer_norm(patches, patches.shape[-1:], scale, offset), weight, module.proj.bias)
    assert_close(module(x), theirs)


@pytest.mark.parametrize(("patch", "more"), [(4, 37_344), (8, 149_376)])
def test_shifted_patch_embed_has_the_published_number_of_parameters(patch, more):
    shifted, plain = (cls((32, 32), 3, 192, patch=patch) for cls in (ShiftedPatchEmbed, PatchEmbed))
    assert sum(p.numel() for p in shifted.parameters()) - sum(p.numel() for p in plain.parameters()) == more


# Convolutional tokenizers


@pytest.mark.parametrize("kernel", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_conv_tokenizer_equals_the_layers_of_cct(kernel, layers):
    module = ConvTokenizer((28, 20), 3, D, kernel=kernel, layers=layers, hidden=5).double()
    stride, padding = max(1, kernel // 2 - 1), max(1, kernel // 2)
    composed = nn.Sequential()
    for conv in module.convs:
        layer = nn.Conv2d(conv.in_channels, conv.out_channels, kernel, stride, padding, bias=False).double()
        layer.load_state_dict(conv.state_dict())
        composed.extend([layer, nn.ReLU(), nn.MaxPool2d(3, 2, 1)])
    assert [conv.out_channels for conv in module.convs] == [5] * (layers - 1) + [D]
    for image in ((28, 20), (9, 30)):
        x = images(image, channels=3)
        expected = composed(x)
        assert module.grid(image) == tuple(expected.shape[-2:])
        assert_close(module(x), rearrange(expected, "b d r c -> b (r c) d"), atol=1e-12)


@pytest.mark.parametrize(("layers", "side", "tokens"), [(1, 32, 256), (1, 28, 196), (2, 28, 49)])
def test_conv_tokenizer_gives_as_many_tokens_as_cct(layers, side, tokens):
    module = ConvTokenizer((side, side), 1, D, kernel=3, layers=layers)
    assert module(torch.randn(1, 1, side, side)).shape == (1, tokens, D)


def test_conv_stem_halves_the_image_and_doubles_the_width():
    for layers in (1, 2, 3):
        module = ConvStem((28, 28), 3, 64, layers=layers)
        convs = [part for part in module.modules() if isinstance(part, nn.Conv2d)]
        assert [conv.out_channels for conv in convs] == [64 >> i for i in reversed(range(layers))] + [64]
        for h, w in ((28, 28), (13, 30), (1, 1)):
            cells = ceil(h / 2**layers), ceil(w / 2**layers)
            assert module.grid((h, w)) == cells
            assert module(torch.randn(1, 3, h, w)).shape == (1, cells[0] * cells[1], 64)


def test_conv_stem_equals_the_layers_of_its_paper():
    module, x = randomized(partial(ConvStem, layers=2), (8, 12)), images((8, 12))
    y = x
    for conv, norm in (module.layers[:2], module.layers[3:5]):
        y = F.conv2d(y, conv.weight, stride=2, padding=1)
        mean, variance = y.mean((1, 2, 3), keepdim=True), y.var((1, 2, 3), keepdim=True, correction=0)
        y = ((y - mean) / (variance + 1e-5).sqrt() * norm.weight[:, None, None] + norm.bias[:, None, None]).relu()
    tokens = torch.einsum("b c h w, d c -> b h w d", y, module.proj.weight[..., 0, 0]) + module.proj.bias
    assert_close(module(x), tokens.flatten(1, 2))


# Initial weights


@pytest.mark.parametrize("kernel", [4, 8])
def test_patch_embed_starts_xavier_uniform_as_a_linear_map(kernel):
    weight = PatchEmbed((8, 8), 3, 64, patch=4, kernel=kernel).proj.weight
    bound = (6 / (3 * kernel**2 + 64)) ** 0.5
    assert 0.97 * bound < weight.abs().max() <= bound


def test_convolutions_start_kaiming_normal():
    convs = ConvTokenizer((8, 8), 3, 64).convs
    assert all(abs(conv.weight.std() * (conv.in_channels * 9 / 2) ** 0.5 - 1) < 0.06 for conv in convs)
    stem = ConvStem((8, 8), 3, 64, layers=2).layers
    assert all(abs(conv.weight.std() * (conv.out_channels * 9 / 2) ** 0.5 - 1) < 0.06 for conv in (stem[0], stem[3]))


# Bad input


SPT, resized = partial(ShiftedPatchEmbed, patch=4), partial(Resized, (8, 12), 3, D, tokenizer=partial(PatchEmbed, patch=4))


@pytest.mark.parametrize(
    ("wrong", "key_words"),
    [
        (
            lambda: PatchEmbed((28, 28), 1, D, patch=5),
            "patches of 5 pixels do not tile an image of 28 x 28; patch sizes that fit this image: 1, 2, 4, 7, 14, 28; "
            "images that fit this patch: 25 x 25 or 30 x 30",
        ),
        (
            lambda: ShiftedPatchEmbed((24, 40), 1, D, patch=7),
            "patches of 7 .* 24 x 40; patch sizes that fit this image: 1, 2, 4, 8; images .* this patch: 21 x 35 or 28 x 42",
        ),
        (lambda: PatchEmbed((28, 28), 1, D, patch=50), "28 x 28; .*images that fit this patch: 50 x 50$"),
        (lambda: PatchEmbed((0, 28), 1, D, patch=4), "0 x 28; .*fit this image: none; images that fit this patch: 4 x 28$"),
        (lambda: PatchEmbed((28, 28), 1, D, patch=0), "patches of 0 pixels do not tile .* 1, 2, 4, 7, 14, 28$"),
        (lambda: PatchEmbed((28, 28), 1, D, patch=-4), "expected the patch plus|patches of -4 pixels do not tile"),
        (lambda: PatchEmbed((8, 8), 1, D, patch=4)(torch.randn(1, 1, 8, 9)), "patches of 4 .* do not tile an image of 8 x 9"),
        (lambda: SPT((8, 8), 1, D)(torch.randn(1, 1, 6, 8)), "patches of 4 pixels do not tile an image of 6 x 8"),
        (lambda: PatchEmbed((8, 8), 1, D, patch=4, kernel=7), "kernel is 7; .* 4, 6, ..."),
        (lambda: PatchEmbed((8, 8), 1, D, patch=4, kernel=2), "kernel is 2; .* the patch plus an even margin"),
        (lambda: PatchEmbed((8, 8), 1, D, patch=4, kernel=0), "kernel is 0"),
        (lambda: PatchEmbed((8, 8), 1, D, patch=4, kernel=8, linear=True), "without overlap; expected kernel=4, got 8"),
        (lambda: ShiftedPatchEmbed((8, 8), 1, D, patch=1), "half of a patch of 1 pixel .* patch >= 2, or shift='none'"),
        (lambda: SPT((8, 8), 1, D, shift="half"), "shift is 'half'; expected one of 'half-patch diagonal', '1px cardinal', 'none'"),
        (lambda: ConvStem((8, 8), 1, D, layers=0), "layers is 0; expected a whole number of at least 1"),
        (lambda: ConvStem((8, 8), 1, D, layers=2.0), "layers is 2.0; expected a whole number of at least 1"),
        (lambda: ConvTokenizer((8, 8), 1, D, kernel=0), "kernel 0, layers 2: expected both to be at least 1"),
        (lambda: ConvTokenizer((8, 8), 1, D, layers=True), "kernel 3, layers True: expected both to be at least 1"),
        (lambda: ConvTokenizer((8, 0), 1, D), "image 8 x 0 leaves no token after 2 layers of kernel 3"),
        (lambda: resized(size=16, interpolation="nearest"), "interpolation is 'nearest'; expected 'bicubic' or 'bilinear'"),
        (lambda: resized(size=0), "size is 0; expected"),
        (lambda: resized(size=16.0), "size is 16.0; expected a side in pixels, a whole number"),
        (lambda: resized(size=18), "patches of 4 pixels do not tile an image of 18 x 18"),
    ],
)
def test_bad_input_is_refused(wrong, key_words):
    with pytest.raises(ValueError, match=key_words):
        wrong()


@pytest.mark.parametrize("make", EVERY, ids=option_id)
def test_linear_layers_can_be_quantized(make):
    tokenizer, x = make((8, 8), 3, D).eval(), torch.randn(2, 3, 8, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        quantized = torch.ao.quantization.quantize_dynamic(tokenizer, {nn.Linear}, dtype=torch.qint8)
    torch.testing.assert_close(quantized(x), tokenizer(x), rtol=0, atol=0.1)


@pytest.mark.parametrize("make", [*EVERY, partial(Resized, tokenizer=EVERY[0], size=8)], ids=option_id)
def test_images_of_another_shape_or_data_type_are_explained(make):
    tokenizer, x = make((8, 8), 3, D), torch.randn(2, 3, 8, 8)
    for wrong in (x.to(torch.uint8).permute(0, 2, 3, 1), x.to(torch.uint8), x.double(), x[:, :1], x[0], x.permute(0, 2, 3, 1)):
        got = f"got {str(wrong.dtype)[6:]} images of shape {tuple(wrong.shape)}; "
        with pytest.raises(ValueError, match=re.escape(f"{got}expected normalized float32 pixels of shape (b, 3, h, w): ")):
            tokenizer(wrong)
    assert tokenizer.double()(x.double()).dtype == torch.float64


@pytest.mark.parametrize("shift", ["1px cardinal", "none"])
def test_patch_of_one_pixel_works_without_a_half_patch_shift(shift):
    assert ShiftedPatchEmbed((3, 3), 1, D, patch=1, shift=shift)(torch.randn(1, 1, 3, 3)).shape == (1, 9, D)
