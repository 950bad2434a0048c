"""MAE: the loss by hand and by lightly, who sees which pixel, and that the pictures are honest."""

import copy
import inspect
import math
from functools import partial

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from smallvit import (
    Attention,
    ClassToken,
    ConvStem,
    ConvTokenizer,
    Learned,
    LocalityAttention,
    MeanTokens,
    Merge,
    PatchEmbed,
    Prune,
    SequencePool,
    ShiftedPatchEmbed,
    SinCos1d,
    SinCos2d,
    SmallCNN,
    ViT,
    from_timm,
    tokenizers,
)
from smallvit.augment import Batch
from smallvit.objectives.mae import MAE, patchify, unpatchify
from smallvit.optim import decay_groups
from smallvit.pretrained.convert import rename

TINY = partial(ViT, (28, 28), 1, 5, dim=24, depth=2, heads=3, tokenizer=partial(PatchEmbed, patch=7))
SMALL = dict(decoder_dim=16, decoder_depth=1, decoder_heads=2)
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
KEPT_APART = {"patch", "patch, linear", "SPT, off"}  # whose tokens see their own patch alone


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def perturbed(model):
    """Every weight drawn anew: what starts at zero or one would hide a mistake."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def batch_of(images):
    return Batch(images, torch.eye(5)[torch.arange(len(images)) % 5])


def images_for(model, b=3):
    return torch.randn(b, model.channels, *model.image)


def close(one, other, by=1e-5):
    assert one.shape == other.shape
    assert (one - other).abs().max() <= by


def area(mae, index, images):
    """True at the pixels of those patches, b 1 h w, one patch after another."""
    (h, w), (rows, columns) = images.shape[-2:], mae.grid(images)
    p, q = h // rows, w // columns
    there = torch.zeros(len(images), 1, h, w, dtype=torch.bool)
    for image, places in enumerate(index.tolist()):
        for place in places:
            r, s = divmod(place, columns)
            there[image, 0, r * p : (r + 1) * p, s * q : (s + 1) * q] = True
    return there


# Patches


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize(("image", "grid"), [((28, 28), (7, 7)), ((24, 40), (3, 5)), ((28, 32), (4, 4)), ((6, 5), (1, 1))])
def test_patches_are_cut_in_reading_order_and_put_together_again(channels, image, grid):
    x = torch.randn(2, channels, *image)
    patches = patchify(x, grid)
    p, q = image[0] // grid[0], image[1] // grid[1]
    for place in range(grid[0] * grid[1]):
        r, s = divmod(place, grid[1])
        own = x[:, :, r * p : (r + 1) * p, s * q : (s + 1) * q]
        assert torch.equal(patches[:, place], own.permute(0, 2, 3, 1).flatten(1))
    assert patches.shape[1] == grid[0] * grid[1] and torch.equal(unpatchify(patches, grid, image), x)


def test_patches_are_lightlys_on_squares():
    from lightly.models import utils

    x = torch.randn(2, 3, 28, 28)
    assert torch.equal(patchify(x, (4, 4)), utils.patchify(x, 7))
    assert torch.equal(unpatchify(patchify(x, (4, 4)), (4, 4), (28, 28)), utils.unpatchify(utils.patchify(x, 7), 7, 3))


def test_patches_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="a grid of 4 x 5 does not cut images of 28 x 28"):
        patchify(torch.zeros(1, 1, 28, 28), (4, 5))
    with pytest.raises(
        ValueError, match=r"patches of shape \(1, 15, 49\) do not fill images of 28 x 28; expected b 16 \(7 7 c\)"
    ):
        unpatchify(torch.zeros(1, 15, 49), (4, 4), (28, 28))
    with pytest.raises(ValueError, match="do not fill images of 28 x 28"):
        unpatchify(torch.zeros(1, 16, 50), (4, 4), (28, 28))


# Which patches are hidden


@pytest.mark.parametrize(
    ("ratio", "patch", "shown"),
    [(0.75, 4, 12), (0.75, 7, 4), (0.6, 4, 19), (0.5, 7, 8), (0.9, 4, 4), (0.01, 4, 48), (0.9, 14, None)],
)
def test_every_image_hides_the_same_number_each_its_own(ratio, patch, shown):
    model = TINY(tokenizer=partial(PatchEmbed, patch=patch))
    if shown is None:
        with pytest.raises(ValueError, match=r"ratio 0\.9 of 4 patches shows 0 and hides 4"):
            MAE(model, ratio=ratio, **SMALL)
        return
    mae, n = MAE(model, ratio=ratio, **SMALL), (28 // patch) ** 2
    images = images_for(model, 64)
    seen, hidden = mae.hide(images)
    assert seen.shape == (64, shown) and hidden.shape == (64, n - shown)
    assert all(sorted(a + b) == list(range(n)) for a, b in zip(seen.tolist(), hidden.tolist()))
    assert (seen.diff() > 0).all() and (hidden.diff() > 0).all()
    assert len({tuple(places) for places in hidden.tolist()}) > 10 and not torch.equal(mae.hide(images)[0], seen)


def test_a_share_that_a_float_misses_is_met():
    model = ViT((8, 20), 1, 5, dim=8, heads=2, tokenizer=partial(PatchEmbed, patch=4))
    assert int(10 * (1 - 0.9)) == 0
    assert MAE(model, ratio=0.9, **SMALL).hide(images_for(model))[0].shape[1] == 1


def test_every_patch_is_hidden_about_as_often():
    mae = MAE(TINY(), **SMALL)
    often = torch.bincount(mae.hide(torch.zeros(4000, 1, 28, 28))[1].flatten(), minlength=16) / 4000
    assert (often - 0.75).abs().max() < 0.04


def test_the_seed_alone_decides_what_is_hidden():
    """One seed, one loss; and neither dropout nor another model moves the draw."""
    losses = []
    for seed in (3, 3, 4):
        torch.manual_seed(0)
        mae = MAE(TINY(), **SMALL)
        images = images_for(mae.model)
        torch.manual_seed(seed)
        losses.append(mae(batch_of(images), 0.0)["loss"])
    assert torch.equal(losses[0], losses[1]) and not torch.equal(losses[0], losses[2])
    hidden = []
    for options in (dict(), dict(dropout=0.5, drop_path=0.5, depth=3)):
        mae = MAE(TINY(**options), **SMALL)
        mae.decoder.register_forward_hook(lambda decoder, given, out: hidden.append(given[2]))
        torch.manual_seed(3)
        mae(batch_of(images), 0.0)
    assert torch.equal(*hidden)


# The loss


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_loss_is_the_error_of_hidden_patches_alone(normalise, channels):
    model = ViT((8, 12), channels, 5, dim=8, depth=1, heads=2, tokenizer=partial(PatchEmbed, patch=4)).double()
    mae = MAE(model, ratio=0.5, normalise=normalise, **SMALL).double()
    images = images_for(model, 2).double()
    _, hidden = mae.hide(images)
    guessed = torch.randn(2, 3, 16 * channels, dtype=torch.float64)
    errors = []
    for image, places, guesses in zip(images, hidden.tolist(), guessed.tolist()):
        for place, guess in zip(places, guesses):
            r, s = divmod(place, 3)
            values = [image[c, 4 * r + y, 4 * s + x].item() for y in range(4) for x in range(4) for c in range(channels)]
            mean = sum(values) / len(values) if normalise else 0.0
            var = sum((v - mean) ** 2 for v in values) / (len(values) - 1) + 1e-6 if normalise else 1.0
            errors += [(g - (v - mean) / math.sqrt(var)) ** 2 for g, v in zip(guess, values)]
    assert mae.error(guessed, images, hidden).item() == pytest.approx(sum(errors) / len(errors), rel=1e-12)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_loss_is_that_of_lightlys_pieces(normalise, channels):
    from lightly.models import utils

    mae = MAE(ViT((28, 28), channels, 5, dim=24, depth=1, heads=3), normalise=normalise, **SMALL)
    images = images_for(mae.model)
    keep, masked = utils.random_token_mask((3, 50), 0.75)
    guessed = mae.decoder(mae.encode(images, keep[:, 1:] - 1), keep[:, 1:] - 1, masked - 1, (7, 7))
    wanted = utils.get_at_index(utils.patchify(images, 4), masked - 1)
    wanted = utils.normalize_mean_var(wanted, dim=-1) if normalise else wanted
    assert mae.error(guessed, images, masked - 1).item() == pytest.approx(F.mse_loss(guessed, wanted).item(), rel=1e-6)


@pytest.mark.parametrize(
    "options",
    [dict(), dict(reg_tokens=2), dict(init_values=0.3), dict(global_pool="avg"), dict(global_pool="avg", class_token=False)],
    ids=str,
)
def test_the_encoder_is_lightlys(options):
    from lightly.models.modules import MaskedVisionTransformerTIMM

    vit = perturbed(timm.models.VisionTransformer(28, 7, 3, 5, embed_dim=24, depth=2, num_heads=3, **options))
    theirs = MaskedVisionTransformerTIMM(vit, weight_initialization="skip", pos_embed_initialization="skip")
    mae = MAE(from_timm(vit), **SMALL)
    images, prefix = images_for(mae.model), vit.num_prefix_tokens
    keep = torch.stack([torch.randperm(16)[:5] for _ in range(3)])
    first = torch.arange(prefix).expand(3, prefix)
    close(mae.encode(images, keep), theirs.encode(images, idx_keep=torch.cat([first, keep + prefix], dim=1)))


def test_loss_and_gradients_are_those_of_lightlys_autoencoder():
    """Their encoder, decoder and pieces put together as in their MAE example, with our weights."""
    from lightly.models import utils
    from lightly.models.modules import MaskedVisionTransformerTIMM
    from lightly.models.modules.masked_vision_transformer_decoder_timm import MaskedVisionTransformerDecoderTIMM

    vit = perturbed(timm.models.VisionTransformer(28, 7, 3, 5, embed_dim=24, depth=2, num_heads=3))
    mae = MAE(from_timm(vit), decoder_dim=16, decoder_depth=2, decoder_heads=2)
    perturbed(mae.decoder)
    encoder = MaskedVisionTransformerTIMM(vit, weight_initialization="skip", pos_embed_initialization="skip")
    embed, pixels = nn.Linear(24, 16), nn.Linear(16, 7 * 7 * 3)
    decoder = MaskedVisionTransformerDecoderTIMM(16, 16, 2, 2)
    embed.load_state_dict(mae.decoder.embed.state_dict())
    pixels.load_state_dict(mae.decoder.pixels.state_dict())
    ours = mae.decoder.state_dict()
    names = {
        name: list(rename({"blocks.0.norm1.weight": torch.zeros(16), name: value}))[-1]
        for name, value in decoder.state_dict().items()
    }
    own = {"mask_token": ours["unknown"][None, None], "pos_embed": decoder.pos_embed.data}
    decoder.load_state_dict(own | {name: ours[names[name]] for name in decoder.state_dict() if name not in own})

    images = images_for(mae.model)
    torch.manual_seed(7)
    shown, hidden = mae.hide(images)
    keep, masked = torch.cat([torch.zeros(3, 1, dtype=torch.long), shown + 1], dim=1), hidden + 1
    encoded = encoder.encode(images, idx_keep=keep)
    whole = utils.repeat_token(decoder.mask_token, (3, 17))
    decoded = decoder(utils.set_at_index(whole, keep, embed(encoded).type_as(whole)))
    guessed = pixels(utils.get_at_index(decoded, masked))
    wanted = utils.normalize_mean_var(utils.get_at_index(utils.patchify(images, 7), masked - 1), dim=-1)
    loss = F.mse_loss(guessed, wanted)
    loss.backward()

    torch.manual_seed(7)
    out = mae(batch_of(images), 0.5)
    assert out["loss"].item() == pytest.approx(loss.item(), rel=1e-6)
    out["loss"].backward()
    theirs = rename({name: p.grad for name, p in vit.named_parameters() if p.grad is not None})
    compared = 0
    for name, parameter in mae.model.named_parameters():
        assert (parameter.grad is None) == name.startswith("head.")
        if parameter.grad is not None:
            close(parameter.grad, theirs[name], 1e-6)
            compared += 1
    for name, parameter in decoder.named_parameters():
        if parameter.requires_grad:
            mine = mae.decoder.get_parameter("unknown" if name == "mask_token" else names[name])
            close(mine.grad, parameter.grad.reshape(mine.shape), 1e-6)
            compared += 1
    close(mae.decoder.embed.weight.grad, embed.weight.grad, 1e-6)
    close(mae.decoder.pixels.weight.grad, pixels.weight.grad, 1e-6)
    assert compared >= 50


# Who sees which pixel


def test_every_tokenizer_is_tried():
    ours = {
        made
        for made in vars(tokenizers).values()
        if inspect.isclass(made) and issubclass(made, nn.Module) and made.__module__ == tokenizers.__name__
    }
    assert {getattr(make, "func", make) for make in TOKENIZERS.values()} == ours - {tokenizers.Resized}  # not with MAE yet


@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_hidden_pixel_reaches_the_encoder(name):
    mae = MAE(TINY(tokenizer=TOKENIZERS[name]), ratio=0.6, **SMALL)
    images = images_for(mae.model)
    shown, hidden = mae.hide(images)
    there = area(mae, hidden, images)
    assert torch.equal(there, ~area(mae, shown, images)) and 0.3 < there.float().mean() < 0.9

    def learns(images):
        mae.zero_grad()
        images = images.clone().requires_grad_()
        tokens = mae.encode(images, shown)
        guessed = mae.decoder(tokens, shown, hidden, mae.grid(images))
        guessed.backward(torch.linspace(-1, 1, guessed.numel()).reshape(guessed.shape))
        return tokens.detach(), guessed.detach(), [p.grad for p in mae.parameters() if p.grad is not None], images.grad

    tokens, guessed, gradients, to_pixels = learns(images)
    assert (to_pixels[there] == 0).all() and (to_pixels[~there] != 0).float().mean() > 0.9
    for other in (torch.randn_like(images), torch.full_like(images, 1e30), torch.full_like(images, math.nan)):
        again = learns(torch.where(there, other, images))
        assert torch.equal(again[0], tokens) and torch.equal(again[1], guessed)
        assert len(gradients) > 20 and all(map(torch.equal, again[2], gradients))
    assert not torch.equal(learns(torch.where(there, images, torch.randn_like(images)))[0], tokens)
    # as it would be without: the tokens of the whole image, and of them the visible ones
    taken = partial(torch.gather, dim=1, index=shown[..., None].expand(-1, -1, 24))
    alone = torch.equal(taken(mae.model.tokenizer(images)), taken(mae.model.tokenizer(torch.where(there, 0.0, images))))
    assert alone == (name in KEPT_APART)


def test_a_token_of_its_own_patch_does_not_notice_the_zeros():
    """Bit for bit the encoder that takes its tokens from the whole image."""
    model = TINY(registers=2)
    mae = MAE(model, **SMALL)
    images = images_for(model)
    shown, _ = mae.hide(images)
    x = torch.cat([model.prefix.expand(3, -1, -1), model.tokenizer(images)], dim=1)
    x = model.position(x, (4, 4))
    x = torch.stack([torch.cat([tokens[:3], tokens[3:][places]]) for tokens, places in zip(x, shown)])
    for block in model.blocks:
        x, _ = block(x)
    assert torch.equal(mae.encode(images, shown), model.norm(x))


@pytest.mark.parametrize("normalise", [True, False])
def test_no_visible_pixel_is_a_target(normalise):
    mae = MAE(TINY(), normalise=normalise, **SMALL)
    images = images_for(mae.model).requires_grad_()
    _, hidden = mae.hide(images)
    mae.error(torch.randn(3, 12, 49), images, hidden).backward()
    there = area(mae, hidden, images)
    assert (images.grad[~there] == 0).all() and (images.grad[there] != 0).all()


POOLS = [ClassToken, MeanTokens, SequencePool]
POSITIONS = [Learned, partial(Learned, on_prefix=False), SinCos2d, SinCos1d, None]


def spelled(thing):
    return f"{getattr(thing, 'func', thing).__name__}{'' if isinstance(thing, type) else '*'}" if thing else "None"


@pytest.mark.parametrize("pool", POOLS, ids=spelled)
@pytest.mark.parametrize("position", POSITIONS, ids=spelled)
@pytest.mark.parametrize("name", ["patch", "SPT", "stem", "CCT"])
def test_with_every_patch_shown_the_encoder_is_the_model(pool, position, name):
    for registers, more in ((0, dict(attention=LocalityAttention)), (2, dict(norm_after_pool=True, attention=Attention))):
        make = partial(ShiftedPatchEmbed, patch=8) if name == "SPT" else TOKENIZERS[name]
        model = ViT(
            (24, 40), 3, 5, dim=24, depth=2, heads=3, tokenizer=make, pool=pool, position=position, registers=registers, **more
        )
        mae, images = MAE(model, **SMALL), torch.randn(2, 3, 24, 40)
        n = math.prod(mae.grid(images))
        tokens = mae.encode(images, torch.arange(n).expand(2, n))
        assert torch.equal(tokens, model.tokens(images)[0])
        assert mae.decoder.position.grid == mae.grid(images)
        loss = mae(batch_of(images), 0.0)["loss"]
        loss.backward()
        assert loss.isfinite() and mae.observed.features.shape == (2, 24) and not mae.observed.features.requires_grad
        idle = {name.partition(".")[0] for name, p in mae.model.named_parameters() if p.grad is None}
        assert idle == {"head"} | ({"pool"} if pool is SequencePool else set()) | ({"norm"} if registers else set())
        assert all(p.grad.isfinite().all() for p in mae.parameters() if p.grad is not None)
        assert all(p.grad is not None and (p.grad != 0).any() for p in mae.decoder.parameters())


def test_dropout_acts_as_in_the_model():
    mae = MAE(TINY(dropout=0.5, drop_path=0.5), **SMALL).train()
    images = images_for(mae.model)
    torch.manual_seed(1)
    tokens = mae.encode(images, torch.arange(16).expand(3, 16))
    torch.manual_seed(1)
    assert torch.equal(tokens, mae.model.tokens(images)[0]) and not torch.equal(tokens, mae.eval().model.tokens(images)[0])


def test_positions_are_added_before_patches_are_left_out():
    """Moving what is in a visible patch, with the patch, to another place changes its token."""
    for position in (Learned, SinCos2d, SinCos1d):
        mae = MAE(TINY(position=position, depth=1), **SMALL)
        image = torch.randn(1, 1, 28, 28)
        moved = image.roll(7, dims=3)
        assert not torch.allclose(mae.encode(image, torch.tensor([[0]])), mae.encode(moved, torch.tensor([[1]])), atol=1e-3)
    mae = MAE(TINY(position=None), **SMALL)
    assert torch.equal(mae.encode(image, torch.tensor([[0]])), mae.encode(moved, torch.tensor([[1]])))


def test_only_visible_tokens_go_through_the_blocks():
    mae = MAE(TINY(registers=2), **SMALL)
    came = []
    for block in mae.model.blocks:
        block.register_forward_hook(lambda block, given, out: came.append(given[0].shape))
    images = images_for(mae.model)
    mae(batch_of(images), 0.0)
    assert came == [(3, 3 + 4, 24)] * 2
    mae.eval().model(images)
    assert came[2:] == [(3, 3 + 16, 24)] * 2


def test_what_the_blocks_saw_is_kept_for_whoever_looks():
    mae = MAE(TINY(pool=MeanTokens), **SMALL)
    images = images_for(mae.model)
    assert mae.observed is None
    torch.manual_seed(5)
    mae(batch_of(images), 0.0)
    torch.manual_seed(5)
    close(mae.observed.features, mae.encode(images, mae.hide(images)[0]).mean(1), 1e-6)


# Sizes and channels


@pytest.mark.parametrize("image", [(28, 28), (32, 32), (24, 40)], ids=str)
@pytest.mark.parametrize("make", [PatchEmbed, ShiftedPatchEmbed, ConvStem, ConvTokenizer])
def test_every_size_and_number_of_channels_works_or_is_refused_with_numbers(image, make):
    worked = 0
    for channels in (1, 3, 4):
        for knobs in (
            (dict(patch=4), dict(patch=7), dict(patch=8))
            if "patch" in inspect.signature(make).parameters
            else (dict(layers=2), dict(layers=3))
        ):
            patch = knobs.get("patch", 1)
            if image[0] % patch or image[1] % patch:
                with pytest.raises(
                    ValueError, match=rf"patches of {patch} pixels do not tile an image of {image[0]} x {image[1]}; .* fit"
                ):
                    ViT(image, channels, 5, tokenizer=partial(make, **knobs))
                continue
            model = ViT(image, channels, 5, dim=16, depth=1, heads=2, tokenizer=partial(make, **knobs))
            rows, columns = model.tokenizer.grid(image)
            if image[0] % rows or image[1] % columns:
                with pytest.raises(
                    ValueError,
                    match=rf"{rows} x {columns} tokens of {make.__name__} do not cut {image[0]} x {image[1]} pixels into equal patches",
                ):
                    MAE(model, **SMALL)
                continue
            mae = MAE(model, **SMALL)
            mae(batch_of(images_for(model, 2)), 0.0)["loss"].backward()
            assert all(p.grad.isfinite().all() for p in mae.parameters() if p.grad is not None)
            made = mae.reconstruct(images_for(model, 2))
            assert {x.shape for x in made} == {(2, channels, *image)} and made.predicted.isfinite().all()
            worked += 1
    assert worked >= 3


def test_patches_need_not_be_square():
    model = ViT((28, 32), 2, 5, dim=16, depth=1, heads=2, tokenizer=ConvStem)
    mae = MAE(model, **SMALL)
    assert mae.patch == (7, 8) and mae.decoder.pixels.out_features == 7 * 8 * 2
    mae(batch_of(images_for(model)), 0.0)["loss"].backward()


def test_another_image_size_with_the_same_patches_works():
    mae = MAE(TINY(), ratio=0.5, **SMALL)
    images = torch.randn(2, 1, 35, 14)
    assert mae(batch_of(images), 0.0)["loss"].isfinite() and mae.hide(images)[0].shape == (2, 5)
    assert mae.reconstruct(images).predicted.shape == images.shape


@pytest.mark.parametrize(
    ("image", "near"), [((30, 30), "28 x 28 or 32 x 32"), ((28, 30), "28 x 28 or 28 x 32"), ((17, 45), "16 x 42 or 18 x 48")]
)
def test_an_image_that_the_tokens_do_not_cut_is_refused_with_the_nearest_that_fit(image, near):
    with pytest.raises(
        ValueError, match=rf"of ConvStem do not cut {image[0]} x {image[1]} pixels into equal patches; images that fit: {near}$"
    ):
        MAE(ViT(image, 1, 5, dim=24, heads=3, depth=1, tokenizer=ConvStem), **SMALL)
    for side in (int(number) for pair in near.split(" or ") for number in pair.split(" x ")):
        assert cut(ViT((side, side), 1, 5, dim=24, heads=3, depth=1, tokenizer=ConvStem), (side, side))


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (partial(SmallCNN, (28, 28), 1, 5), dict(), "MAE hides patches from a ViT; got a SmallCNN"),
        (
            partial(TINY, reduction=partial(Merge, r=2)),
            dict(),
            "got a model that reduces its tokens, expected reduction=None",
        ),
        (
            partial(TINY, reduction=partial(Prune, keep=0.5)),
            dict(),
            "got a model that reduces its tokens, expected reduction=None",
        ),
        (TINY, dict(ratio=0.0), "ratio is 0.0; expected the share of patches to hide, above 0 and below 1"),
        (TINY, dict(ratio=1), "ratio is 1; expected"),
        (TINY, dict(ratio=1.2), "ratio is 1.2; expected"),
        (TINY, dict(ratio=math.nan), "ratio is nan; expected"),
        (TINY, dict(ratio=0.95), "ratio 0.95 of 16 patches shows 0 and hides 16"),
        (partial(TINY, tokenizer=partial(PatchEmbed, patch=28)), dict(), "ratio 0.75 of 1 patches shows 0 and hides 1"),
        (
            partial(TINY, tokenizer=partial(PatchEmbed, patch=1)),
            dict(),
            "a patch of 1 pixel and 1 channel has no variance; expected normalise=False",
        ),
        (TINY, dict(decoder_depth=0), "decoder_depth is 0; expected at least 1"),
        (TINY, dict(decoder_dim=18), "width 18 is not divisible by 4"),
        (TINY, dict(decoder_heads=5), "5 heads do not divide width 64"),
    ],
)
def test_what_cannot_be_is_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        MAE(make(), **options)


def test_a_batch_that_does_not_fit_is_refused():
    mae = MAE(TINY(), **SMALL)
    for shape in ((2, 3, 28, 28), (1, 28, 28)):
        with pytest.raises(ValueError, match=r"got images of shape .*; expected b 1 h w"):
            mae(Batch(torch.zeros(shape), torch.zeros(2, 5)), 0.0)
    with pytest.raises(ValueError, match="patches of 7 pixels do not tile an image of 32 x 32"):
        mae(batch_of(torch.zeros(2, 1, 32, 32)), 0.0)
    mae = MAE(TINY(tokenizer=ConvStem), **SMALL)
    with pytest.raises(
        ValueError,
        match="images of 32 x 32 have patches of 8 x 8 pixels and the decoder makes 7 x 7; expected images of 28 x 28",
    ):
        mae(batch_of(torch.zeros(2, 1, 32, 32)), 0.0)


def test_patches_of_one_value_work_unnormalised():
    model = ViT((6, 5), 1, 5, dim=16, depth=1, heads=2, tokenizer=partial(PatchEmbed, patch=1))
    mae = MAE(model, normalise=False, **SMALL)
    assert mae(batch_of(images_for(model)), 0.0)["loss"].isfinite()


# Pictures


@pytest.mark.parametrize("normalise", [True, False])
def test_pictures_show_what_was_seen_and_what_was_guessed(normalise):
    mae = MAE(ViT((24, 40), 3, 5, dim=24, depth=2, heads=3), ratio=0.6, normalise=normalise, **SMALL)
    images = torch.randn(3, 3, 24, 40)
    made = mae.reconstruct(images, seed=2)
    assert all(x.shape == images.shape for x in made) and made.mask.dtype == torch.bool
    assert torch.equal(made.image, images) and torch.equal(made.masked, torch.where(made.mask, 0.0, images))
    assert made.mask.float().mean() == pytest.approx(36 / 60) and not torch.equal(made.mask[0], made.mask[1])
    for picture in (made.predicted, made.helped):
        assert torch.equal(picture[~made.mask], images[~made.mask]) and (picture != images)[made.mask].all()
    again, other = mae.reconstruct(images, seed=2), mae.reconstruct(images, seed=3)
    assert all(map(torch.equal, again, made)) and not torch.equal(other.mask, made.mask)
    assert torch.equal(made.predicted, made.helped) == (not normalise)


@pytest.mark.parametrize("normalise", [True, False])
def test_an_honest_picture_has_no_hidden_pixel_in_it(normalise):
    mae = MAE(TINY(), normalise=normalise, **SMALL)
    images = images_for(mae.model)
    made = mae.reconstruct(images)
    other = mae.reconstruct(torch.where(made.mask, 100 * torch.randn_like(images), images))
    assert torch.equal(other.mask, made.mask)
    assert torch.equal(other.predicted, made.predicted) and torch.equal(other.masked, made.masked)
    assert torch.equal(other.helped, made.helped) == (not normalise)


@pytest.mark.parametrize("normalise", [True, False])
def test_the_best_guess_gives_the_image_back(normalise):
    """A decoder that says exactly what the loss wants; then `helped` is the image, and `predicted` without `normalise`."""
    mae = MAE(TINY(), normalise=normalise, **SMALL)
    images = images_for(mae.model) * 3 + 5

    def wanted(tokens, shown, hidden, grid):
        patches = torch.gather(patchify(images, grid), 1, hidden[..., None].expand(-1, -1, 49))
        return F.layer_norm(patches, (49,)) * (48 / 49) ** 0.5 if normalise else patches

    mae.decoder.forward = wanted
    made = mae.reconstruct(images)
    close(made.helped, images, 1e-3)
    if normalise:
        assert (made.predicted - images).abs().max() > 0.1
        seen = images[0][~made.mask[0]]
        guessed = patchify(made.predicted, (4, 4))[0][patchify(made.mask, (4, 4))[0].all(1)]
        close(guessed.mean(1), seen.mean().expand(12), 1e-3)
        close(guessed.std(1), seen.std().expand(12), 1e-3)


def test_a_picture_leaves_the_model_and_the_draws_as_they_were():
    mae = MAE(TINY(dropout=0.5, drop_path=0.3), **SMALL).train()
    mae.model.blocks[0].eval()
    images = images_for(mae.model)
    before, state = copy.deepcopy(mae.state_dict()), torch.get_rng_state()
    one, two = mae.reconstruct(images), mae.reconstruct(images)
    assert torch.equal(one.predicted, two.predicted) and torch.equal(state, torch.get_rng_state())
    assert mae.training and mae.model.training and not mae.model.blocks[0].training
    assert all(torch.equal(value, before[name]) for name, value in mae.state_dict().items())


def test_the_faintest_smear_is_as_large_a_target_as_a_stroke_and_black_is_none():
    """What the docstring warns of."""
    mae = MAE(TINY(tokenizer=partial(PatchEmbed, patch=4)), **SMALL)
    hidden = torch.tensor([[0, 1, 2]])
    images = torch.zeros(1, 1, 28, 28)
    targets = []
    for value in (0.0, 1 / 255, 1.0):
        images[0, 0, 0, 8] = value
        targets.append(mae.error(torch.zeros(1, 3, 16), images, hidden).item() * 3)
    assert targets[0] == 0 and 0.4 * targets[2] < targets[1] < targets[2]


# As an objective


def test_it_copies_saves_and_loads():
    mae = MAE(TINY(), **SMALL)
    images = images_for(mae.model)
    mae(batch_of(images), 0.0)["loss"].backward()
    other = copy.deepcopy(mae)
    fresh = MAE(TINY(), **SMALL)
    assert not torch.equal(fresh.reconstruct(images).predicted, mae.reconstruct(images).predicted)
    fresh.load_state_dict(mae.state_dict())
    for copied in (other, fresh):
        assert torch.equal(copied.reconstruct(images).predicted, mae.reconstruct(images).predicted)
    assert {name.partition(".")[0] for name in mae.state_dict()} == {"model", "decoder"}
    assert MAE.needs_labels is False


def test_it_needs_no_label_and_no_head():
    mae = MAE(TINY(), **SMALL)
    images = images_for(mae.model)
    losses = []
    for targets in (torch.full((3, 5), 0.2), torch.full((3, 5), math.nan)):
        torch.manual_seed(1)
        losses.append(mae(Batch(images, targets), 0.0)["loss"])
    assert torch.equal(*losses)


def test_weights_of_the_decoder_come_from_the_seed_and_one_kind_decays():
    first, second = [], []
    for found in (first, second):
        torch.manual_seed(4)
        found += MAE(TINY(), **SMALL).parameters()
    assert all(map(torch.equal, first, second))
    mae = MAE(TINY(), decoder_dim=64)
    assert mae.decoder.unknown.std().item() == pytest.approx(0.02, rel=0.5) and (mae.decoder.pixels.bias == 0).all()
    assert mae.decoder.pixels.weight.abs().max() <= (6 / (64 + 49)) ** 0.5
    spared = {id(p) for p in decay_groups(mae, 0.05)[0][1]["params"]}
    assert id(mae.decoder.unknown) in spared and id(mae.decoder.embed.weight) not in spared


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_precision(dtype):
    mae = MAE(TINY(tokenizer=partial(ShiftedPatchEmbed, patch=7)), **SMALL)
    images = images_for(mae.model)
    torch.manual_seed(1)
    loss = mae(batch_of(images), 0.0)["loss"]
    torch.manual_seed(1)
    if dtype is torch.float64:
        other = mae.double()(batch_of(images.double()), 0.0)["loss"]
        assert mae.reconstruct(images.double()).predicted.dtype == dtype
    else:
        with torch.autocast("cpu", dtype):
            other = mae(batch_of(images), 0.0)["loss"]
            assert mae.reconstruct(images).predicted.dtype == torch.float32
    other.backward()
    assert other.item() == pytest.approx(loss.item(), rel=0.03 if dtype is torch.bfloat16 else 1e-5)


def blobs(b):
    """A soft blob somewhere, on grey."""
    y, x = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    centre = torch.rand(b, 2, 1, 1) * 12
    return (-((x - centre[:, 0]) ** 2 + (y - centre[:, 1]) ** 2) / 30).exp()[:, None] * 2 - 0.7


@pytest.mark.parametrize(("make", "normalise", "steps"), [(PatchEmbed, False, 140), (ShiftedPatchEmbed, True, 70)])
def test_it_learns(make, normalise, steps):
    """On blobs that it has not seen it is better than the best guess of who sees nothing."""
    model = ViT((12, 12), 1, 5, dim=24, depth=1, heads=3, tokenizer=partial(make, patch=4))
    mae = MAE(model, ratio=0.5, decoder_dim=32, decoder_depth=1, normalise=normalise)
    groups, _ = decay_groups(mae, 0.01)
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        mae(batch_of(blobs(32)), 0.0)["loss"].backward()
        optimizer.step()
    images = blobs(256)
    blind = torch.zeros(256, 5, 16) if normalise else images.mean().expand(256, 5, 16)
    mae.eval()
    assert mae(batch_of(images), 1.0)["loss"] < 0.6 * mae.error(blind, images, mae.hide(images)[1])
