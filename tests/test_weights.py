"""Weights from elsewhere: the same from every kind of file, timm's own function of other images, and refused where they do not fit."""

import argparse
import json
from functools import partial

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

from smallvit import (
    ConvStem,
    Learned,
    LearnedPrune,
    LocalityAttention,
    MeanTokens,
    PatchEmbed,
    Resized,
    Run,
    ShiftedPatchEmbed,
    SinCos2d,
    SmallCNN,
    ViT,
    Weights,
    ablate,
    compare,
    describe,
    digits,
    fingerprint,
    fit,
    html,
    imagenet_vit_s,
    like,
    load,
    markdown,
    rebuild,
)
from smallvit.ablation import trained_on
from smallvit.launch import launch
from smallvit.optim import decay_groups
from smallvit.pretrained import Unavailable

TINY = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"  # mean and deviation 0.5
DEIT = "deit_tiny_patch16_224.fb_in1k"  # those of ImageNet, another for each channel
GREY = ((0.1307,), (0.3081,))
COLOUR = ((0.4, 0.5, 0.3), (0.2, 0.3, 0.25))


def perturbed(model):
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model.eval()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """One random model of a name as timm would publish it, in a file; made once for each name."""
    folder, made = tmp_path_factory.mktemp("weights"), {}

    def file(name, **options):
        key = json.dumps([name, options])
        if key not in made:
            model = perturbed(timm.create_model(name.partition(".")[0], **options))
            path = folder / f"{len(made)}-{name}.safetensors"
            save_file(model.state_dict(), path)
            made[key] = model, str(path)
        return made[key]

    return file


def timms(name, file, image, patch, **options):
    """timm's own adaptation of that file to another image and patch, three channels."""
    cfg = timm.get_pretrained_cfg(name).to_dict() | {"file": file, "custom_load": False, "hf_hub_id": None, "url": ""}
    size = {"img_size": image, "patch_size": patch, "pretrained": True, "pretrained_cfg": cfg}
    model = timm.create_model(name.partition(".")[0], **(size | options))
    return model.eval(), torch.tensor(cfg["mean"])[:, None, None], torch.tensor(cfg["std"])[:, None, None]


def seen(pixels, channels):
    """The pixels as this package normalises them; statistics of grey or of colour images."""
    mean, std = GREY if channels == 1 else COLOUR
    return (pixels - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]


# timm's own function, of other images


VARIANTS = {
    TINY: 1,
    DEIT: 1,
    "vit_wee_patch16_reg1_gap_256.sbb_in1k": 1,  # registers, mean pooling, qk-norm, a wide MLP
    "deit3_small_patch16_224.fb_in1k": 2,  # LayerScale, positions without the class token
    "vit_small_patch16_224.augreg_in21k_ft_in1k": 2,
    "vit_small_patch14_reg4_dinov2.lvd142m": 2,  # no head
}
IMAGES = [(28, 4, 1), (32, 4, 3), (28, 7, 1), (28, 4, 3)]  # the larger models see the first two in the short suite
CASES = [
    pytest.param(name, *case, marks=[pytest.mark.slow] if at >= 3 - size else [])
    for name, size in VARIANTS.items()
    for at, case in enumerate(IMAGES)
]


@pytest.mark.parametrize("name, image, patch, channels", CASES)
def test_small_images_get_timms_features_of_the_same_pixels(files, name, image, patch, channels):
    reference, file = files(name)
    theirs, mean, std = timms(name, file, image, patch)
    ours = like(name, tokenizer=partial(PatchEmbed, patch=patch))((image, image), channels, 1000).eval()
    report = Weights(name=name, file=file).load(ours, *(GREY if channels == 1 else COLOUR))
    pixels = torch.rand(2, channels, image, image)
    with torch.no_grad():
        wanted = theirs.forward_features((pixels.expand(-1, 3, -1, -1) - mean) / std)
        found = ours.features(seen(pixels, channels))
        assert (found - theirs.forward_head(wanted, pre_logits=True)).abs().max() <= 1e-5 * max(1, found.abs().max())
        if reference.num_classes:
            assert (ours(seen(pixels, channels)) - theirs.forward_head(wanted)).abs().max() <= 1e-5
    own = [(name, tensor) for name, tensor in ours.state_dict().items() if report["new"] == [] or "head" not in name]
    assert report["loaded"] == len(own) >= 100 and len(report["resized"]) == 2 and report["left_over"] == []


@pytest.mark.parametrize(
    "name", [TINY, DEIT, pytest.param("vit_base_patch16_224.augreg_in21k_ft_in1k", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("channels", [1, 3])
def test_large_images_get_timms_logits_and_so_do_small_ones_enlarged(files, name, channels):
    theirs, file = files(name)
    _, mean, std = timms(name, file, 224, 16)
    whole = like(name)((224, 224), channels, 1000).eval()
    enlarged = like(name, tokenizer=partial(Resized, tokenizer=partial(PatchEmbed, patch=16)))((28, 28), channels, 1000).eval()
    for model in (whole, enlarged):
        report = Weights(name=name, file=file).load(model, *(GREY if channels == 1 else COLOUR))
        assert report["resized"] == []
    small = torch.rand(1, channels, 28, 28)
    large = nn.functional.interpolate(small, size=(224, 224), mode="bicubic", antialias=True)
    with torch.no_grad():
        wanted = theirs((large.expand(-1, 3, -1, -1) - mean) / std)
        assert (whole(seen(large, channels)) - wanted).abs().max() <= 1e-5
        assert (enlarged(seen(small, channels)) - wanted).abs().max() <= 1e-5


@pytest.mark.parametrize("channels", [1, 3])
def test_tensor_by_tensor_these_are_timms_own_weights(files, channels):
    """Where mean and deviation are the weights' own, nothing is exchanged, and timm's adaptation is ours."""
    _, file = files(TINY)
    theirs, _, _ = timms(TINY, file, 28, 4, in_chans=channels, num_classes=7)
    ours = like(TINY, tokenizer=partial(PatchEmbed, patch=4))((28, 28), channels, 7)
    Weights(name=TINY, file=file).load(ours, 0.5, 0.5)
    from smallvit.pretrained.convert import rename

    compared = 0
    for name, wanted in rename(theirs.state_dict()).items():
        if not name.startswith("head."):
            assert (ours.state_dict()[name] - wanted).abs().max() <= 1e-6, name
            compared += 1
    assert compared == 150


# The same from every kind of file


def as_google_wrote_it(model) -> dict:
    """The arrays of the original .npz under their names: kernels height width in out, heads apart."""
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    width, heads = model.embed_dim, model.blocks[0].attn.num_heads
    arrays = {
        "cls": state["cls_token"],
        "embedding/kernel": state["patch_embed.proj.weight"].transpose(2, 3, 1, 0),
        "embedding/bias": state["patch_embed.proj.bias"],
        "Transformer/posembed_input/pos_embedding": state["pos_embed"],
        "Transformer/encoder_norm/scale": state["norm.weight"],
        "Transformer/encoder_norm/bias": state["norm.bias"],
        "head/kernel": state["head.weight"].T,
        "head/bias": state["head.bias"],
    }
    for at in range(len(model.blocks)):
        block, there = f"blocks.{at}.", f"Transformer/encoderblock_{at}/"
        attention = f"{there}MultiHeadDotProductAttention_1/"
        q, k, v = state[block + "attn.qkv.weight"].reshape(3, heads, -1, width)
        biases = state[block + "attn.qkv.bias"].reshape(3, heads, -1)
        for name, kernel, bias in zip(("query", "key", "value"), (q, k, v), biases):
            arrays |= {f"{attention}{name}/kernel": kernel.transpose(2, 0, 1), f"{attention}{name}/bias": bias}
        arrays[f"{attention}out/kernel"] = state[block + "attn.proj.weight"].T.reshape(heads, -1, width)
        arrays[f"{attention}out/bias"] = state[block + "attn.proj.bias"]
        for name, norm in (("LayerNorm_0", "norm1"), ("LayerNorm_2", "norm2")):
            arrays |= {
                f"{there}{name}/scale": state[f"{block}{norm}.weight"],
                f"{there}{name}/bias": state[f"{block}{norm}.bias"],
            }
        for name, fc in (("Dense_0", "fc1"), ("Dense_1", "fc2")):
            arrays[f"{there}MlpBlock_3/{name}/kernel"] = state[f"{block}mlp.{fc}.weight"].T
            arrays[f"{there}MlpBlock_3/{name}/bias"] = state[f"{block}mlp.{fc}.bias"]
    return arrays


def written(model, kind, folder):
    state = model.state_dict()
    path = folder / ("weights" + (".npz" if kind == "npz" else ".pth"))
    if kind == "npz":
        np.savez(path, **as_google_wrote_it(model))
    elif kind == "dino":
        projection = {"module.head.mlp.0.weight": torch.zeros(4, 4), "module.head.last_layer.weight_v": torch.zeros(4, 4)}
        bare = {name: tensor for name, tensor in state.items() if not name.startswith("head.")}
        student = {f"module.backbone.{name}": torch.zeros_like(tensor) for name, tensor in bare.items()}
        teacher = {f"backbone.{name}": tensor for name, tensor in bare.items()}
        options = argparse.Namespace(arch="vit_small", lr=0.0005)  # as the official ones hold them
        torch.save({"student": student | projection, "teacher": teacher | projection, "epoch": 7, "args": options}, path)
    else:
        torch.save(
            {"plain": state, "model": {"model": state}, "ddp": {"state_dict": {f"module.{k}": v for k, v in state.items()}}}[
                kind
            ],
            path,
        )
    return str(path)


@pytest.mark.parametrize("kind", ["plain", "model", "ddp", "dino", "npz"])
def test_every_kind_of_file_gives_the_same_tensors(files, tmp_path, kind):
    model, file = files(TINY)
    shape = like(TINY, tokenizer=partial(PatchEmbed, patch=7))
    one, other = (shape((28, 28), 1, 5) for _ in range(2))
    Weights(name=TINY, file=file).load(one, *GREY)
    report = Weights(name=TINY, file=written(model, kind, tmp_path)).load(other, *GREY)
    other = other.state_dict()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.state_dict().items() if not name.startswith("head."))
    assert report["new"] == ["head.weight", "head.bias"] and report["loaded"] == 150


def test_a_folder_in_the_environment_is_looked_into_before_the_hub(files, tmp_path, monkeypatch):
    model, _ = files(TINY)
    monkeypatch.setenv("SMALLVIT_WEIGHTS", str(tmp_path))
    torch.save(model.state_dict(), tmp_path / f"{TINY}.pth")
    assert Weights(name=TINY).path() == tmp_path / f"{TINY}.pth"


# What does not fit is refused by its name


def changed(files, tmp_path, change, name=TINY):
    state = {key: tensor.clone() for key, tensor in files(name)[0].state_dict().items()}
    change(state)
    save_file(state, tmp_path / "changed.safetensors")
    return Weights(name=name, file=str(tmp_path / "changed.safetensors"))


def renamed(state):
    state["blocks.3.attn.kqv.weight"] = state.pop("blocks.3.attn.qkv.weight")


def narrower(state):
    state["blocks.3.mlp.fc1.weight"] = state["blocks.3.mlp.fc1.weight"][:5].clone()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (renamed, r"blocks\.3\.attn\.qkv\.weight is missing, blocks\.3\.attn\.kqv\.weight is unknown"),
        (lambda state: state.pop("pos_embed"), "pos_embed is missing"),
        (lambda state: state.update(extra=torch.zeros(3)), "extra is unknown"),
        (narrower, r"blocks\.3\.mlp\.fc1\.weight is \(5, 192\), expected \(768, 192\)"),
    ],
    ids=["renamed", "missing", "left over", "another shape"],
)
def test_a_file_that_is_not_that_model_is_refused_with_the_name_of_the_weight(files, tmp_path, change, said):
    with pytest.raises(ValueError, match=rf"changed\.safetensors is not {TINY}: {said}"):
        changed(files, tmp_path, change).load(like(TINY)((224, 224), 3, 1000), *COLOUR)


@pytest.mark.parametrize(
    ("knobs", "new", "said"),
    [
        (
            {"attention": LocalityAttention},
            ("attention.scale",),
            r"blocks.0.attention.scale \(None in the file, \(3,\) in the model",
        ),
        ({"tokenizer": partial(ShiftedPatchEmbed, patch=4)}, ("tokenizer.norm",), "tokenizer.norm.weight"),
        ({"tokenizer": partial(ConvStem, layers=2)}, ("tokenizer",), "tokenizer.layers.0.weight"),
        ({"position": SinCos2d}, ("position",), r"position.table \(\(197, 192\) in the file, None in the model"),
        ({"registers": 2}, ("prefix",), "prefix"),
        ({"depth": 11}, ("blocks.11",), "blocks.11.norm1.weight"),
        ({"depth": 13}, ("blocks.12",), "blocks.12.norm1.weight"),
    ],
    ids=["LSA", "SPT", "stem", "positions", "registers", "shallower", "deeper"],
)
def test_a_part_that_does_not_carry_over_must_be_named(files, knobs, new, said):
    file, shape = files(TINY)[1], {"tokenizer": partial(PatchEmbed, patch=4)} | knobs
    with pytest.raises(ValueError, match=said):
        Weights(name=TINY, file=file).load(like(TINY, **shape)((28, 28), 1, 10), *GREY)
    report = Weights(name=TINY, file=file, new=new).load(like(TINY, **shape)((28, 28), 1, 10), *GREY)
    named = [name for name in report["new"] + report["left_over"] if not name.startswith("head.")]
    assert named and all(f".{new[0]}." in f".{name}." for name in named)


def test_other_models_channels_names_and_files_are_refused(files, tmp_path):
    file = files(TINY)[1]
    with pytest.raises(ValueError, match=r"SmallCNN cannot start from .*; expected a ViT, such as like"):
        Weights(name=TINY, file=file).load(SmallCNN((28, 28), 1, 10), *GREY)
    with pytest.raises(ValueError, match="the images have 4 channels, the weights 3; expected as many, or 1"):
        Weights(name=TINY, file=file).load(like(TINY)((224, 224), 4, 10), 0.5, 0.5)
    with pytest.raises(ValueError, match=r"timm has no model 'vit_tiny_patch16_225'; expected one of .*vit_tiny"):
        like("vit_tiny_patch16_225")
    with pytest.raises(ValueError, match="this timm model has the class ResNet"):
        like("resnet10t")
    for wrong in ({"file": "weights.onnx"}, {"name": ""}, {"new": "head"}, {"file": tmp_path}):
        with pytest.raises(ValueError, match="expected"):
            Weights(**{"name": TINY} | wrong)
    with pytest.raises(ValueError, match=r"there is no file nowhere\.pth"):
        Weights(name=TINY, file="nowhere.pth").path()
    with pytest.raises(ValueError, match=r"timm has no weights 'vit_tiny_patch16_224\.bogus'"):
        Weights(name="vit_tiny_patch16_224.bogus").path()
    with pytest.raises(ValueError, match=r"names atention\.scael, where nothing is new"):
        Weights(name=TINY, file=file, new=("atention.scael",)).load(like(TINY)((224, 224), 3, 10), 0.5, 0.5)
    with pytest.raises(ValueError, match="does not fit the model"):
        Weights(name=TINY, file=file, new=("weight", "bias", "table")).load(ViT((224, 224), 3, 10), 0.5, 0.5)
    (tmp_path / "torn.safetensors").write_bytes(b"torn")
    with pytest.raises(ValueError, match=r"torn\.safetensors cannot be read"):
        Weights(name=TINY, file=str(tmp_path / "torn.safetensors")).load(like(TINY)((224, 224), 3, 10), 0.5, 0.5)


@pytest.mark.parametrize("name, options", [(TINY, {"in_chans": 1}), ("vit_tiny_patch16_224", {"patch_size": 32})])
def test_a_kernel_of_other_channels_or_patches_is_refused_from_either_kind_of_file(tmp_path, name, options):
    model = perturbed(timm.create_model("vit_tiny_patch16_224", **options))
    for kind in ("plain", "npz"):
        with pytest.raises(ValueError, match=r"patch_embed.proj.weight is|embedding/kernel is"):
            Weights(name=TINY, file=written(model, kind, tmp_path)).load(like(TINY)((224, 224), 3, 10), 0.5, 0.5)


def test_a_head_of_other_classes_in_an_npz_does_not_pass_as_pretrained(tmp_path):
    model = perturbed(timm.create_model("vit_tiny_patch16_224", num_classes=30))
    report = Weights(name=TINY, file=written(model, "npz", tmp_path)).load(like(TINY)((224, 224), 3, 1000), 0.5, 0.5)
    assert report["new"] == ["head.weight", "head.bias"]


@pytest.mark.parametrize("knobs, kept", [({"pool": MeanTokens}, 49), ({"registers": 2}, 50)], ids=["mean", "registers"])
def test_positions_carry_over_to_other_prefix_tokens(files, knobs, kept):
    file = files(TINY)[1]
    ours = like(TINY, tokenizer=partial(PatchEmbed, patch=4), **knobs)((28, 28), 1, 10)
    report = Weights(name=TINY, file=file, new=("prefix",)).load(ours, *GREY)
    plain = like(TINY, tokenizer=partial(PatchEmbed, patch=4))((28, 28), 1, 10)
    Weights(name=TINY, file=file).load(plain, *GREY)
    assert torch.equal(ours.position.table[-49:], plain.position.table[-49:]) and "position.table" not in report["new"]


def test_a_grid_of_another_shape_with_as_many_places_is_resampled_all_the_same(files):
    theirs, file = files(TINY)
    ours = like(TINY)((112, 448), 3, 10)
    report = Weights(name=TINY, file=file).load(ours, 0.5, 0.5)
    assert report["resized"] == ["position.table: 14 x 14 to 7 x 28"]
    square = theirs.pos_embed[0, 1:].detach().T.reshape(1, -1, 14, 14)
    wanted = nn.functional.interpolate(square, size=(7, 28), mode="bicubic", antialias=True).flatten(2)[0].T
    assert (ours.position.table[1:] - wanted).abs().max() < 1e-5
    assert torch.equal(ours.position.table[0], theirs.pos_embed[0, 0])


def test_where_prefix_tokens_have_no_positions_they_bring_theirs_along(files):
    theirs, file = files(TINY)
    ours = like(TINY, position=partial(Learned, on_prefix=False))((224, 224), 3, 1000).eval()
    report = Weights(name=TINY, file=file).load(ours, 0.5, 0.5)
    assert report["adapted"] == ["prefix: 1 tokens with their positions added"] and len(ours.position.table) == 196
    x = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert (ours(x) - theirs.eval()(x)).abs().max() < 1e-4


def test_nothing_in_a_file_is_executed(tmp_path):
    class Trap:
        def __reduce__(self):
            return (tmp_path / "sprung").touch, ()

    torch.save({"model": Trap()}, tmp_path / "trap.pth")
    with pytest.raises(ValueError, match=r"trap\.pth cannot be read"):
        Weights(name=TINY, file=str(tmp_path / "trap.pth")).load(like(TINY)((224, 224), 3, 10), 0.5, 0.5)
    assert not (tmp_path / "sprung").exists()


# Techniques on top


def test_shifted_patches_without_their_norm_start_as_the_pretrained_function(files):
    file = files(TINY)[1]
    plain = like(TINY, tokenizer=partial(PatchEmbed, patch=4))((28, 28), 1, 10).eval()
    shifted = like(TINY, tokenizer=partial(ShiftedPatchEmbed, patch=4, norm=False))((28, 28), 1, 10).eval()
    for model in (plain, shifted):
        Weights(name=TINY, file=file).load(model, *GREY)
    x = torch.randn(2, 1, 28, 28)
    with torch.no_grad():
        assert (plain.features(x) - shifted.features(x)).abs().max() <= 1e-5
    assert shifted.tokenizer.proj.weight.shape == (192, 5 * 16) and (shifted.tokenizer.proj.weight[:, 16:] == 0).all()


def test_locality_attention_without_its_mask_starts_as_the_pretrained_function_and_a_reduction_is_new(files):
    file, patch = files(TINY)[1], partial(PatchEmbed, patch=4)
    attention = partial(LocalityAttention, mask_self=False)
    models = [like(TINY, tokenizer=patch, **knobs)((28, 28), 1, 10).eval() for knobs in ({}, {"attention": attention})]
    for model, new in zip(models, ((), ("attention.scale",))):
        Weights(name=TINY, file=file, new=new).load(model, *GREY)
    x = torch.randn(2, 1, 28, 28)
    with torch.no_grad():
        assert (models[0].features(x) - models[1].features(x)).abs().max() <= 1e-5
    learned = like(TINY, tokenizer=patch, reduction=partial(LearnedPrune, keep=0.7))((28, 28), 1, 10)
    report = Weights(name=TINY, file=file).load(learned, *GREY)
    assert all("reduction" in name or name.startswith("head.") for name in report["new"]) and len(report["new"]) > 2


def test_rates_fall_from_block_to_block_as_timms_do():
    theirs = timm.create_model("vit_tiny_patch16_224", num_classes=3)
    from timm.optim import param_groups_layer_decay

    wanted = {}
    for group in param_groups_layer_decay(theirs, layer_decay=0.75):
        wanted |= {id(p): group["lr_scale"] for p in group["params"]}
    names = {name: wanted[id(p)] for name, p in theirs.named_parameters()}
    ours = like("vit_tiny_patch16_224")((224, 224), 3, 3)
    holder = nn.Module()
    holder.model = ours
    groups, paces = decay_groups(holder, 0.05, 0.75)
    found = {id(p): pace(0.5, 1.0) for group, pace in zip(groups, paces) for p in group["params"]}
    assert len(found) == len(list(ours.parameters()))
    scale = {name: found[id(p)] for name, p in ours.named_parameters()}
    pairs = {"head.weight": "head.weight", "tokenizer.proj.weight": "patch_embed.proj.weight"}
    pairs |= {"position.table": "pos_embed", "prefix": "cls_token"}
    pairs |= {f"blocks.{at}.mlp.0.weight": f"blocks.{at}.mlp.fc1.weight" for at in range(12)}
    assert all(scale[here] == pytest.approx(names[there]) for here, there in pairs.items())
    with pytest.raises(ValueError, match="SmallCNN has none"):
        holder.model = SmallCNN((28, 28), 1, 3)
        decay_groups(holder, 0.05, 0.75)


# In a run


SHAPE = like(TINY, tokenizer=partial(PatchEmbed, patch=4))
SHORT = Run(data=digits, model=SHAPE, steps=2, batch=4, labels=20, val=20, ema=0.0, lr=1e-4, layer_decay=0.75)


def test_a_run_starts_from_weights_and_its_record_says_which(files, tmp_path):
    file = files(TINY)[1]
    run = SHORT.vary(init=Weights(name=TINY, file=file))
    record = fit(run, tmp_path / "tuned")
    assert record["weights"]["name"] == TINY and len(record["weights"]["sha256"]) == 64
    assert record["weights"]["new"] == ["head.weight", "head.bias"] and record["pretraining"] is None
    assert rebuild(describe(run)) == run and fingerprint(run) != fingerprint(SHORT)
    still = fit(run.vary(steps=0), tmp_path / "still")
    fresh = fit(SHORT.vary(steps=0), tmp_path / "fresh")
    assert still["test"] != fresh["test"]
    loaded, model = load(tmp_path / "tuned")  # the file may have gone
    assert loaded == run and isinstance(model, ViT)


def test_without_network_and_file_one_sentence_says_so_and_the_other_arms_are_run(tmp_path, capfd, monkeypatch):
    import huggingface_hub

    def refused(*words, **options):
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", refused)
    monkeypatch.delenv("SMALLVIT_WEIGHTS", raising=False)
    with pytest.raises(Unavailable, match=r"put vit_tiny.*\.safetensors into a folder and set SMALLVIT_WEIGHTS to it"):
        fit(SHORT.vary(init=Weights(name=TINY)), tmp_path / "alone")
    small = Run(
        data=digits, model=partial(ViT, tokenizer=partial(PatchEmbed, patch=4), dim=8, depth=1, heads=1), steps=2, val=20
    )
    arms = {"scratch": small, "tuned": small.vary(model=SHAPE, init=Weights(name=TINY)), "wider": small.vary(dim=16)}
    runs = ablate(arms, labels=[20], seeds=range(6), references=False)
    records = launch(runs, tmp_path / "out", recipe="t", jobs=1)
    said = capfd.readouterr().err
    assert said.count("unavailable:") == 1 and said.count(TINY) <= 3
    by_arm = {arm: {r["status"] for r in records if r["arm"] == arm} for arm in arms}
    assert by_arm == {"scratch": {"finished"}, "tuned": {"unavailable"}, "wider": {"finished"}}
    comparison = compare(records)
    verdicts = {row.arm: row.verdict for row in comparison.rows}
    assert comparison.family == 1 and verdicts["tuned"] is None and verdicts["wider"]
    for page in (markdown(records, title="t", doc="?"), html(records, title="t", doc="?")):
        assert "Unavailable here" in page and "SMALLVIT_WEIGHTS" in page and "Failures" not in page


def test_weights_that_have_come_since_are_used(files, tmp_path, monkeypatch):
    monkeypatch.setenv("SMALLVIT_WEIGHTS", str(tmp_path / "weights"))
    import huggingface_hub

    def refused(*words, **options):
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", refused)
    run = SHORT.vary(init=Weights(name=TINY), steps=1)
    assert [r["status"] for r in launch([run], tmp_path / "out", recipe="t", jobs=1)] == ["unavailable"]
    (tmp_path / "weights").mkdir()
    save_file(files(TINY)[0].state_dict(), tmp_path / "weights" / f"{TINY}.safetensors")
    assert [r["status"] for r in launch([run], tmp_path / "out", recipe="t", jobs=1)] == ["finished"]


def test_yardsticks_are_named_by_what_their_weights_were_trained_on_and_get_no_verdict():
    scratch = Run(steps=1_000, labels=None)
    arms = imagenet_vit_s(scratch, upsampled=True)
    assert list(arms)[:2] == ["ViT-S from ImageNet-21k (fine-tuned)", "ViT-S from ImageNet-21k (frozen)"] and len(arms) == 5
    runs = ablate({"scratch": scratch}, seeds=[0], extra_references=arms)
    assert {run.role for run in runs if run.arm in arms} == {"reference"} and len(runs) == 1 + 3 + 5
    assert {run.arm for run in runs if run.init is None and run.arm in arms} == {"ViT-S from scratch"}
    assert "ViT-S from scratch" not in imagenet_vit_s(scratch, scratch=False)
    assert trained_on(DEIT) == "ImageNet-1k" and trained_on("vit_small_patch16_224.dino") == "ImageNet-1k by DINO"
    tiny = imagenet_vit_s(scratch, name=TINY, upsampled=True)
    kind = TINY.partition(".")[0]
    assert list(tiny)[-2:] == [f"{kind} from ImageNet-21k at 224 pixels (frozen)", f"{kind} from scratch"]
    bilinear = imagenet_vit_s(scratch, name="vit_base_patch16_224_miil.in21k_ft_in1k", upsampled=True)
    with torch.device("meta"):
        models = [run.model((28, 28), 1, 10) for some in (arms, tiny, bilinear) for run in some.values()]
    assert [model.norm.weight.shape[0] for model in models] == [384] * 5 + [192] * 5 + [768] * 5
    ways = [(m.tokenizer.size, m.tokenizer.interpolation) for m in models if hasattr(m.tokenizer, "interpolation")]
    assert ways == [(224, "bicubic")] * 4 + [(224, "bilinear")] * 2, "as the weights' own config says"
    with pytest.raises(ValueError, match="is the name of a reference and of an arm"):
        ablate({"scratch": scratch, "ViT-S from scratch": scratch.vary(lr=1.0)}, extra_references=arms)
