"""Features: they are read at the named place of any model, and `FeatureExtractor` is a scikit-learn transformer."""

import copy
import io
import pickle
from contextlib import redirect_stderr
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import timm
import torch
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import estimator_checks, get_tags
from sklearn.utils.validation import check_is_fitted
from torch import nn
from torchvision.models import squeezenet1_1
from toys import TINY_VIT, randomize, slow_after

from smallvit import data
from smallvit.data import Images
from smallvit.data.images import Rows
from smallvit.evaluate import FeatureExtractor, Splits, features, few_shot, knn, linear_probe
from smallvit.pooling import ClassToken, MeanTokens, SequencePool
from smallvit.pretrained import apply, from_timm
from smallvit.random_weights import initialize
from smallvit.reduction import LearnedThresholds, Merge
from smallvit.references import Pixels, SmallCNN
from smallvit.vit import ViT

PLACES = [
    {"of": "class token"},
    {"of": "mean"},
    {"of": "both"},
    {"of": "both", "layers": 3},
    {"of": "mean", "layers": 2, "norm": "before"},
    {"of": "class token", "layers": 3, "norm": "before"},
]
close = partial(np.allclose, atol=1e-5)


def noise(n=6, channels=1, size=(8, 8)) -> Images:
    pixels = torch.randint(0, 256, (n, channels, *size), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    moments = {"mean": (0.4,) * channels, "std": (0.3,) * channels}
    return Images(pixels, torch.arange(n) % 3, data.DataSpec(name="noise", channels=channels, size=size, classes=tuple("abc"), **moments))


def inputs(images: Images) -> torch.Tensor:
    return images.spec.normalize(images.pixels())


def vit(channels=1, size=(8, 8), **options) -> ViT:
    return randomize(TINY_VIT(size, channels, 3, depth=3, dropout=0.5, drop_path=0.5, **options), 0.3)


def timm_vit(name="vit_tiny_patch16_224", channels=1, size=(8, 8), **options):
    small = {"patch_size": 2, "num_classes": 3, "embed_dim": 24, "depth": 5, "num_heads": 2}
    return randomize(timm.create_model(name, img_size=size, in_chans=channels, **(small | options)), 0.3)


# The ViT of smallvit


def features_by_hand(model: ViT, x, of="head", layers=1, norm="after"):
    """Features of the last blocks from the definition, token by token."""
    model.eval()
    with torch.no_grad():
        x = torch.cat([model.prefix.expand(len(x), -1, -1), model.tokenizer(x)], dim=1)
        x, size, columns = x + model.position.table, None, []
        for block in model.blocks:
            x, size = block(x, size)
            p, parts = len(model.prefix), []
            last_norm = model.norm if norm == "after" else nn.Identity()
            before_pool, after_pool = (nn.Identity(), last_norm) if model.norm_after_pool else (last_norm, nn.Identity())
            if of in ("class token", "both"):
                parts.append(last_norm(x[:, 0]))
            if of in ("mean", "both"):
                means = []
                for tokens, weights in zip(before_pool(x), torch.ones(x.shape[:2]) if size is None else size):
                    total = sum(float(w) * token for token, w in zip(tokens[p:], weights[p:]))
                    means.append(total / sum(float(w) for w in weights[p:]))
                parts.append(after_pool(torch.stack(means)))
            columns.append(torch.cat(parts, dim=1))
    return torch.cat(columns[-layers:], dim=1).numpy()


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize(
    "options",
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
def test_named_features_by_hand(options, place):
    model, images = vit(**options), noise()
    found = features(model.train(), images, **place)
    assert found.dtype == np.float32 and found.shape[0] == 6 and found.flags.writeable
    assert np.allclose(found, features_by_hand(model, inputs(images), **place), atol=1e-4)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_block_that_serves_several_layers_gives_the_features_of_the_last_ones(layers):
    model, images = vit(), noise()
    model.blocks[2] = model.blocks[0]
    place = {"of": "mean", "layers": layers}
    assert np.allclose(features(model, images, **place), features_by_hand(model, inputs(images), **place), atol=1e-4)


def test_in_the_mean_a_merged_token_counts_as_its_patches():
    images, model = noise(), vit(reduction=partial(Merge, r=5))
    with torch.no_grad():
        tokens, size = model.eval().tokens(inputs(images))
    assert size.max() > 2
    assert np.abs(features(model, images, of="mean") - tokens[:, 1:].mean(1).numpy()).max() > 0.01


@pytest.mark.parametrize("norm_after_pool", [False, True])
def test_head_features_are_the_output_of_the_pool(norm_after_pool):
    images = noise()
    for pool, name in ((ClassToken, "class token"), (MeanTokens, "mean")):
        model = vit(pool=pool, norm_after_pool=norm_after_pool, registers=1, reduction=partial(Merge, r=3))
        found = features(model, images)
        assert close(found, features(model, images, of=name))
        with torch.no_grad():
            assert close(model.head(torch.from_numpy(found)), model.eval()(inputs(images)))
    model = vit(pool=SequencePool, norm_after_pool=norm_after_pool)
    assert features(model, images, of="mean").shape == features(model, images).shape == (6, 16)
    assert not np.allclose(features(model, images, of="mean"), features(model, images), atol=1e-2)


def test_both_is_class_token_and_mean_in_the_order_of_layers():
    model, images = vit(), noise()
    token, mean, both = (features(model, images, of=of, layers=2) for of in ("class token", "mean", "both"))
    assert np.array_equal(both, np.concatenate([token[:, :16], mean[:, :16], token[:, 16:], mean[:, 16:]], axis=1))
    assert np.array_equal(token[:, 16:], features(model, images, of="class token"))


@pytest.mark.parametrize("channels, size", [(1, (8, 8)), (3, (8, 12)), (4, (10, 6))], ids=str)
@pytest.mark.parametrize("make", [vit, timm_vit])
def test_any_number_of_channels_and_image_shape(make, channels, size):
    images = noise(channels=channels, size=size)
    for place in ({}, *PLACES[:3]):
        found = features(make(channels=channels, size=size), images, **place)
        assert found.shape[0] == 6 and np.ptp(found, axis=0).min() > 0


def test_images_of_another_size_than_the_model():
    assert features(vit(), noise(size=(12, 8)), of="both").shape == features(vit(), noise(), of="both").shape


# timm's models

TIMM_OPTIONS = {
    "plain": {},
    "no classifier": {"num_classes": 0},
    "registers": {"reg_tokens": 2},
    "mean pool": {"global_pool": "avg"},
    "layer scale": {"init_values": 0.5},
}


@pytest.mark.parametrize("options", TIMM_OPTIONS.values(), ids=TIMM_OPTIONS)
def test_features_of_a_timm_vit_are_those_of_timm(options):
    model, images = timm_vit(**options).eval(), noise()
    with torch.no_grad():
        head = model.forward_head(model.forward_features(inputs(images)), pre_logits=True)
        plain = model.get_intermediate_layers(inputs(images), n=4, return_prefix_tokens=True)
        normed = model.get_intermediate_layers(inputs(images), n=4, return_prefix_tokens=True, norm=True)
    found = partial(features, model.train(), images)
    assert close(found(), head)
    assert close(found(of="class token", layers=4, norm="before"), torch.cat([p[:, 0] for _, p in plain], 1))
    assert close(found(of="mean", layers=4, norm="before"), torch.cat([x.mean(1) for x, _ in plain], 1))
    if "global_pool" not in options:  # else timm's norm is after the pool and get_intermediate_layers leaves it out
        assert close(found(of="class token", layers=4), torch.cat([p[:, 0] for _, p in normed], 1))
        assert close(found(of="mean", layers=4), torch.cat([x.mean(1) for x, _ in normed], 1))
    else:
        assert close(found(of="mean"), head)


@pytest.mark.parametrize("name", [name for name in TIMM_OPTIONS if name != "no classifier"])
def test_a_timm_vit_and_its_conversion_have_the_same_features(name):
    model, images = timm_vit(**TIMM_OPTIONS[name]), noise()
    converted = from_timm(model)
    for place in ({}, *PLACES):
        if converted.pool.class_tokens or place.get("of") == "mean":
            assert np.allclose(features(model, images, **place), features(converted, images, **place), atol=1e-4)


@pytest.mark.parametrize(
    "name, options",
    [
        ("beit_base_patch16_224", {}),
        ("eva02_tiny_patch14_224", {}),
        ("vit_base_patch16_clip_224", {}),
        ("vit_small_patch16_dinov3", {"embed_dim": 48}),
        ("vit_relpos_small_patch16_224", {}),
    ],
    ids=str,
)
def test_other_vits_of_timm_have_named_tokens(name, options):
    model = timm_vit(name, **options)
    of = "mean" if model.num_prefix_tokens == 0 else "both"
    assert features(model, noise(), of=of, layers=2).shape == (6, model.embed_dim * (2 if of == "mean" else 4))


@pytest.mark.parametrize(
    "name, options",
    [
        ("resnet10t", {"stem_width": 8, "channels": (8, 8, 16, 16)}),
        ("densenet121", {}),
        ("convnext_atto", {"dims": (8, 8, 16, 16)}),
    ],
)
def test_other_models_of_timm_have_head_features_only(name, options):
    """DenseNet has layers called `features`, which give a feature map and not the input of the head."""
    model, images = timm.create_model(name, in_chans=3, num_classes=3, **options), noise(channels=3, size=(32, 32))
    found = features(model.train(), images)
    assert isinstance(getattr(model, "features", None), nn.Module) == (name == "densenet121") and model.training
    with torch.no_grad():
        expected = model.eval().forward_head(model.forward_features(inputs(images)), pre_logits=True)
    assert found.ndim == 2 and close(found, expected)
    with pytest.raises(ValueError, match="no named tokens"):
        features(model, images, of="mean")


# Other modules


class Encoder(nn.Module):
    """A module without a method for features."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(144, 5))

    def forward(self, x):
        return self.body(x)


def encoder(layers=slice(None), features=None) -> Encoder:
    """An encoder with a function `features`, or else with some of its layers under this name."""
    model = Encoder()
    model.features = features or model.body[layers]
    return model


def test_layers_called_features_may_give_the_features():
    assert features(encoder(), noise()).shape == (6, 5)


def test_pixels_are_their_own_features():
    images = data.digits().train.take(slice(0, 50))
    assert np.array_equal(features(Pixels((8, 8), 1, 10), images), inputs(images).flatten(1).numpy())


def diverged():
    model = vit()
    with torch.no_grad():
        model.head.weight.fill_(float("nan"))
        assert np.isfinite(features(model, noise())).all()
        model.norm.weight.fill_(float("inf"))
    return model


@pytest.mark.parametrize(
    "make, place, message",
    [
        (vit, {"of": "cls"}, "of is 'cls'.*expected of 'head', 'class token', 'mean', 'both'"),
        (vit, {"of": "mean", "norm": "none"}, "norm 'none'; expected .* 'after' or 'before'"),
        (vit, {"of": "mean", "layers": 0}, "layers is 0; expected from 1 to 3"),
        (vit, {"of": "mean", "layers": 4}, "layers is 4; expected from 1 to 3"),
        (vit, {"layers": 2}, "layers=2 .* one feature only"),
        (vit, {"norm": "before"}, "norm='before' .* one feature only"),
        (Encoder, {}, r"expected a method features\(x\).*FeatureExtractor\(model, features="),
        (Encoder, {"of": "mean"}, "Encoder has no named tokens"),
        (partial(Pixels, (8, 8), 1, 10), {"of": "mean"}, "Pixels has no named tokens"),
        (partial(encoder, slice(2)), {}, r"features of shape \(6, 4, 6, 6\) for 6 images; expected b d.*pool them"),
        (partial(encoder, features=lambda x: x.sum()), {}, r"Encoder gave features of shape \(\) for 6 images; expected b d"),
        (partial(encoder, features=lambda x: x[:3].flatten(1)), {}, r"Encoder gave features of shape \(3, 64\) for 6 images"),
        (partial(encoder, features=lambda x: [x]), {}, "Encoder gave features of a list for 6 images; expected b d"),
        (diverged, {}, "features of 6 of 6 images are not finite; expected a model that has not diverged"),
        (partial(timm_vit, class_token=False, global_pool="avg"), {"of": "both"}, "no class token; expected of='mean'"),
    ]
    + [
        (partial(vit, pool=pool, registers=registers), {"of": of}, "no class token; expected of='mean'")
        for pool in (MeanTokens, SequencePool)
        for registers in (0, 2)
        for of in ("class token", "both")
    ],
)
def test_features_that_a_model_does_not_have_are_refused(make, place, message):
    with pytest.raises(ValueError, match=message):
        features(make(), noise(), **place)


def test_feature_maps_of_torchvision_are_refused():
    with pytest.raises(ValueError, match=r"SqueezeNet gave features of shape \(2, 512, 1, 1\)"):
        features(squeezenet1_1(), noise(2, 3, (32, 32)))


# The model is unchanged

MODELS = {
    "vit": (vit, {"of": "both", "layers": 2}),
    "merging vit": (partial(vit, reduction=partial(Merge, r=3), registers=1), {"of": "both", "layers": 3}),
    "timm vit": (timm_vit, {"of": "both", "layers": 4}),
    "timm vit with merging": (lambda: apply(timm_vit(), partial(Merge, r=2)), {"of": "mean"}),
    "small cnn": (lambda: randomize(SmallCNN((8, 8), 1, 3, width=4, hidden=8)), {}),
    "pixels": (lambda: Pixels((8, 8), 1, 3), {}),
}


def state(model):
    """Everything that an evaluator could change: tensors, modes, hooks, gradients, the generator."""
    tensors = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    modes = [(module.training, len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    return tensors, modes, [(p.requires_grad, p.grad) for p in model.parameters()], torch.get_rng_state().tolist()


@pytest.mark.parametrize("kind", slow_after(1, MODELS))
@pytest.mark.parametrize("probe", [knn, linear_probe, partial(few_shot, shots=4)], ids=["knn", "linear_probe", "few_shot"])
def test_probes_leave_the_model_unchanged_and_are_deterministic(kind, probe):
    make, place = MODELS[kind]
    model, images = make().train(), noise(60)
    for module in list(model.modules())[1::3]:
        module.training = False
    splits = Splits(*(images.take(slice(start, start + 20)) for start in (0, 20, 40)))
    before = state(model)
    first = list(probe(model, splits, **place))
    assert before == state(model)
    torch.manual_seed(1)
    assert list(probe(copy.deepcopy(model).eval(), splits, **place)) == first


def test_hooks_are_removed_if_the_model_raises():
    model = vit()
    model.norm = nn.Linear(3, 3)
    before = state(model)
    with pytest.raises(RuntimeError):
        features(model, noise(), of="mean", layers=3)
    assert before == state(model) and torch.is_grad_enabled()


# FeatureExtractor


def test_the_extractor_gives_the_features():
    model, images = vit(), noise(40)
    for place in ({}, *PLACES):
        found = FeatureExtractor(model, **place, batch=7).fit_transform(images)
        assert found.dtype == np.float32 and close(found, features(model, images, **place))
    assert np.array_equal(FeatureExtractor(model).transform(images), features(model, images))


def test_arrays_and_tensors_are_normalized_by_their_spec():
    model, images = vit(), noise(9)
    raw, expected, normalized = images.images.numpy(), features(model, images), inputs(images)
    floats = (raw / 255).astype(np.float32)
    for array in (raw, images.images, raw[:, 0], raw / 255, floats, images.pixels(), raw[::-1][::-1]):
        assert close(FeatureExtractor(model, spec=images.spec).fit_transform(array), expected)
    extractor = FeatureExtractor(model, spec="normalized")
    for array in (normalized, normalized[:, 0], normalized.double().numpy()):
        assert close(extractor.transform(array), expected)
    assert not np.allclose(extractor.transform(raw / 255), expected, atol=1e-2)
    other = data.DataSpec(name="o", channels=1, size=(8, 8), classes=("a",), mean=(0.0,), std=(1.0,))
    found = FeatureExtractor(model, spec=other).transform(images)  # overrides the spec of the images
    assert close(found, extractor.transform(images.pixels())) and not np.allclose(found, expected, atol=1e-2)


def test_images_in_a_file_and_floats_of_any_value_are_read():
    model, images = vit(), noise(9)
    expected, spec = features(model, images), replace(images.spec, mean=(390.0,), std=(300.0,), dtype="float32")
    wide = Images(1000 * images.pixels() - 10, images.labels, spec)  # equal to `images` after the normalization
    stored = replace(images, images=Rows(images.images, torch.arange(9)))
    for X, options in ((stored, {}), (stored.images, {"spec": images.spec}), (wide, {}), (wide.images.numpy(), {"spec": spec})):
        assert close(FeatureExtractor(model, batch=4, **options).fit_transform(X), expected)
    deep = images.images.numpy().astype(np.uint16) * 257  # the same pixels with 16 bits
    assert close(FeatureExtractor(model, spec=replace(images.spec, dtype="float32")).transform(deep), expected)


class DataFrame:
    """A table like that of pandas."""

    shape, iloc = (5, 64), property(list)


IMAGES, BYTES = np.zeros((5, 1, 8, 8)), np.zeros((5, 1, 8, 8), np.uint8)


@pytest.mark.parametrize(
    "X, options, message",
    [
        (np.zeros((5, 64)), {}, r"got shape \(5, 64\); expected Images, or an array or tensor n c h w or n h w; reshape"),
        ([[0.0] * 64], {}, "got a list; expected Images"),
        (DataFrame(), {}, "got a DataFrame; expected Images"),
        (IMAGES, {"spec": None}, "spec=None; expected the DataSpec .* or 'normalized'"),
        (BYTES, {"spec": None}, "spec=None; expected the DataSpec .* or 'normalized'"),
        (IMAGES, {"spec": "mnist"}, "spec='mnist'; expected the DataSpec"),
        (BYTES, {"spec": "normalized"}, "torch.uint8 with spec='normalized'; expected floats"),
        (IMAGES + 255.0, {}, r"from 255 to 255; pass uint8 .*; expected pixels in \[0, 1\]"),
        (IMAGES - 0.1, {}, r"expected pixels in \[0, 1\]"),
        (IMAGES + np.nan, {}, r"expected pixels in \[0, 1\]"),
        (IMAGES + np.nan, {"spec": replace(noise().spec, dtype="float32")}, "NaN or infinite values; expected finite floats"),
        (np.full((5, 1, 8, 8), 200), {}, "pixels of type torch.int64; expected uint8"),
        (np.zeros((5, 1, 8, 8), np.uint16), {}, "pixels of type torch.uint16; expected uint8"),
        (np.zeros((5, 8, 8, 1), np.uint8), {}, r"\(5, 8, 8, 1\); expected n 1 h w, channels first"),
        (np.zeros((5, 3, 8, 8), np.uint8), {}, r"\(5, 3, 8, 8\); expected n 1 h w"),
        (BYTES.astype(object), {}, "an array of type object; expected pixels as numbers"),
        (BYTES.astype("U3"), {"spec": "normalized"}, "an array of type <U3; expected pixels as numbers"),
        (BYTES[:0], {}, "no images to evaluate"),
        (BYTES, {"model": None}, r"the model is None; expected FeatureExtractor\(model\)"),
        (BYTES, {"batch": 0}, "batch is 0; expected the number of images"),
        (BYTES, {"of": "cls"}, "of is 'cls'"),
        (BYTES, {"features": lambda model, x: x, "of": "mean"}, "features= together with of, layers or norm"),
        (BYTES, {"features": lambda model, x: x}, r"gave features of shape \(\d, 1, 8, 8\)"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_input_that_is_no_images_or_has_unknown_pixels_is_refused(X, options, message):
    extractor = FeatureExtractor(**({"model": vit(), "spec": noise().spec} | options))
    for method in (extractor.fit, extractor.transform):
        with pytest.raises(ValueError, match=message):
            method(X)


def test_a_function_reads_features_from_any_module():
    model, images = Encoder().train(), noise(30)
    batches = []
    extractor = FeatureExtractor(model, features=lambda model, x: batches.append(len(x)) or model.body[:4](x), batch=11)
    before = state(model)
    found = extractor.fit_transform(images)
    assert before == state(model) and found.shape == (30, 144) and batches == [1, 11, 11, 8]
    with torch.no_grad():
        assert close(found, model.eval().body[:4](inputs(images)))


def test_the_extractor_is_a_scikit_learn_estimator():
    model, spec = vit(), noise().spec
    extractor = FeatureExtractor(model, of="mean", spec=spec)
    params = {"model": model, "of": "mean", "layers": 1, "norm": "after", "batch": 1024, "features": None, "spec": spec}
    assert extractor.get_params() == extractor.get_params(deep=False) == params
    other = clone(extractor.fit(noise()))
    assert other is not extractor and other.get_params() == params and other.model is model
    with pytest.raises(ValueError, match="not fitted yet"):
        other.get_feature_names_out()
    assert extractor.set_params(layers=2, of="both") is extractor
    assert extractor.get_params() == params | {"layers": 2, "of": "both"}
    assert other.of == "mean" and extractor.set_params() is extractor
    with pytest.raises(ValueError, match=r"Invalid parameter 'depth'.*Valid parameters are: .*'layers', 'model'"):
        extractor.set_params(depth=3, of="mean")
    assert extractor.of == "both"
    check_is_fitted(extractor)
    tags = get_tags(extractor)
    assert tags.transformer_tags is not None and not tags.requires_fit and not tags.target_tags.required
    assert repr(other) == "FeatureExtractor(model=ViT, of='mean', spec=DataSpec)"
    assert repr(FeatureExtractor()) == "FeatureExtractor()"
    loaded = pickle.loads(pickle.dumps(extractor))
    assert np.array_equal(loaded.transform(noise()), extractor.transform(noise()))


@pytest.mark.parametrize(
    "check",
    ["estimator_cloneable", "estimator_repr", "no_attributes_set_in_init", "get_params_invariance", "set_params", "mixin_order",
     "valid_tag_types", "parameters_default_constructible"],
)  # fmt: skip
def test_checks_of_scikit_learn(check):
    getattr(estimator_checks, f"check_{check}")("FeatureExtractor", FeatureExtractor())


def test_names_of_the_features_are_known_after_fit():
    extractor = FeatureExtractor(vit(), of="both")
    with pytest.raises(ValueError, match="Call 'fit'"):
        extractor.get_feature_names_out()
    names = extractor.fit(noise()).get_feature_names_out()
    assert names.tolist() == [f"featureextractor{i}" for i in range(32)] and names.dtype == object


def test_a_pipeline_with_the_extractor_returns_tables():
    pipeline = make_pipeline(FeatureExtractor(vit(), spec=noise().spec), StandardScaler()).set_output(transform="pandas")
    table = pipeline.fit_transform(noise().images.numpy())
    assert [*table.columns] == [f"featureextractor{i}" for i in range(16)] and len(table) == len(noise())


def test_layers_and_batch_may_be_numbers_of_numpy():
    for model, images in ((vit(), noise()), (timm_vit(), noise())):
        for layers in np.arange(1, 3):
            found = FeatureExtractor(model, of="mean", layers=layers, batch=layers, spec=images.spec).transform(images.images)
            assert close(found, features(model, images, of="mean", layers=int(layers)))


def test_the_extractor_works_in_a_pipeline_and_a_search():
    digits = data.digits().train.take(slice(0, 200))
    model = initialize(TINY_VIT((8, 8), 1, 10), 0)
    X, y, before = digits.images.numpy(), digits.labels.numpy(), state(model)
    pipeline = make_pipeline(FeatureExtractor(model, spec=digits.spec), StandardScaler(), LogisticRegression(max_iter=1000))
    assert pipeline.fit(X[:150], y[:150]).score(X[150:], y[150:]) > 0.3
    assert len(pipeline[:-1].get_feature_names_out()) == 16 and "FeatureExtractor" in pipeline._repr_html_()
    scaler = StandardScaler().fit(features(model, digits.take(slice(0, 150))))
    rows = scaler.transform(features(model, digits))
    expected = LogisticRegression(max_iter=1000).fit(rows[:150], y[:150])
    assert np.allclose(pipeline.predict_proba(X[150:]), expected.predict_proba(rows[150:]), atol=1e-3)
    options = {"featureextractor__of": ["head", "mean", "both"], "featureextractor__norm": ["after"]}
    search = GridSearchCV(pipeline, options, cv=2)
    with redirect_stderr(io.StringIO()) as errors:
        search.fit(X, y)
    assert not errors.getvalue() and search.best_params_["featureextractor__of"] in ("head", "mean", "both")
    assert len(set(search.cv_results_["mean_test_score"])) > 1
    assert cross_val_score(pipeline, digits.images, y, cv=2).shape == (2,)
    assert before == state(model)
