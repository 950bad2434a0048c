"""MAE: the loss is that of the paper and of lightly, no hidden pixel reaches the encoder, and reconstructions are honest."""

import copy
import inspect
import itertools
import math
from functools import partial

import pytest
import timm
import torch
import torch.nn.functional as F
from lightly.models import utils
from lightly.models.modules import MaskedVisionTransformerTIMM
from lightly.models.modules.masked_vision_transformer_decoder_timm import MaskedVisionTransformerDecoderTIMM
from torch import nn
from toys import assert_close, option_id, pairwise, randomize, slow_after

from smallvit import tokenizers
from smallvit.attention import Attention, LocalityAttention
from smallvit.augment import Batch
from smallvit.objectives.mae import MAE, patchify, unpatchify
from smallvit.optim import decay_groups
from smallvit.pooling import ClassToken, MeanTokens, SequencePool
from smallvit.positions import Learned, SinCos1d, SinCos2d
from smallvit.pretrained import from_timm
from smallvit.pretrained.convert import rename
from smallvit.reduction import Merge, Prune
from smallvit.references import SmallCNN
from smallvit.tokenizers import ConvStem, ConvTokenizer, PatchEmbed, ShiftedPatchEmbed
from smallvit.vit import ViT

TINY = partial(ViT, (28, 28), 1, 5, dim=24, depth=2, heads=3, tokenizer=partial(PatchEmbed, patch=7))
SMALL = dict(decoder_dim=16, decoder_depth=1, decoder_heads=2)
TIMM_VIT = partial(timm.models.VisionTransformer, 28, 7, 3, 5, embed_dim=24, depth=2, num_heads=3)
LIGHTLY_ENCODER = partial(MaskedVisionTransformerTIMM, weight_initialization="skip", pos_embed_initialization="skip")
TOKENIZERS = {
    "patch": partial(PatchEmbed, patch=4),
    "patch, linear": partial(PatchEmbed, patch=7, linear=True),
    "wide kernel": partial(PatchEmbed, patch=4, kernel=8),
    "wider kernel": partial(PatchEmbed, patch=7, kernel=27),
    "SPT": partial(ShiftedPatchEmbed, patch=7),
    "SPT, cardinal": partial(ShiftedPatchEmbed, patch=4, shift="1px cardinal", norm=False),
    "SPT, off": partial(ShiftedPatchEmbed, patch=4, shift="none"),
    "stem": ConvStem,
    "stem, 2 layers": partial(ConvStem, layers=2),
    "CCT": ConvTokenizer,
    "CCT, 7x1": partial(ConvTokenizer, kernel=7, layers=1),
}
ONLY_OWN_PATCH = {"patch", "patch, linear", "SPT, off"}  # tokens that see no pixel of another patch


def make_batch(images):
    return Batch(images, torch.eye(5)[torch.arange(len(images)) % 5])


def random_images(model, b=3):
    return torch.randn(b, model.channels, *model.image)


def mask_of_patches(mae, index, images):
    """True at the pixels of patches with these indices, b 1 h w, computed one patch after another."""
    (h, w), (rows, columns) = images.shape[-2:], mae.grid(images)
    p, q = h // rows, w // columns
    mask = torch.zeros(len(images), 1, h, w, dtype=torch.bool)
    for image, patches in enumerate(index.tolist()):
        for patch in patches:
            r, s = divmod(patch, columns)
            mask[image, 0, r * p : (r + 1) * p, s * q : (s + 1) * q] = True
    return mask


# Patches


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("image, grid", [((28, 28), (7, 7)), ((24, 40), (3, 5)), ((28, 32), (4, 4)), ((6, 5), (1, 1))])
def test_patches_are_in_row_major_order_and_unpatchify_is_the_inverse(channels, image, grid):
    x = torch.randn(2, channels, *image)
    patches = patchify(x, grid)
    p, q = image[0] // grid[0], image[1] // grid[1]
    for index in range(grid[0] * grid[1]):
        r, s = divmod(index, grid[1])
        patch = x[:, :, r * p : (r + 1) * p, s * q : (s + 1) * q]
        assert torch.equal(patches[:, index], patch.permute(0, 2, 3, 1).flatten(1))
    assert patches.shape[1] == grid[0] * grid[1] and torch.equal(unpatchify(patches, grid, image), x)


def test_square_patches_are_those_of_lightly():
    x = torch.randn(2, 3, 28, 28)
    assert torch.equal(patchify(x, (4, 4)), utils.patchify(x, 7))
    assert torch.equal(unpatchify(patchify(x, (4, 4)), (4, 4), (28, 28)), utils.unpatchify(utils.patchify(x, 7), 7, 3))


# Which patches are hidden


@pytest.mark.parametrize(
    "ratio, patch, shown", [(0.75, 4, 12), (0.75, 7, 4), (0.6, 4, 19), (0.5, 7, 8), (0.9, 4, 4), (0.01, 4, 48)]
)
def test_every_image_hides_the_same_number_of_patches_at_random(ratio, patch, shown):
    mae, n = MAE(TINY(tokenizer=partial(PatchEmbed, patch=patch)), ratio=ratio, **SMALL), (28 // patch) ** 2
    images = random_images(mae.model, 64)
    visible, hidden = mae.hide(images)
    assert visible.shape == (64, shown) and hidden.shape == (64, n - shown)
    assert all(sorted(a + b) == list(range(n)) for a, b in zip(visible.tolist(), hidden.tolist()))
    assert (visible.diff() > 0).all() and (hidden.diff() > 0).all()
    assert len({tuple(row) for row in hidden.tolist()}) > 10 and not torch.equal(mae.hide(images)[0], visible)


def test_the_number_of_visible_patches_is_not_changed_by_rounding_errors():
    model = ViT((8, 20), 1, 5, dim=8, heads=2, tokenizer=partial(PatchEmbed, patch=4))
    assert int(10 * (1 - 0.9)) == 0
    assert MAE(model, ratio=0.9, **SMALL).hide(random_images(model))[0].shape[1] == 1


def test_every_patch_is_hidden_equally_often():
    mae = MAE(TINY(), **SMALL)
    share = torch.bincount(mae.hide(torch.zeros(4000, 1, 28, 28))[1].flatten(), minlength=16) / 4000
    assert (share - 0.75).abs().max() < 0.04


def test_only_the_seed_decides_which_patches_are_hidden():
    """Neither dropout nor another model changes them."""
    losses = []
    for seed in (3, 3, 4):
        torch.manual_seed(0)
        mae = MAE(TINY(), **SMALL)
        images = random_images(mae.model)
        torch.manual_seed(seed)
        losses.append(mae(make_batch(images), 0.0)["loss"])
    assert torch.equal(losses[0], losses[1]) and not torch.equal(losses[0], losses[2])
    hidden = []
    for options in (dict(), dict(dropout=0.5, drop_path=0.5, depth=3)):
        mae = MAE(TINY(**options), **SMALL)
        mae.decoder.register_forward_hook(lambda decoder, inputs, output: hidden.append(inputs[2]))
        torch.manual_seed(3)
        mae(make_batch(images), 0.0)
    assert torch.equal(*hidden)


# The loss


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_loss_is_the_squared_error_of_hidden_patches(normalize, channels):
    model = ViT((8, 12), channels, 5, dim=8, depth=1, heads=2, tokenizer=partial(PatchEmbed, patch=4)).double()
    mae = MAE(model, ratio=0.5, normalize=normalize, **SMALL).double()
    images = random_images(model, 2).double()
    _, hidden = mae.hide(images)
    predicted = torch.randn(2, 3, 16 * channels, dtype=torch.float64)
    errors = []
    for image, patches, rows in zip(images, hidden.tolist(), predicted.tolist()):
        for patch, row in zip(patches, rows):
            r, s = divmod(patch, 3)
            values = [image[c, 4 * r + y, 4 * s + x].item() for y in range(4) for x in range(4) for c in range(channels)]
            mean = sum(values) / len(values) if normalize else 0.0
            var = sum((v - mean) ** 2 for v in values) / (len(values) - 1) + 1e-6 if normalize else 1.0
            errors += [(g - (v - mean) / math.sqrt(var)) ** 2 for g, v in zip(row, values)]
    assert mae.error(predicted, images, hidden).item() == pytest.approx(sum(errors) / len(errors), rel=1e-12)


def test_the_loss_of_a_model_of_half_precision_is_computed_in_float32():
    mae = MAE(ViT((8, 12), 1, 5, dim=8, depth=1, heads=2, tokenizer=partial(PatchEmbed, patch=4)), ratio=0.5, **SMALL)
    images, predicted = random_images(mae.model, 2), torch.randn(2, 3, 16).bfloat16()
    _, hidden = mae.hide(images)
    expected = mae.error(predicted.float(), images.bfloat16().float(), hidden)
    assert torch.equal(mae.bfloat16().error(predicted, images.bfloat16(), hidden), expected)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_loss_is_that_of_lightlys_functions(normalize, channels):
    mae = MAE(ViT((28, 28), channels, 5, dim=24, depth=1, heads=3), normalize=normalize, **SMALL)
    images = random_images(mae.model)
    keep, masked = utils.random_token_mask((3, 50), 0.75)
    predicted = mae.decoder(mae.encode(images, keep[:, 1:] - 1), keep[:, 1:] - 1, masked - 1, (7, 7))
    targets = utils.get_at_index(utils.patchify(images, 4), masked - 1)
    targets = utils.normalize_mean_var(targets, dim=-1) if normalize else targets
    assert mae.error(predicted, images, masked - 1).item() == pytest.approx(F.mse_loss(predicted, targets).item(), rel=1e-6)


@pytest.mark.parametrize(
    "options",
    [dict(), dict(reg_tokens=2), dict(init_values=0.3), dict(global_pool="avg"), dict(global_pool="avg", class_token=False)],
    ids=str,
)
def test_the_encoder_is_that_of_lightly(options):
    vit = randomize(TIMM_VIT(**options), 0.05)
    encoder = LIGHTLY_ENCODER(vit)
    mae = MAE(from_timm(vit), **SMALL)
    images, prefix = random_images(mae.model), vit.num_prefix_tokens
    keep = torch.stack([torch.randperm(16)[:5] for _ in range(3)])
    first = torch.arange(prefix).expand(3, prefix)
    assert_close(mae.encode(images, keep), encoder.encode(images, idx_keep=torch.cat([first, keep + prefix], dim=1)), 1e-5)


def test_loss_and_gradients_are_those_of_lightlys_autoencoder():
    """lightly's encoder, decoder and functions are combined as in its MAE example, with the same weights."""
    vit = randomize(TIMM_VIT(), 0.05)
    mae = MAE(from_timm(vit), decoder_dim=16, decoder_depth=2, decoder_heads=2)
    randomize(mae.decoder, 0.05)
    encoder = LIGHTLY_ENCODER(vit)
    embed, pixels = nn.Linear(24, 16), nn.Linear(16, 7 * 7 * 3)
    decoder = MaskedVisionTransformerDecoderTIMM(16, 16, 2, 2)
    embed.load_state_dict(mae.decoder.embed.state_dict())
    pixels.load_state_dict(mae.decoder.pixels.state_dict())
    state, lightly_state = mae.decoder.state_dict(), decoder.state_dict()
    example = {"blocks.0.norm1.weight": torch.zeros(16)}  # tells `rename` that these are names of timm
    names = {name: list(rename(example | {name: value}))[-1] for name, value in lightly_state.items()}
    names["mask_token"] = "unknown"
    state = {name: state[names[name]].reshape(value.shape) for name, value in lightly_state.items() if name != "pos_embed"}
    decoder.load_state_dict(state | {"pos_embed": lightly_state["pos_embed"]})

    images = random_images(mae.model)
    torch.manual_seed(7)
    shown, hidden = mae.hide(images)
    keep, masked = torch.cat([torch.zeros(3, 1, dtype=torch.long), shown + 1], dim=1), hidden + 1
    encoded = encoder.encode(images, idx_keep=keep)
    tokens = utils.repeat_token(decoder.mask_token, (3, 17))
    decoded = decoder(utils.set_at_index(tokens, keep, embed(encoded).type_as(tokens)))
    predicted = pixels(utils.get_at_index(decoded, masked))
    targets = utils.normalize_mean_var(utils.get_at_index(utils.patchify(images, 7), masked - 1), dim=-1)
    expected = F.mse_loss(predicted, targets)
    expected.backward()

    torch.manual_seed(7)
    loss = mae(make_batch(images), 0.5)["loss"]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    gradients = rename({name: p.grad for name, p in vit.named_parameters() if p.grad is not None})
    pairs = [(mae.decoder.embed.weight, embed.weight.grad), (mae.decoder.pixels.weight, pixels.weight.grad)]
    for name, parameter in mae.model.named_parameters():
        assert (parameter.grad is None) == name.startswith("head.")
        if parameter.grad is not None:
            pairs.append((parameter, gradients[name]))
    pairs += [(mae.decoder.get_parameter(names[name]), p.grad) for name, p in decoder.named_parameters() if p.requires_grad]
    assert len(pairs) >= 52
    for parameter, gradient in pairs:
        assert_close(parameter.grad, gradient.reshape(parameter.shape), 1e-6)


# Visibility of pixels


def test_every_tokenizer_is_tested():
    classes = {
        member
        for member in vars(tokenizers).values()
        if inspect.isclass(member) and issubclass(member, nn.Module) and member.__module__ == tokenizers.__name__
    }
    assert {getattr(make, "func", make) for make in TOKENIZERS.values()} == classes - {tokenizers.Resized}  # not with MAE yet


@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_hidden_pixel_reaches_the_encoder(name):
    mae = MAE(TINY(tokenizer=TOKENIZERS[name]), ratio=0.6, **SMALL)
    images = random_images(mae.model)
    shown, hidden = mae.hide(images)
    mask = mask_of_patches(mae, hidden, images)
    assert torch.equal(mask, ~mask_of_patches(mae, shown, images)) and 0.3 < mask.float().mean() < 0.9

    def outputs_and_gradients(images):
        mae.zero_grad()
        images = images.clone().requires_grad_()
        tokens = mae.encode(images, shown)
        predicted = mae.decoder(tokens, shown, hidden, mae.grid(images))
        predicted.backward(torch.linspace(-1, 1, predicted.numel()).reshape(predicted.shape))
        return tokens.detach(), predicted.detach(), [p.grad for p in mae.parameters() if p.grad is not None], images.grad

    tokens, predicted, gradients, pixel_gradients = outputs_and_gradients(images)
    assert (pixel_gradients[mask] == 0).all() and (pixel_gradients[~mask] != 0).float().mean() > 0.9
    assert len(gradients) > 20
    for other in (torch.randn_like(images), torch.full_like(images, 1e30), torch.full_like(images, math.nan)):
        changed = outputs_and_gradients(torch.where(mask, other, images))
        assert torch.equal(changed[0], tokens) and torch.equal(changed[1], predicted)
        assert all(map(torch.equal, changed[2], gradients))
    assert not torch.equal(outputs_and_gradients(torch.where(mask, images, torch.randn_like(images)))[0], tokens)
    # without hiding pixels, only tokens of their own patch would be independent of hidden pixels
    visible = partial(torch.gather, dim=1, index=shown[..., None].expand(-1, -1, 24))
    independent = torch.equal(*(visible(mae.model.tokenizer(x)) for x in (images, torch.where(mask, 0.0, images))))
    assert independent == (name in ONLY_OWN_PATCH)


def test_hidden_zeros_do_not_change_tokens_of_their_own_patch():
    """The encoder is bitwise one that selects its tokens from those of the full image."""
    model = TINY(registers=2)
    mae, images = MAE(model, **SMALL), random_images(model)
    shown, _ = mae.hide(images)
    x = torch.cat([model.prefix.expand(3, -1, -1), model.tokenizer(images)], dim=1)
    x = model.position(x, (4, 4))
    x = torch.stack([torch.cat([tokens[:3], tokens[3:][index]]) for tokens, index in zip(x, shown)])
    for block in model.blocks:
        x, _ = block(x)
    assert torch.equal(mae.encode(images, shown), model.norm(x))


@pytest.mark.parametrize("normalize", [True, False])
def test_no_visible_pixel_is_a_target(normalize):
    mae = MAE(TINY(), normalize=normalize, **SMALL)
    images = random_images(mae.model).requires_grad_()
    _, hidden = mae.hide(images)
    mae.error(torch.randn(3, 12, 49), images, hidden).backward()
    mask = mask_of_patches(mae, hidden, images)
    assert (images.grad[~mask] == 0).all() and (images.grad[mask] != 0).all()


ENCODERS = [
    (name, position, pool)
    for position in (Learned, SinCos2d, partial(Learned, on_prefix=False), SinCos1d, None)
    for name in ("patch", "SPT", "stem", "CCT")
    for pool in (ClassToken, MeanTokens, SequencePool)
]
QUICK_ENCODERS = pairwise(ENCODERS[:24])  # of the first two positions


@pytest.mark.parametrize(
    ("name", "position", "pool"),
    [pytest.param(*case, marks=() if index in QUICK_ENCODERS else pytest.mark.slow) for index, case in enumerate(ENCODERS)],
    ids=option_id,
)
def test_with_every_patch_visible_the_encoder_is_the_model(pool, position, name):
    for registers, more in ((0, dict(attention=LocalityAttention)), (2, dict(norm_after_pool=True, attention=Attention))):
        tokenizer = partial(ShiftedPatchEmbed, patch=8) if name == "SPT" else TOKENIZERS[name]
        slots = dict(tokenizer=tokenizer, pool=pool, position=position)
        model = ViT((24, 40), 3, 5, dim=24, depth=2, heads=3, registers=registers, **slots, **more)
        mae, images = MAE(model, **SMALL), torch.randn(2, 3, 24, 40)
        n = math.prod(mae.grid(images))
        tokens = mae.encode(images, torch.arange(n).expand(2, n))
        assert torch.equal(tokens, model.tokens(images)[0])
        assert mae.decoder.position.grid == mae.grid(images)
        loss = mae(make_batch(images), 0.0)["loss"]
        loss.backward()
        assert loss.isfinite() and mae.observed.features.shape == (2, 24) and not mae.observed.features.requires_grad
        untrained = {name.partition(".")[0] for name, p in mae.model.named_parameters() if p.grad is None}
        assert untrained == {"head"} | ({"pool"} if pool is SequencePool else set()) | ({"norm"} if registers else set())
        assert all(p.grad.isfinite().all() for p in mae.parameters() if p.grad is not None)
        assert all(p.grad is not None and (p.grad != 0).any() for p in mae.decoder.parameters())


def test_dropout_is_that_of_the_model():
    mae = MAE(TINY(dropout=0.5, drop_path=0.5), **SMALL).train()
    images = random_images(mae.model)
    torch.manual_seed(1)
    tokens = mae.encode(images, torch.arange(16).expand(3, 16))
    torch.manual_seed(1)
    assert torch.equal(tokens, mae.model.tokens(images)[0]) and not torch.equal(tokens, mae.eval().model.tokens(images)[0])


@pytest.mark.parametrize("position", [Learned, SinCos2d, SinCos1d, None])
def test_a_visible_token_has_the_position_of_its_patch(position):
    """The same pixels in another patch give another token, unless the model has no positions."""
    mae, image = MAE(TINY(position=position, depth=1), **SMALL), torch.randn(1, 1, 28, 28)
    tokens = [mae.encode(x, torch.tensor([[index]])) for x, index in ((image, 0), (image.roll(7, dims=3), 1))]
    assert torch.equal(*tokens) if position is None else not torch.allclose(*tokens, atol=1e-3)


def test_only_visible_tokens_go_through_the_blocks_in_training():
    mae = MAE(TINY(registers=2), **SMALL)
    shapes = []
    for block in mae.model.blocks:
        block.register_forward_hook(lambda block, inputs, output: shapes.append(inputs[0].shape))
    images = random_images(mae.model)
    mae(make_batch(images), 0.0)
    mae.eval().model(images)
    assert shapes == [(3, 3 + 4, 24)] * 2 + [(3, 3 + 16, 24)] * 2


def test_the_observation_has_the_pooled_features_of_visible_tokens():
    mae = MAE(TINY(pool=MeanTokens), **SMALL)
    images = random_images(mae.model)
    assert mae.observed is None
    torch.manual_seed(5)
    mae(make_batch(images), 0.0)
    torch.manual_seed(5)
    assert_close(mae.observed.features, mae.encode(images, mae.hide(images)[0]).mean(1), 1e-6)


# Sizes and channels


@pytest.mark.parametrize("image", [(24, 40), *(pytest.param(size, marks=pytest.mark.slow) for size in ((28, 28), (32, 32)))], ids=str)
@pytest.mark.parametrize("make", slow_after(2, [ShiftedPatchEmbed, ConvTokenizer, PatchEmbed, ConvStem]))
def test_any_size_and_number_of_channels_works_or_is_refused_with_the_sizes(image, make):
    size, worked = f"{image[0]} x {image[1]}", 0
    option, values = ("patch", (4, 7, 8)) if "patch" in inspect.signature(make).parameters else ("layers", (2, 3))
    for channels, value in itertools.product((1, 3, 4), values):
        tokenizer = partial(make, **{option: value})
        if option == "patch" and (image[0] % value or image[1] % value):
            with pytest.raises(ValueError, match=rf"patches of {value} pixels do not tile an image of {size}; .* fit"):
                ViT(image, channels, 5, tokenizer=tokenizer)
            continue
        model = ViT(image, channels, 5, dim=16, depth=1, heads=2, tokenizer=tokenizer)
        rows, columns = model.tokenizer.grid(image)
        if image[0] % rows or image[1] % columns:
            with pytest.raises(ValueError, match=rf"{rows} x {columns} tokens of {make.__name__} do not divide {size} pixels"):
                MAE(model, **SMALL)
            continue
        mae = MAE(model, **SMALL)
        mae(make_batch(random_images(model, 2)), 0.0)["loss"].backward()
        assert all(p.grad.isfinite().all() for p in mae.parameters() if p.grad is not None)
        reconstruction = mae.reconstruct(random_images(model, 2))
        assert {x.shape for x in reconstruction} == {(2, channels, *image)} and reconstruction.predicted.isfinite().all()
        worked += 1
    assert worked >= 3


def test_patches_need_not_be_square_nor_have_several_pixels():
    model = ViT((28, 32), 2, 5, dim=16, depth=1, heads=2, tokenizer=ConvStem)
    mae = MAE(model, **SMALL)
    assert mae.patch == (7, 8) and mae.decoder.pixels.out_features == 7 * 8 * 2
    mae(make_batch(random_images(model)), 0.0)["loss"].backward()
    model = ViT((6, 5), 1, 5, dim=16, depth=1, heads=2, tokenizer=partial(PatchEmbed, patch=1))
    assert MAE(model, normalize=False, **SMALL)(make_batch(random_images(model)), 0.0)["loss"].isfinite()


def test_images_of_another_size_with_equal_patches_work():
    mae = MAE(TINY(), ratio=0.5, **SMALL)
    images = torch.randn(2, 1, 35, 14)
    assert mae(make_batch(images), 0.0)["loss"].isfinite() and mae.hide(images)[0].shape == (2, 5)
    assert mae.reconstruct(images).predicted.shape == images.shape


# Bad input


@pytest.mark.parametrize(
    "image, nearest", [((30, 30), "28 x 28 or 32 x 32"), ((28, 30), "28 x 28 or 28 x 32"), ((17, 45), "16 x 42 or 18 x 48")]
)
def test_an_image_that_the_tokens_do_not_divide_is_refused_with_the_nearest_sizes(image, nearest):
    def make(size):
        return MAE(ViT(size, 1, 5, dim=24, heads=3, depth=1, tokenizer=ConvStem), **SMALL)

    with pytest.raises(ValueError, match=rf"of ConvStem do not divide {image[0]} x {image[1]} pixels .* that fit: {nearest}$"):
        make(image)
    for side in (int(number) for pair in nearest.split(" or ") for number in pair.split(" x ")):
        assert make((side, side))


@pytest.mark.parametrize(
    "options, mae_options, message",
    [
        (dict(reduction=partial(Merge, r=2)), {}, "reduces its tokens, expected reduction=None"),
        (dict(reduction=partial(Prune, keep=0.5)), {}, "reduces its tokens, expected reduction=None"),
        ({}, dict(ratio=0.0), "ratio is 0.0; expected the share of patches to hide, above 0 and below 1"),
        ({}, dict(ratio=1), "ratio is 1; expected"),
        ({}, dict(ratio=1.2), "ratio is 1.2; expected"),
        ({}, dict(ratio=math.nan), "ratio is nan; expected"),
        ({}, dict(ratio=0.95), "ratio 0.95 of 16 patches shows 0 and hides 16"),
        (dict(tokenizer=partial(PatchEmbed, patch=14)), dict(ratio=0.9), r"ratio 0\.9 of 4 patches shows 0 and hides 4"),
        (dict(tokenizer=partial(PatchEmbed, patch=28)), {}, "ratio 0.75 of 1 patches shows 0 and hides 1"),
        (dict(tokenizer=partial(PatchEmbed, patch=1)), {}, "1 pixel and 1 channel has no variance; expected normalize=False"),
        ({}, dict(decoder_depth=0), "decoder_depth is 0; expected at least 1"),
        ({}, dict(decoder_depth=2.5), "decoder_depth is 2.5; expected an integer"),
        ({}, dict(decoder_heads=0), "decoder_heads is 0; expected an integer"),
        ({}, dict(decoder_dim=18), "width 18 is not divisible by 4"),
        ({}, dict(decoder_heads=5), "5 heads do not divide width 64"),
    ],
)
def test_options_and_models_that_do_not_fit_are_refused(options, mae_options, message):
    with pytest.raises(ValueError, match=message):
        MAE(TINY(**options), **mae_options)


def batch_of_zeros(*shape, **options):
    return MAE(TINY(**options), **SMALL)(Batch(torch.zeros(shape), torch.zeros(2, 5)), 0.0)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: MAE(SmallCNN((28, 28), 1, 5)), "MAE hides patches from a ViT; got a SmallCNN"),
        (lambda: batch_of_zeros(2, 3, 28, 28), r"got images of shape .* needs b 1 h w"),
        (lambda: MAE(TINY(), **SMALL).hide(torch.zeros(2, 1, 28, 28).byte()), r"torch.uint8; .* b 1 h w, normalized floats"),
        (lambda: batch_of_zeros(1, 28, 28), r"got images of shape .* needs b 1 h w"),
        (lambda: batch_of_zeros(2, 1, 32, 32), "patches of 7 pixels do not tile an image of 32 x 32"),
        (
            lambda: batch_of_zeros(2, 1, 32, 32, tokenizer=ConvStem),
            "images of 32 x 32 have patches of 8 x 8 pixels and the decoder makes 7 x 7; expected images of 28 x 28",
        ),
        (lambda: patchify(torch.zeros(1, 1, 28, 28), (4, 5)), "a grid of 4 x 5 does not divide images of 28 x 28"),
        (
            lambda: unpatchify(torch.zeros(1, 15, 49), (4, 4), (28, 28)),
            r"patches of shape \(1, 15, 49\) do not fill images of 28 x 28; expected b 16 \(7 7 c\)",
        ),
        (lambda: unpatchify(torch.zeros(1, 16, 50), (4, 4), (28, 28)), "do not fill images of 28 x 28"),
    ],
)
def test_images_and_patches_that_do_not_fit_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# Reconstructions


@pytest.mark.parametrize("normalize", [True, False])
def test_reconstructions_have_visible_patches_as_given_and_hidden_patches_as_predicted(normalize):
    mae = MAE(ViT((24, 40), 3, 5, dim=24, depth=2, heads=3), ratio=0.6, normalize=normalize, **SMALL)
    images = torch.randn(3, 3, 24, 40)
    found = mae.reconstruct(images, seed=2)
    assert all(x.shape == images.shape for x in found) and found.mask.dtype == torch.bool
    assert torch.equal(found.image, images) and torch.equal(found.masked, torch.where(found.mask, 0.0, images))
    assert found.mask.float().mean() == pytest.approx(36 / 60) and not torch.equal(found.mask[0], found.mask[1])
    for picture in (found.predicted, found.helped):
        assert torch.equal(picture[~found.mask], images[~found.mask]) and (picture != images)[found.mask].all()
    again, other = mae.reconstruct(images, seed=2), mae.reconstruct(images, seed=3)
    assert all(map(torch.equal, again, found)) and not torch.equal(other.mask, found.mask)
    assert torch.equal(found.predicted, found.helped) == (not normalize)


@pytest.mark.parametrize("normalize", [True, False])
def test_predicted_images_contain_no_information_of_hidden_pixels(normalize):
    mae = MAE(TINY(), normalize=normalize, **SMALL)
    images = random_images(mae.model)
    found = mae.reconstruct(images)
    other = mae.reconstruct(torch.where(found.mask, 100 * torch.randn_like(images), images))
    assert torch.equal(other.mask, found.mask)
    assert torch.equal(other.predicted, found.predicted) and torch.equal(other.masked, found.masked)
    assert torch.equal(other.helped, found.helped) == (not normalize)


@pytest.mark.parametrize("normalize", [True, False])
def test_a_perfect_decoder_reconstructs_the_image(normalize):
    """With `normalize` only `helped` is the image; `predicted` has the mean and deviation of the visible pixels."""
    mae = MAE(TINY(), normalize=normalize, **SMALL)
    images = random_images(mae.model) * 3 + 5

    def perfect(tokens, shown, hidden, grid):
        patches = torch.gather(patchify(images, grid), 1, hidden[..., None].expand(-1, -1, 49))
        return F.layer_norm(patches, (49,)) * (48 / 49) ** 0.5 if normalize else patches

    mae.decoder.forward = perfect
    found = mae.reconstruct(images)
    assert_close(found.helped, images, 1e-3)
    if normalize:
        assert (found.predicted - images).abs().max() > 0.1
        visible = images[0][~found.mask[0]]
        hidden = patchify(found.predicted, (4, 4))[0][patchify(found.mask, (4, 4))[0].all(1)]
        assert_close(hidden.mean(1), visible.mean().expand(12), 1e-3)
        assert_close(hidden.std(1), visible.std().expand(12), 1e-3)


def test_a_reconstruction_changes_neither_the_model_nor_the_random_generator():
    mae = MAE(TINY(dropout=0.5, drop_path=0.3), **SMALL).train()
    mae.model.blocks[0].eval()
    images = random_images(mae.model)
    before, generator = copy.deepcopy(mae.state_dict()), torch.get_rng_state()
    first, second = mae.reconstruct(images), mae.reconstruct(images)
    assert torch.equal(first.predicted, second.predicted) and torch.equal(generator, torch.get_rng_state())
    assert mae.training and mae.model.training and not mae.model.blocks[0].training
    assert all(torch.equal(value, before[name]) for name, value in mae.state_dict().items())


def test_a_faint_pixel_is_almost_as_large_a_target_as_a_stroke():
    """As the docstring says of `normalize`; a black patch is no target."""
    mae, images = MAE(TINY(tokenizer=partial(PatchEmbed, patch=4)), **SMALL), torch.zeros(1, 1, 28, 28)
    errors = []
    for value in (0.0, 1 / 255, 1.0):
        images[0, 0, 0, 8] = value
        errors.append(mae.error(torch.zeros(1, 3, 16), images, torch.tensor([[0, 1, 2]])).item() * 3)
    assert errors[0] == 0 and 0.4 * errors[2] < errors[1] < errors[2]


# As an objective


def test_copies_and_loaded_states_are_equal():
    mae, fresh = MAE(TINY(), **SMALL), MAE(TINY(), **SMALL)
    images = random_images(mae.model)
    mae(make_batch(images), 0.0)["loss"].backward()
    assert not torch.equal(fresh.reconstruct(images).predicted, mae.reconstruct(images).predicted)
    fresh.load_state_dict(mae.state_dict())
    for other in (copy.deepcopy(mae), fresh):
        assert torch.equal(other.reconstruct(images).predicted, mae.reconstruct(images).predicted)
    assert {name.partition(".")[0] for name in mae.state_dict()} == {"model", "decoder"}


def test_labels_are_not_read():
    mae = MAE(TINY(), **SMALL)
    images, losses = random_images(mae.model), []
    for targets in (torch.full((3, 5), 0.2), torch.full((3, 5), math.nan)):
        torch.manual_seed(1)
        losses.append(mae(Batch(images, targets), 0.0)["loss"])
    assert torch.equal(*losses) and MAE.needs_labels is False


def test_the_decoder_is_initialized_from_the_seed_and_its_token_does_not_decay():
    parameters = []
    for _ in range(2):
        torch.manual_seed(4)
        parameters.append(list(MAE(TINY(), **SMALL).parameters()))
    assert all(map(torch.equal, *parameters))
    mae = MAE(TINY(), decoder_dim=64)
    assert mae.decoder.unknown.std().item() == pytest.approx(0.02, rel=0.5) and (mae.decoder.pixels.bias == 0).all()
    assert mae.decoder.pixels.weight.abs().max() <= (6 / (64 + 49)) ** 0.5
    no_decay = {id(p) for p in decay_groups(mae, 0.05)[0][1]["params"]}
    assert id(mae.decoder.unknown) in no_decay and id(mae.decoder.embed.weight) not in no_decay


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_other_precisions_give_nearly_the_same_loss(dtype):
    mae = MAE(TINY(tokenizer=partial(ShiftedPatchEmbed, patch=7)), **SMALL)
    images = random_images(mae.model)
    torch.manual_seed(1)
    loss = mae(make_batch(images), 0.0)["loss"]
    torch.manual_seed(1)
    if dtype is torch.float64:
        other = mae.double()(make_batch(images.double()), 0.0)["loss"]
        assert mae.reconstruct(images.double()).predicted.dtype == dtype
    else:
        with torch.autocast("cpu", dtype):
            other = mae(make_batch(images), 0.0)["loss"]
            assert mae.reconstruct(images).predicted.dtype == torch.float32
    other.backward()
    assert other.item() == pytest.approx(loss.item(), rel=0.03 if dtype is torch.bfloat16 else 1e-5)


def blobs(b):
    """Images of 12 x 12 pixels with a Gaussian blob at a random place."""
    y, x = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    center = torch.rand(b, 2, 1, 1) * 12
    return (-((x - center[:, 0]) ** 2 + (y - center[:, 1]) ** 2) / 30).exp()[:, None] * 2 - 0.7


@pytest.mark.parametrize("make, normalize, steps", slow_after(1, [(ShiftedPatchEmbed, True, 70), (PatchEmbed, False, 140)]))
def test_training_learns_to_predict_hidden_patches(make, normalize, steps):
    """On new images the error is far below that of the best constant."""
    model = ViT((12, 12), 1, 5, dim=24, depth=1, heads=3, tokenizer=partial(make, patch=4))
    mae = MAE(model, ratio=0.5, decoder_dim=32, decoder_depth=1, normalize=normalize)
    optimizer = torch.optim.AdamW(decay_groups(mae, 0.01)[0], lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        mae(make_batch(blobs(32)), 0.0)["loss"].backward()
        optimizer.step()
    images = blobs(256)
    constant = torch.zeros(256, 5, 16) if normalize else images.mean().expand(256, 5, 16)
    mae.eval()
    assert mae(make_batch(images), 1.0)["loss"] < 0.6 * mae.error(constant, images, mae.hide(images)[1])
