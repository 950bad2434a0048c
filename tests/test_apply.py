"""apply: a finished model, ours or timm's, with its tokens reduced; a new model, and nothing patched."""

import copy
from functools import partial

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer

from smallvit import (
    LayerContext,
    LearnedPrune,
    LearnedThresholds,
    MeanTokens,
    Merge,
    PatchEmbed,
    Pixels,
    Prune,
    SmallCNN,
    ViT,
    apply,
)

TINY = partial(ViT, (28, 28), 1, 5, dim=24, depth=3, heads=3, tokenizer=partial(PatchEmbed, patch=4))
THEIRS = partial(VisionTransformer, img_size=28, patch_size=4, in_chans=1, num_classes=5, embed_dim=24, depth=3, num_heads=3)
REDUCING = {
    "merge": partial(Merge, r=6),
    "prune": partial(Prune, keep=0.6),
    "learned prune": partial(LearnedPrune, keep=0.6),
    "thresholds": partial(LearnedThresholds, merge=0.5, prune=0.9),
}
OPTIONS = {
    "plain": dict(),
    "layer scale": dict(init_values=0.3),
    "qk-norm": dict(qk_norm=True),
    "registers": dict(reg_tokens=4),
    "registers without positions": dict(reg_tokens=2, no_embed_class=True),
    "mean": dict(global_pool="avg", class_token=False),
    "mean beside a class token": dict(global_pool="avg"),
    "mean, norm before": dict(global_pool="avg", class_token=False, fc_norm=False),
    "all": dict(init_values=0.3, qk_norm=True, reg_tokens=4),
}
reducing = pytest.mark.parametrize("kind", REDUCING)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def x():
    return torch.randn(2, 1, 28, 28)


def perturbed(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


# Ours


@reducing
def test_the_model_is_left_bit_for_bit_and_the_new_one_has_its_weights(kind, x):
    model = perturbed(TINY())
    before, state = model(x), copy.deepcopy(model.state_dict())
    new = apply(model, REDUCING[kind])
    assert type(new) is ViT and not torch.allclose(new(x), before, atol=1e-4)
    assert torch.equal(model(x), before) and all(block.reduction is None for block in model.blocks)
    assert model.state_dict().keys() == state.keys() and all(
        torch.equal(state[name], model.state_dict()[name]) for name in state
    )
    assert all(torch.equal(state[name], new.state_dict()[name]) for name in state)
    assert not {id(p) for p in new.parameters()} & {id(p) for p in model.parameters()}


@reducing
def test_twice_is_once_and_none_takes_it_out(kind, x):
    model = perturbed(TINY())
    new = apply(model, REDUCING[kind])
    twice = apply(apply(model, partial(Prune, keep=0.3)), REDUCING[kind])
    twice.load_state_dict(new.state_dict())  # a predictor that learns starts anew
    assert torch.equal(twice(x), new(x))
    assert torch.equal(apply(new, None)(x), model(x)) and not torch.equal(new(x), model(x))
    other = apply(new, partial(Merge, r=2))
    assert other.tokens(x)[0].shape[1] == 50 - 6 and torch.equal(other(x), apply(model, partial(Merge, r=2))(x))


@reducing
def test_it_is_the_model_that_was_built_with_it(kind, x):
    built = perturbed(TINY(reduction=REDUCING[kind], registers=2, pool=MeanTokens))
    new = apply(apply(built, None), REDUCING[kind])
    new.load_state_dict(built.state_dict())
    assert torch.equal(new(x), built(x))


@reducing
@pytest.mark.parametrize("training", [True, False])
def test_mode_and_precision_are_the_models(kind, training):
    model = TINY().train(training).to(torch.bfloat16)
    new = apply(model, REDUCING[kind])
    assert all(module.training == training for module in new.modules())
    assert {p.dtype for p in new.parameters()} == {torch.bfloat16}
    assert new.eval()(torch.randn(2, 1, 28, 28).bfloat16()).isfinite().all()


def test_the_reduction_is_told_its_place():
    told = []
    apply(TINY(registers=2), lambda place: told.append(place) or Merge(place, r=1))
    assert told == [LayerContext(layer, 3, 24, 3, True, 49) for layer in range(3)]
    apply(TINY(pool=MeanTokens), lambda place: told.append(place) or Merge(place))
    assert told[-1] == LayerContext(2, 3, 24, 0, False, 49)


@reducing
def test_a_reduced_model_is_copied_saved_and_exported(kind, x):
    new = apply(perturbed(TINY()), REDUCING[kind])
    again = apply(TINY().eval(), REDUCING[kind])
    again.load_state_dict(new.state_dict())
    assert torch.equal(copy.deepcopy(new)(x), new(x)) and torch.equal(again(x), new(x))


# timm's


@pytest.mark.parametrize("option", OPTIONS)
def test_a_timm_model_reduced_by_nothing_gives_timms_logits(option, x):
    theirs = perturbed(THEIRS(**OPTIONS[option]))
    state = copy.deepcopy(theirs.state_dict())
    with torch.no_grad():
        expected = theirs(x)
        new = apply(theirs, partial(Merge, r=0))
        assert (new(x) - expected).abs().max() < 1e-5 and type(new) is ViT
        assert (apply(theirs, None)(x) - expected).abs().max() < 1e-5
        for kind in REDUCING:
            assert (apply(theirs, REDUCING[kind])(x) - expected).abs().max() > 1e-4, kind
        assert torch.equal(theirs(x), expected)
    assert all(torch.equal(state[name], value) for name, value in theirs.state_dict().items())


@pytest.mark.parametrize("option", ["registers", "mean beside a class token", "all"])
def test_what_is_no_patch_in_a_timm_model_is_never_merged(option, x):
    theirs = perturbed(THEIRS(**OPTIONS[option]))
    new, prefix = apply(theirs, partial(Merge, r=99)), theirs.num_prefix_tokens
    _, size = new.tokens(x)
    assert (size[:, :prefix] == 1).all() and torch.equal(size.sum(1), torch.full((2,), prefix + 49.0))
    assert size.shape[1] == prefix + 49 - 24 - 12 - 6


def test_duplicates_in_a_timm_model_merge_without_a_trace():
    """Layer scale, qk-norm and registers in place: equal patches merged are as good as apart."""
    theirs = perturbed(THEIRS(img_size=(28, 32), **OPTIONS["all"])).double()
    theirs.pos_embed.data.zero_()
    new = apply(theirs, partial(Merge, r=(28, 0, 0)))
    x = torch.randn(2, 1, 28, 16).double().unflatten(-1, (4, 4)).repeat_interleave(2, dim=-2).flatten(-2)
    assert new.tokens(x)[0].shape[1] == 5 + 28 and (new(x) - theirs(x)).abs().max() < 1e-10


def test_a_named_timm_model_has_the_tokens_of_the_paper():
    theirs = timm.create_model("vit_tiny_patch16_224", num_classes=3).eval()
    _, size = apply(theirs, partial(Merge, r=16)).tokens(torch.randn(1, 3, 224, 224))
    assert size.shape == (1, 197 - 11 * 16 - 10)  # the last layer has 20 patches left: no more than 10 merges


def test_a_reduction_that_is_made_already_is_refused():
    with pytest.raises(ValueError, match="reduction is a Merge that is made already; expected a class"):
        apply(TINY(), Merge(LayerContext(), r=6))


@pytest.mark.parametrize("make", [partial(Pixels, (8, 8), 1, 3), partial(SmallCNN, (8, 8), 1, 3)], ids=["pixels", "cnn"])
def test_another_kind_of_model_is_refused(make):
    with pytest.raises(ValueError, match=f"this timm model has the class {make.func.__name__}"):
        apply(make(), Merge)
