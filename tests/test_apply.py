"""apply: a copy of a trained model, ours or timm's, with merging or pruning of tokens."""

import copy
from functools import partial

import numpy as np
import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from toys import randomize, slow_but

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
TIMM = partial(VisionTransformer, img_size=28, patch_size=4, in_chans=1, num_classes=5, embed_dim=24, depth=3, num_heads=3)
REDUCTIONS = {
    "merge": partial(Merge, r=6),
    "prune": partial(Prune, keep=0.6),
    "learned prune": partial(LearnedPrune, keep=0.6),
    "thresholds": partial(LearnedThresholds, merge=0.5, prune=0.9),
}
TIMM_OPTIONS = {
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
each_reduction = pytest.mark.parametrize("reduction", REDUCTIONS.values(), ids=REDUCTIONS)


@pytest.fixture
def x():
    return torch.randn(2, 1, 28, 28)


def random_weights(model):
    return randomize(model).eval()


def assert_state(model, state):
    """The model has the weights of this state dict; it may have others too."""
    weights = model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in state.items())


# A ViT


@each_reduction
def test_apply_returns_a_copy_with_equal_weights_and_leaves_the_model_unchanged(reduction, x):
    model = random_weights(TINY())
    before, state = model(x), copy.deepcopy(model.state_dict())
    new = apply(model, reduction)
    assert type(new) is ViT and not torch.allclose(new(x), before, atol=1e-4)
    assert torch.equal(model(x), before) and all(block.reduction is None for block in model.blocks)
    assert model.state_dict().keys() == state.keys()
    assert_state(model, state)
    assert_state(new, state)
    assert not {id(p) for p in new.parameters()} & {id(p) for p in model.parameters()}


@each_reduction
def test_apply_replaces_a_reduction_and_none_removes_it(reduction, x):
    model = random_weights(TINY())
    new = apply(model, reduction)
    twice = apply(apply(model, partial(Prune, keep=0.3)), reduction)
    twice.load_state_dict(new.state_dict())  # a learned predictor is initialized anew
    assert torch.equal(twice(x), new(x))
    assert torch.equal(apply(new, None)(x), model(x)) and not torch.equal(new(x), model(x))
    other = apply(new, partial(Merge, r=2))
    assert other.tokens(x)[0].shape[1] == 50 - 6 and torch.equal(other(x), apply(model, partial(Merge, r=2))(x))


@each_reduction
def test_result_equals_a_model_built_with_the_reduction(reduction, x):
    built = random_weights(TINY(reduction=reduction, registers=2, pool=MeanTokens))
    new = apply(apply(built, None), reduction)
    new.load_state_dict(built.state_dict())
    assert torch.equal(new(x), built(x))


@each_reduction
@pytest.mark.parametrize("training", [True, False])
def test_copy_keeps_mode_and_precision(reduction, training):
    model = TINY().train(training).to(torch.bfloat16)
    new = apply(model, reduction)
    assert all(module.training == training for module in new.modules())
    assert {p.dtype for p in new.parameters()} == {torch.bfloat16}
    assert new.eval()(torch.randn(2, 1, 28, 28).bfloat16()).isfinite().all()


def test_learned_reduction_is_initialized_as_in_a_model_built_with_it():
    applied, built = apply(TINY(), LearnedPrune), TINY(reduction=LearnedPrune)
    biases = {name: weight for name, weight in built.named_parameters() if "reduction" in name and name.endswith("bias")}
    assert biases and all(torch.equal(applied.get_parameter(name), bias) for name, bias in biases.items())


def test_reduction_gets_the_context_of_its_layer():
    contexts = []
    apply(TINY(registers=2), lambda context: contexts.append(context) or Merge(context, r=1))
    assert contexts == [LayerContext(layer, 3, 24, 3, True, 49) for layer in range(3)]
    apply(TINY(pool=MeanTokens), lambda context: contexts.append(context) or Merge(context))
    assert contexts[-1] == LayerContext(2, 3, 24, 0, False, 49)


@each_reduction
def test_reduced_model_can_be_copied_and_saved(reduction, x):
    new = apply(random_weights(TINY()), reduction)
    again = apply(TINY().eval(), reduction)
    again.load_state_dict(new.state_dict())
    assert torch.equal(copy.deepcopy(new)(x), new(x)) and torch.equal(again(x), new(x))


# A model of timm


@pytest.mark.parametrize("option", slow_but(("plain", "registers", "all"), TIMM_OPTIONS))
def test_timm_model_with_a_reduction_that_is_off_gives_equal_logits(option, x):
    theirs = random_weights(TIMM(**TIMM_OPTIONS[option]))
    state = copy.deepcopy(theirs.state_dict())
    with torch.no_grad():
        expected = theirs(x)
        new = apply(theirs, partial(Merge, r=0))
        assert (new(x) - expected).abs().max() < 1e-5 and type(new) is ViT
        assert (apply(theirs, None)(x) - expected).abs().max() < 1e-5
        for name, reduction in REDUCTIONS.items():
            assert (apply(theirs, reduction)(x) - expected).abs().max() > 1e-4, name
        assert torch.equal(theirs(x), expected)
    assert_state(theirs, state)


@pytest.mark.parametrize("option", ["registers", "mean beside a class token", "all"])
def test_prefix_tokens_of_a_timm_model_are_never_merged(option, x):
    theirs = random_weights(TIMM(**TIMM_OPTIONS[option]))
    new, prefix = apply(theirs, partial(Merge, r=99)), theirs.num_prefix_tokens
    _, size = new.tokens(x)
    assert (size[:, :prefix] == 1).all() and torch.equal(size.sum(1), torch.full((2,), prefix + 49.0))
    assert size.shape[1] == prefix + 49 - 24 - 12 - 6


def test_merging_equal_patches_of_a_timm_model_keeps_its_logits():
    """With LayerScale, qk-norm and registers."""
    theirs = random_weights(TIMM(img_size=(28, 32), **TIMM_OPTIONS["all"])).double()
    theirs.pos_embed.data.zero_()
    new = apply(theirs, partial(Merge, r=(28, 0, 0)))
    x = torch.randn(2, 1, 28, 16).double().unflatten(-1, (4, 4)).repeat_interleave(2, dim=-2).flatten(-2)
    assert new.tokens(x)[0].shape[1] == 5 + 28 and (new(x) - theirs(x)).abs().max() < 1e-10


def test_named_timm_model_keeps_as_many_tokens_as_in_the_paper():
    theirs = timm.create_model("vit_tiny_patch16_224", num_classes=3).eval()
    _, size = apply(theirs, partial(Merge, r=16)).tokens(torch.randn(1, 3, 224, 224))
    assert size.shape == (1, 197 - 11 * 16 - 10)  # the last layer has 20 patches, so at most 10 merges


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: apply(TINY(), Merge(LayerContext(), r=6)), "reduction is a .*Merge.*; expected a class"),
        (lambda: apply(TINY(), None, np.zeros((2, 1, 8, 8))), "timed_on is ndarray; expected a tensor of images as floats"),
        (lambda: apply(TINY(), None, torch.zeros((2, 1, 8, 8), dtype=torch.uint8)), r"timed_on is torch.uint8 \(2, 1, 8, 8\); "),
        (lambda: apply(Pixels((8, 8), 1, 3), Merge), r"got a Pixels; expected .* of timm \(vit_\*\), or for `apply` also a ViT"),
        (lambda: apply(SmallCNN((8, 8), 1, 3), Merge), "got a SmallCNN; expected a plain Vision Transformer"),
    ],
)
def test_instances_and_other_models_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
