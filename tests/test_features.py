"""Features by name: where they are read off, of any model, and as a transformer of scikit-learn."""

import copy
import io
import pickle
from contextlib import redirect_stderr
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from smallvit import (
    ClassToken,
    Images,
    LearnedThresholds,
    MeanTokens,
    Merge,
    PatchEmbed,
    Pixels,
    SequencePool,
    SmallCNN,
    Splits,
    ViT,
    data,
    features,
    initialize,
    knn,
    linear_probe,
)
from smallvit.evaluate import FeatureExtractor, few_shot
from smallvit.pretrained import apply, from_timm

NAMED = [
    {"of": "class token"},
    {"of": "mean"},
    {"of": "both"},
    {"of": "both", "layers": 3},
    {"of": "mean", "layers": 2, "norm": "before"},
    {"of": "class token", "layers": 3, "norm": "before"},
]


def images(n=6, channels=1, size=(8, 8), seed=0) -> Images:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (n, channels, *size), generator=generator, dtype=torch.uint8)
    spec = data.DataSpec(
        name="noise", channels=channels, size=size, classes=tuple("abc"), mean=(0.4,) * channels, std=(0.3,) * channels
    )
    return Images(pixels, torch.arange(n) % 3, spec)


def seen(pictures: Images) -> torch.Tensor:
    return pictures.spec.normalise(pictures.pixels())


def stirred(model: nn.Module) -> nn.Module:
    """All weights random, norms and tokens too, so that nothing is the identity by chance."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def vit(channels=1, size=(8, 8), **choices) -> ViT:
    return stirred(
        ViT(
            size,
            channels,
            3,
            tokenizer=partial(PatchEmbed, patch=2),
            dim=16,
            depth=3,
            heads=2,
            dropout=0.5,
            drop_path=0.5,
            **choices,
        )
    )


def timm_vit(name="vit_tiny_patch16_224", channels=1, size=(8, 8), **choices):
    import timm

    chosen = {
        "img_size": size,
        "patch_size": 2,
        "in_chans": channels,
        "num_classes": 3,
        "embed_dim": 24,
        "depth": 5,
        "num_heads": 2,
    }
    return stirred(timm.create_model(name, **(chosen | choices)))


# Our models, by hand


def by_hand(model: ViT, x, of="head", layers=1, norm="after"):
    """Block by block and token by token, from the definition."""
    model.eval()
    with torch.no_grad():
        x = torch.cat([model.prefix.expand(len(x), -1, -1), model.tokenizer(x)], dim=1)
        x, size, columns = x + model.position.table, None, []
        for block in model.blocks:
            x, size = block(x, size)
            p, parts = len(model.prefix), []
            after = model.norm if norm == "after" else nn.Identity()
            before_pool, behind_pool = (nn.Identity(), after) if model.norm_after_pool else (after, nn.Identity())
            if of in ("class token", "both"):
                parts.append(after(x[:, 0]))
            if of in ("mean", "both"):
                means = []
                for tokens, weights in zip(before_pool(x), torch.ones(x.shape[:2]) if size is None else size):
                    total = sum(float(w) * token for token, w in zip(tokens[p:], weights[p:]))
                    means.append(total / sum(float(w) for w in weights[p:]))
                parts.append(behind_pool(torch.stack(means)))
            columns.append(torch.cat(parts, dim=1))
    return torch.cat(columns[-layers:], dim=1).numpy()


@pytest.mark.parametrize("named", NAMED, ids=str)
@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"registers": 2},
        {"norm_after_pool": True},
        {"reduction": partial(Merge, r=3)},
        {"reduction": partial(Merge, r=3), "registers": 1, "norm_after_pool": True},
        {"reduction": partial(LearnedThresholds, merge=0.3, prune=0.1)},
    ],
    ids=["plain", "registers", "norm after pool", "merging", "merging, registers, norm after pool", "thresholds"],
)
def test_named_features_of_a_vit_are_what_their_names_say(choices, named):
    model, pictures = vit(**choices), images()
    found = features(model.train(), pictures, **named)
    assert found.dtype == np.float32 and found.shape[0] == 6 and found.flags.writeable
    assert np.allclose(found, by_hand(model, seen(pictures), **named), atol=1e-4)


def test_merged_tokens_weigh_what_they_stand_for():
    pictures, model = images(), vit(reduction=partial(Merge, r=5))
    with torch.no_grad():
        tokens, size = model.eval().tokens(seen(pictures))
    assert size.max() > 2
    plain = tokens[:, 1:].mean(1).numpy()
    assert np.abs(features(model, pictures, of="mean") - plain).max() > 0.01


@pytest.mark.parametrize("behind", [False, True], ids=["norm before pool", "norm after pool"])
def test_the_head_sees_what_the_pool_gives_it(behind):
    pictures = images()
    for pool, name in ((ClassToken, "class token"), (MeanTokens, "mean")):
        model = vit(pool=pool, norm_after_pool=behind, registers=1, reduction=partial(Merge, r=3))
        assert np.allclose(features(model, pictures), features(model, pictures, of=name), atol=1e-5)
        with torch.no_grad():
            assert torch.allclose(
                model.head(torch.from_numpy(features(model, pictures))), model.eval()(seen(pictures)), atol=1e-5
            )
    model = vit(pool=SequencePool, norm_after_pool=behind)
    assert features(model, pictures, of="mean").shape == features(model, pictures).shape == (6, 16)
    assert not np.allclose(features(model, pictures, of="mean"), features(model, pictures), atol=1e-2)


def test_both_is_class_token_and_mean_and_layers_come_in_order_of_depth():
    model, pictures = vit(), images()
    token, mean, both = (features(model, pictures, of=of, layers=2) for of in ("class token", "mean", "both"))
    assert np.array_equal(both, np.concatenate([token[:, :16], mean[:, :16], token[:, 16:], mean[:, 16:]], axis=1))
    assert np.array_equal(token[:, 16:], features(model, pictures, of="class token"))


@pytest.mark.parametrize("channels, size", [(1, (8, 8)), (3, (8, 12)), (4, (10, 6))], ids=str)
@pytest.mark.parametrize("make", [vit, timm_vit])
def test_any_channels_and_rectangles(make, channels, size):
    pictures = images(channels=channels, size=size)
    for named in ({}, *NAMED[:3]):
        found = features(make(channels=channels, size=size), pictures, **named)
        assert found.shape[0] == 6 and np.ptp(found, axis=0).min() > 0


def test_images_of_another_size_than_the_model_was_built_for():
    model, pictures = vit(), images(size=(12, 8))
    assert features(model, pictures, of="both").shape == features(model, images(), of="both").shape


@pytest.mark.parametrize("pool", [MeanTokens, SequencePool])
def test_a_class_token_that_is_not_there_is_not_made_up(pool):
    for registers in (0, 2):
        for of in ("class token", "both"):
            with pytest.raises(ValueError, match="no class token; expected of='mean'"):
                features(vit(pool=pool, registers=registers), images(), of=of)
    with pytest.raises(ValueError, match="no class token; expected of='mean'"):
        features(timm_vit(class_token=False, global_pool="avg"), images(), of="both")


@pytest.mark.parametrize(
    "named, said",
    [
        ({"of": "cls"}, "of is 'cls'.*expected of 'head', 'class token', 'mean', 'both'"),
        ({"of": "mean", "norm": "none"}, "norm 'none'; expected .* 'after' or 'before'"),
        ({"of": "mean", "layers": 0}, "layers is 0; expected from 1 to 3"),
        ({"of": "mean", "layers": 4}, "layers is 4; expected from 1 to 3"),
        ({"layers": 2}, "the head sees one feature only"),
        ({"norm": "before"}, "the head sees one feature only"),
    ],
    ids=str,
)
def test_names_that_mean_nothing_are_refused(named, said):
    with pytest.raises(ValueError, match=said):
        features(vit(), images(), **named)


# timm's models


TIMMS = {
    "plain": {},
    "no classifier": {"num_classes": 0},
    "registers": {"reg_tokens": 2},
    "mean pool": {"global_pool": "avg"},
    "layer scale": {"init_values": 0.5},
}


@pytest.mark.parametrize("choices", TIMMS.values(), ids=TIMMS)
def test_features_of_a_timm_vit_are_timms_own(choices):
    model, pictures = timm_vit(**choices), images()
    model.eval()
    with torch.no_grad():
        head = model.forward_head(model.forward_features(seen(pictures)), pre_logits=True)
        plain = model.get_intermediate_layers(seen(pictures), n=4, return_prefix_tokens=True)
        normed = model.get_intermediate_layers(seen(pictures), n=4, return_prefix_tokens=True, norm=True)
    found = partial(features, model.train(), pictures)
    assert np.allclose(found(), head, atol=1e-5)
    assert np.allclose(found(of="class token", layers=4, norm="before"), torch.cat([p[:, 0] for _, p in plain], 1), atol=1e-5)
    assert np.allclose(found(of="mean", layers=4, norm="before"), torch.cat([x.mean(1) for x, _ in plain], 1), atol=1e-5)
    if "global_pool" not in choices:  # there timm's norm is behind the pool, and get_intermediate_layers leaves it out
        assert np.allclose(found(of="class token", layers=4), torch.cat([p[:, 0] for _, p in normed], 1), atol=1e-5)
        assert np.allclose(found(of="mean", layers=4), torch.cat([x.mean(1) for x, _ in normed], 1), atol=1e-5)
    else:
        assert np.allclose(found(of="mean"), head, atol=1e-5)


@pytest.mark.parametrize("choices", [TIMMS[name] for name in TIMMS if name != "no classifier"], ids=str)
def test_a_timm_vit_and_its_translation_have_the_same_features(choices):
    model, pictures = timm_vit(**choices), images()
    twin = from_timm(model)
    for named in ({}, *NAMED):
        if twin.pool.class_tokens or named.get("of") == "mean":
            assert np.allclose(features(model, pictures, **named), features(twin, pictures, **named), atol=1e-4)


@pytest.mark.parametrize(
    "name, choices",
    [
        ("beit_base_patch16_224", {}),
        ("eva02_tiny_patch14_224", {}),
        ("vit_base_patch16_clip_224", {}),
        ("vit_small_patch16_dinov3", {"embed_dim": 48}),
        ("vit_relpos_small_patch16_224", {}),
    ],
    ids=str,
)
def test_other_vits_of_timm_have_named_tokens_too(name, choices):
    model = timm_vit(name, **choices)
    of = "mean" if model.num_prefix_tokens == 0 else "both"
    assert features(model, images(), of=of, layers=2).shape == (6, model.embed_dim * (2 if of == "mean" else 4))


@pytest.mark.parametrize("name", ["resnet10t", "densenet121", "convnext_atto"])
def test_other_models_of_timm_are_read_before_their_head(name):
    """DenseNet has layers called `features`, which give a map and not what its head sees."""
    import timm

    narrow = {
        "resnet10t": {"stem_width": 8, "channels": (8, 8, 16, 16)},
        "convnext_atto": {"dims": (8, 8, 16, 16)},
        "densenet121": {},
    }[name]
    model, pictures = timm.create_model(name, in_chans=3, num_classes=3, **narrow), images(channels=3, size=(32, 32))
    found = features(model.train(), pictures)
    assert isinstance(getattr(model, "features", None), nn.Module) == (name == "densenet121") and model.training
    with torch.no_grad():
        wanted = model.eval().forward_head(model.forward_features(seen(pictures)), pre_logits=True)
    assert found.ndim == 2 and np.allclose(found, wanted, atol=1e-5)
    with pytest.raises(ValueError, match="no tokens with a name"):
        features(model, pictures, of="mean")


# Any module


class Encoder(nn.Module):
    """A module of somebody else, which says nothing about its features."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(144, 5))

    def forward(self, x):
        return self.body(x)


class Map(Encoder):
    """Its features are layers that give a map, as those of many convolutional models."""

    def __init__(self):
        super().__init__()
        self.features = self.body[:2]


def test_a_map_is_not_taken_for_features():
    said = r"Map gave features of shape \(6, 4, 6, 6\) for 6 images; expected b d.*pool them"
    with pytest.raises(ValueError, match=said):
        features(Map(), images())
    model = Map()
    model.features = model.body
    assert features(model, images()).shape == (6, 5)  # layers that do give b d


def test_torchvisions_layers_called_features_are_refused_where_they_give_a_map():
    from torchvision.models import squeezenet1_1

    with pytest.raises(ValueError, match=r"SqueezeNet gave features of shape \(2, 512, 1, 1\)"):
        features(squeezenet1_1(), images(2, 3, (32, 32)))


@pytest.mark.parametrize(
    "given, got", [(lambda x: x.sum(), r"shape \(\)"), (lambda x: x[:3].flatten(1), "shape"), (lambda x: [x], "a list")]
)
def test_what_is_not_a_row_for_each_image_is_refused(given, got):
    model = Encoder()
    model.features = given
    with pytest.raises(ValueError, match=f"Encoder gave features of {got}.* for 6 images; expected b d"):
        features(model, images())


def test_a_module_without_features_says_what_to_do():
    with pytest.raises(ValueError, match=r"expected a method features\(x\).*FeatureExtractor\(model, features="):
        features(Encoder(), images())
    with pytest.raises(ValueError, match=r"Encoder has no tokens with a name"):
        features(Encoder(), images(), of="mean")


def test_features_that_are_not_finite_are_refused():
    model = vit()
    with torch.no_grad():
        model.head.weight.fill_(float("nan"))
        assert np.isfinite(features(model, images())).all()
        model.norm.weight.fill_(float("inf"))
    with pytest.raises(ValueError, match="features of 6 of 6 images are not finite; expected a model that has not diverged"):
        features(model, images())


# The model afterwards

KINDS = {
    "vit": (vit, {"of": "both", "layers": 2}),
    "vit that merges": (partial(vit, reduction=partial(Merge, r=3), registers=1), {"of": "both", "layers": 3}),
    "timm vit": (timm_vit, {"of": "both", "layers": 4}),
    "applied to timm": (lambda: apply(timm_vit(), partial(Merge, r=2)), {"of": "mean"}),
    "small cnn": (lambda: stirred(SmallCNN((8, 8), 1, 3, width=4, hidden=8)), {}),
    "pixels": (lambda: Pixels((8, 8), 1, 3), {}),
}


def state(model):
    """Everything about a model that an evaluator could leave behind."""
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [(module.training, len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    return kept, modes, [(p.requires_grad, p.grad) for p in model.parameters()], torch.get_rng_state().tolist()


def same(before, after) -> bool:
    equal = before[0].keys() == after[0].keys() and all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    return equal and before[1:] == after[1:]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("evaluator", [knn, linear_probe, partial(few_shot, shots=4)], ids=["knn", "linear_probe", "few_shot"])
def test_probing_leaves_the_model_as_it_was_and_gives_the_same_bits_again(kind, evaluator):
    make, named = KINDS[kind]
    model, pictures = make().train(), images(60)
    for module in list(model.modules())[1::3]:
        module.training = False
    splits = Splits(*(pictures.take(slice(at, at + 20)) for at in (0, 20, 40)))
    before = state(model)
    first = list(evaluator(model, splits, **named))
    assert same(before, state(model))
    torch.manual_seed(1)
    assert list(evaluator(copy.deepcopy(model).eval(), splits, **named)) == first


def test_hooks_go_even_when_the_model_raises():
    model = vit()
    model.blocks[2].mlp = nn.Identity()  # stops at the block behind those that are read
    model.norm = nn.Linear(3, 3)
    before = state(model)
    with pytest.raises(RuntimeError):
        features(model, images(), of="mean", layers=3)
    assert same(before, state(model)) and torch.is_grad_enabled()


# As a transformer of scikit-learn


def test_the_extractor_gives_the_features():
    model, pictures = vit(), images(40)
    for named in ({}, *NAMED):
        found = FeatureExtractor(model, **named, batch=7).fit_transform(pictures)
        assert found.dtype == np.float32 and np.allclose(found, features(model, pictures, **named), atol=1e-5)
    assert np.array_equal(FeatureExtractor(model).transform(pictures), features(model, pictures))


def test_arrays_and_tensors_are_normalised_as_their_spec_says():
    model, pictures = vit(), images(9)
    raw, spec = pictures.images.numpy(), pictures.spec
    wanted = features(model, pictures)
    for given in (
        raw,
        pictures.images,
        raw[:, 0],
        raw / 255,
        (raw / 255).astype(np.float32),
        pictures.pixels(),
        raw[::-1][::-1],
    ):
        assert np.allclose(FeatureExtractor(model, spec=spec).fit_transform(given), wanted, atol=1e-5)
    ready = seen(pictures)
    for given in (ready, ready[:, 0], ready.double().numpy()):
        assert np.allclose(FeatureExtractor(model, spec="normalised").transform(given), wanted, atol=1e-5)
    assert not np.allclose(FeatureExtractor(model, spec="normalised").transform(raw / 255), wanted, atol=1e-2)


def test_a_spec_of_the_model_goes_before_that_of_the_images():
    model, pictures = vit(), images(9)
    other = data.DataSpec(name="o", channels=1, size=(8, 8), classes=("a",), mean=(0.0,), std=(1.0,))
    found = FeatureExtractor(model, spec=other).transform(pictures)
    assert np.allclose(found, FeatureExtractor(model, spec="normalised").transform(pictures.pixels()), atol=1e-5)
    assert not np.allclose(found, features(model, pictures), atol=1e-2)


@pytest.mark.parametrize(
    "given, choices, said",
    [
        (np.zeros((5, 64)), {}, r"got shape \(5, 64\); expected Images, or an array or tensor n c h w or n h w: reshape"),
        ([[0.0] * 64], {}, "got a list; expected Images"),
        (np.zeros((5, 1, 8, 8)), {"spec": None}, "spec=None; expected the DataSpec .* or 'normalised'"),
        (np.zeros((5, 1, 8, 8), np.uint8), {"spec": None}, "spec=None; expected the DataSpec .* or 'normalised'"),
        (np.zeros((5, 1, 8, 8)), {"spec": "mnist"}, "spec='mnist'; expected the DataSpec"),
        (np.zeros((5, 1, 8, 8), np.uint8), {"spec": "normalised"}, "torch.uint8 with spec='normalised'; expected floats"),
        (np.full((5, 1, 8, 8), 255.0), {}, r"from 255.0 to 255.0; expected uint8, or floats in \[0, 1\]"),
        (np.full((5, 1, 8, 8), -0.1), {}, r"expected uint8, or floats in \[0, 1\]"),
        (np.full((5, 1, 8, 8), np.nan), {}, r"expected uint8, or floats in \[0, 1\]"),
        (np.full((5, 1, 8, 8), 200), {}, r"got torch.int64 from 200 to 200; expected uint8"),
        (np.zeros((5, 8, 8, 1), np.uint8), {}, r"\(5, 8, 8, 1\); expected n 1 h w, channels first"),
        (np.zeros((5, 3, 8, 8), np.uint8), {}, r"\(5, 3, 8, 8\); expected n 1 h w"),
        (np.zeros((0, 1, 8, 8), np.uint8), {}, "no images to evaluate"),
        (np.zeros((5, 1, 8, 8), np.uint8), {"model": None}, r"the model is None; expected FeatureExtractor\(model\)"),
        (np.zeros((5, 1, 8, 8), np.uint8), {"batch": 0}, "batch is 0; expected how many images"),
        (np.zeros((5, 1, 8, 8), np.uint8), {"of": "cls"}, "of is 'cls'"),
        (
            np.zeros((5, 1, 8, 8), np.uint8),
            {"features": lambda model, x: x, "of": "mean"},
            "features= beside of, layers or norm",
        ),
        (np.zeros((5, 1, 8, 8), np.uint8), {"features": lambda model, x: x}, r"gave features of shape \(\d, 1, 8, 8\)"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_is_not_images_or_not_known_to_be_right_is_refused(given, choices, said):
    extractor = FeatureExtractor(**({"model": vit(), "spec": images().spec} | choices))
    for act in (extractor.fit, extractor.transform):
        with pytest.raises(ValueError, match=said):
            act(given)


def test_any_module_with_a_function():
    model, pictures = Encoder().train(), images(30)
    at_once = []
    extractor = FeatureExtractor(model, features=lambda model, x: at_once.append(len(x)) or model.body[:4](x), batch=11)
    before = state(model)
    found = extractor.fit_transform(pictures)
    assert same(before, state(model)) and found.shape == (30, 144) and at_once == [1, 11, 11, 8]
    with torch.no_grad():
        assert np.allclose(found, model.eval().body[:4](seen(pictures)), atol=1e-5)


def test_it_is_an_estimator_to_scikit_learn():
    from sklearn.base import clone
    from sklearn.utils import get_tags
    from sklearn.utils.validation import check_is_fitted

    model, spec = vit(), images().spec
    extractor = FeatureExtractor(model, of="mean", spec=spec)
    chosen = {"model": model, "of": "mean", "layers": 1, "norm": "after", "batch": 1024, "features": None, "spec": spec}
    assert extractor.get_params() == extractor.get_params(deep=False) == chosen
    twin = clone(extractor.fit(images()))
    assert (
        twin is not extractor and twin.get_params() == chosen and twin.model is model and not hasattr(twin, "n_features_out_")
    )
    assert extractor.set_params(layers=2, of="both") is extractor and extractor.get_params() == chosen | {
        "layers": 2,
        "of": "both",
    }
    assert twin.of == "mean" and extractor.set_params() is extractor
    with pytest.raises(ValueError, match="FeatureExtractor has no depth; expected some of model, of, layers"):
        extractor.set_params(depth=3, of="mean")
    assert extractor.of == "both"
    check_is_fitted(extractor)
    tags = get_tags(extractor)
    assert tags.transformer_tags is not None and not tags.requires_fit and not tags.target_tags.required
    assert (
        repr(twin) == "FeatureExtractor(model=ViT, of='mean', spec=DataSpec)"
        and repr(FeatureExtractor()) == "FeatureExtractor()"
    )
    again = pickle.loads(pickle.dumps(extractor))
    assert np.array_equal(again.transform(images()), extractor.transform(images()))


def test_scikit_learns_own_checks_of_what_an_estimator_is_made_with():
    from sklearn.utils import estimator_checks as checks

    for check in (
        checks.check_estimator_cloneable,
        checks.check_estimator_repr,
        checks.check_no_attributes_set_in_init,
        checks.check_get_params_invariance,
        checks.check_set_params,
        checks.check_mixin_order,
        checks.check_valid_tag_types,
    ):
        check("FeatureExtractor", FeatureExtractor())
    checks.check_parameters_default_constructible("FeatureExtractor", FeatureExtractor())


def test_names_of_the_columns_are_known_once_an_image_was_seen():
    extractor = FeatureExtractor(vit(), of="both")
    with pytest.raises(ValueError, match=r"call fit\(images\) first"):
        extractor.get_feature_names_out()
    names = extractor.fit(images()).get_feature_names_out()
    assert names.tolist() == [f"featureextractor{i}" for i in range(32)] and names.dtype == object


def test_it_drops_into_a_pipeline_and_a_search():
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV, cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    digits = data.digits().train.take(slice(0, 200))
    model = initialize(ViT((8, 8), 1, 10, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=2, heads=2), 0)
    X, y, before = digits.images.numpy(), digits.labels.numpy(), state(model)
    pipeline = make_pipeline(FeatureExtractor(model, spec=digits.spec), StandardScaler(), LogisticRegression(max_iter=1000))
    assert pipeline.fit(X[:150], y[:150]).score(X[150:], y[150:]) > 0.3
    assert len(pipeline[:-1].get_feature_names_out()) == 16 and "FeatureExtractor" in pipeline._repr_html_()
    by_hand = StandardScaler().fit(features(model, digits.take(slice(0, 150))))
    rows = by_hand.transform(features(model, digits))
    theirs = LogisticRegression(max_iter=1000).fit(rows[:150], y[:150])
    assert np.allclose(pipeline.predict_proba(X[150:]), theirs.predict_proba(rows[150:]), atol=1e-3)
    search = GridSearchCV(
        pipeline, {"featureextractor__of": ["head", "mean", "both"], "featureextractor__norm": ["after"]}, cv=2
    )
    with redirect_stderr(io.StringIO()) as said:
        search.fit(X, y)
    assert not said.getvalue() and search.best_params_["featureextractor__of"] in ("head", "mean", "both")
    assert len(set(search.cv_results_["mean_test_score"])) > 1
    assert cross_val_score(pipeline, digits.images, y, cv=2).shape == (2,)
    assert same(before, state(model))


def test_a_table_is_refused():
    class DataFrame:
        """What the extractor could see of pandas' own."""

        shape, iloc = (5, 64), property(list)

    for X in (DataFrame(), np.zeros((5, 64))):
        with pytest.raises(ValueError, match=r"got (a DataFrame|shape \(5, 64\)); expected Images"):
            FeatureExtractor(vit(), spec=images().spec).fit(X)


# Pixels, as a reference of all of these


def test_pixels_are_probed_as_they_are_and_have_no_tokens():
    pixels, pictures = Pixels((8, 8), 1, 10), data.digits().train.take(slice(0, 50))
    assert np.array_equal(features(pixels, pictures), seen(pictures).flatten(1).numpy())
    with pytest.raises(ValueError, match="Pixels has no tokens with a name"):
        features(pixels, pictures, of="mean")
