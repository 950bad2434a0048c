"""Pretrained weights: every kind of file gives equal models, outputs equal those of timm, and files that do not fit are refused."""

import argparse
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn
from toys import randomize, slow_after, slow_but

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
    Supervised,
    ViT,
    Weights,
    ablate,
    accuracy,
    balanced_accuracy,
    compare,
    describe,
    digits,
    fingerprint,
    fit,
    html,
    imagenet_vit_s,
    knn,
    like,
    linear_probe,
    load,
    markdown,
    rebuild,
)
from smallvit.ablation import ArmRun
from smallvit.launch import launch
from smallvit.launch.results import folder
from smallvit.optim import decay_groups
from smallvit.pretrained import Unavailable, enlarged
from smallvit.pretrained.convert import rename
from smallvit.pretrained.files import find_state_dict
from smallvit.reference_runs import training_data

TINY = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"  # trained with mean and standard deviation 0.5
DEIT = "deit_tiny_patch16_224.fb_in1k"  # trained with those of ImageNet, which differ by channel
GRAY = ((0.1307,), (0.3081,))
COLOR = ((0.4, 0.5, 0.3), (0.2, 0.3, 0.25))


PATCH4 = partial(PatchEmbed, patch=4)


def tiny(image=28, channels=1, classes=10, **options) -> ViT:
    """A ViT with the shape of TINY, for square images."""
    return like(TINY, **options)((image, image), channels, classes).eval()


def tiny4(**options) -> ViT:
    """The same with patches of 4 pixels, unless the options say otherwise."""
    return tiny(**{"tokenizer": PATCH4} | options)


def random_weights(model):
    torch.manual_seed(1)
    return randomize(model, 0.02).eval()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A function of a timm name that returns a random model of this name and its file of weights, made once per name."""
    folder, made = tmp_path_factory.mktemp("weights"), {}

    def file(name, **options):
        key = json.dumps([name, options])
        if key not in made:
            model = random_weights(timm.create_model(name.partition(".")[0], **options))
            path = folder / f"{len(made)}-{name}.safetensors"
            save_file(model.state_dict(), path)
            made[key] = model, str(path)
        return made[key]

    return file


def timm_adapted(name, file, image, patch, **options):
    """timm's own adaptation of this file to another image and patch size, with its mean and standard deviation."""
    cfg = timm.get_pretrained_cfg(name).to_dict() | {"file": file, "custom_load": False, "hf_hub_id": None, "url": ""}
    size = {"img_size": image, "patch_size": patch, "pretrained": True, "pretrained_cfg": cfg}
    model = timm.create_model(name.partition(".")[0], **(size | options))
    return model.eval(), torch.tensor(cfg["mean"])[:, None, None], torch.tensor(cfg["std"])[:, None, None]


def normalize(pixels, channels):
    """The pixels normalized by the statistics of gray or of color images."""
    mean, std = GRAY if channels == 1 else COLOR
    return (pixels - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]


# Equal outputs


VARIANTS = {  # name -> how many cases of IMAGES are quick
    TINY: 1,
    DEIT: 0,
    "vit_wee_patch16_reg1_gap_256.sbb_in1k": 0,  # registers, mean pooling, qk-norm, a wide MLP
    "deit3_small_patch16_224.fb_in1k": 0,  # LayerScale, positions without the class token
    "vit_small_patch16_224.augreg_in21k_ft_in1k": 0,
    "vit_small_patch14_reg4_dinov2.lvd142m": 0,  # no head
}
IMAGES = [(28, 4, 1), (32, 4, 3), (28, 7, 1), (28, 4, 3)]
CASES = [
    case
    for name, quick in VARIANTS.items()
    for case in slow_after(quick, [(name, *image) for image in IMAGES])
]


@pytest.mark.parametrize("name, image, patch, channels", CASES)
def test_small_images_give_equal_features_and_logits(files, name, image, patch, channels):
    reference, file = files(name)
    theirs, mean, std = timm_adapted(name, file, image, patch)
    ours = like(name, tokenizer=partial(PatchEmbed, patch=patch))((image, image), channels, 1000).eval()
    report = Weights(name=name, file=file).load(ours, *(GRAY if channels == 1 else COLOR))
    pixels = torch.rand(2, channels, image, image)
    with torch.no_grad():
        expected = theirs.forward_features((pixels.expand(-1, 3, -1, -1) - mean) / std)
        found = ours.features(normalize(pixels, channels))
        assert (found - theirs.forward_head(expected, pre_logits=True)).abs().max() <= 1e-5 * max(1, found.abs().max())
        if reference.num_classes:
            assert (ours(normalize(pixels, channels)) - theirs.forward_head(expected)).abs().max() <= 1e-5
    weights = [name for name in ours.state_dict() if report["new"] == [] or "head" not in name]
    assert report["loaded"] == len(weights) >= 100 and len(report["resized"]) == 2 and report["left_over"] == []


@pytest.mark.parametrize(
    "name", slow_after(1, [TINY, DEIT, "vit_base_patch16_224.augreg_in21k_ft_in1k"])
)
@pytest.mark.parametrize("channels", slow_after(1, [1, 3]))
def test_large_and_enlarged_images_give_equal_logits(files, name, channels):
    theirs, file = files(name)
    _, mean, std = timm_adapted(name, file, 224, 16)
    whole = like(name)((224, 224), channels, 1000).eval()
    enlarged = like(name, tokenizer=partial(Resized, tokenizer=partial(PatchEmbed, patch=16)))((28, 28), channels, 1000).eval()
    for model in (whole, enlarged):
        report = Weights(name=name, file=file).load(model, *(GRAY if channels == 1 else COLOR))
        assert report["resized"] == []
    small = torch.rand(1, channels, 28, 28)
    large = nn.functional.interpolate(small, size=(224, 224), mode="bicubic", antialias=True)
    with torch.no_grad():
        expected = theirs((large.expand(-1, 3, -1, -1) - mean) / std)
        assert (whole(normalize(large, channels)) - expected).abs().max() <= 1e-5
        assert (enlarged(normalize(small, channels)) - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("channels", slow_after(1, [1, 3]))
def test_adapted_weights_equal_those_of_timm(files, channels):
    """With the mean and standard deviation of the weights, all adaptation is that of timm."""
    _, file = files(TINY)
    theirs, _, _ = timm_adapted(TINY, file, 28, 4, in_chans=channels, num_classes=7)
    ours = like(TINY, tokenizer=partial(PatchEmbed, patch=4))((28, 28), channels, 7)
    Weights(name=TINY, file=file).load(ours, 0.5, 0.5)
    compared = 0
    for name, expected in rename(theirs.state_dict()).items():
        if not name.startswith("head."):
            assert (ours.state_dict()[name] - expected).abs().max() <= 1e-6, name
            compared += 1
    assert compared == 150


# Kinds of files


def google_arrays(model) -> dict:
    """The weights of a timm model as in an original .npz: kernels are height width in out, and heads have their own axis."""
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
    for index in range(len(model.blocks)):
        block, google = f"blocks.{index}.", f"Transformer/encoderblock_{index}/"
        attention = f"{google}MultiHeadDotProductAttention_1/"
        q, k, v = state[block + "attn.qkv.weight"].reshape(3, heads, -1, width)
        biases = state[block + "attn.qkv.bias"].reshape(3, heads, -1)
        for name, kernel, bias in zip(("query", "key", "value"), (q, k, v), biases):
            arrays |= {f"{attention}{name}/kernel": kernel.transpose(2, 0, 1), f"{attention}{name}/bias": bias}
        arrays[f"{attention}out/kernel"] = state[block + "attn.proj.weight"].T.reshape(heads, -1, width)
        arrays[f"{attention}out/bias"] = state[block + "attn.proj.bias"]
        for name, norm in (("LayerNorm_0", "norm1"), ("LayerNorm_2", "norm2")):
            arrays[f"{google}{name}/scale"] = state[f"{block}{norm}.weight"]
            arrays[f"{google}{name}/bias"] = state[f"{block}{norm}.bias"]
        for name, fc in (("Dense_0", "fc1"), ("Dense_1", "fc2")):
            arrays[f"{google}MlpBlock_3/{name}/kernel"] = state[f"{block}mlp.{fc}.weight"].T
            arrays[f"{google}MlpBlock_3/{name}/bias"] = state[f"{block}mlp.{fc}.bias"]
    return arrays


def write_file(model, kind, folder) -> str:
    """Write the weights as one kind of file; return its path."""
    state = model.state_dict()
    path = folder / ("weights" + (".npz" if kind == "npz" else ".pth"))
    if kind == "npz":
        np.savez(path, **google_arrays(model))
    elif kind == "dino":
        projection = {"module.head.mlp.0.weight": torch.zeros(4, 4), "module.head.last_layer.weight_v": torch.zeros(4, 4)}
        bare = {name: tensor for name, tensor in state.items() if not name.startswith("head.")}
        student = {f"module.backbone.{name}": torch.zeros_like(tensor) for name, tensor in bare.items()}
        teacher = {f"backbone.{name}": tensor for name, tensor in bare.items()}
        options = argparse.Namespace(arch="vit_small", lr=0.0005)  # as in the official checkpoints
        torch.save({"student": student | projection, "teacher": teacher | projection, "epoch": 7, "args": options}, path)
    else:
        ddp = {f"module.{name}": tensor for name, tensor in state.items()}
        torch.save({"plain": state, "model": {"model": state}, "ddp": {"state_dict": ddp}}[kind], path)
    return str(path)


@pytest.mark.parametrize("kind", slow_but(("npz",), ["plain", "model", "ddp", "dino", "npz"]))
def test_every_kind_of_file_gives_equal_weights(files, tmp_path, kind):
    model, file = files(TINY)
    one, other = (tiny(classes=5, tokenizer=partial(PatchEmbed, patch=7)) for _ in range(2))
    Weights(name=TINY, file=file).load(one, *GRAY)
    report = Weights(name=TINY, file=write_file(model, kind, tmp_path)).load(other, *GRAY)
    other = other.state_dict()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.state_dict().items() if not name.startswith("head."))
    assert report["new"] == ["head.weight", "head.bias"] and report["loaded"] == 150


def test_counters_of_a_head_and_prefixes_of_compiled_models_are_left_out():
    norm = {"module.head.mlp.1.num_batches_tracked": torch.tensor(3), "module._orig_mod.norm.weight": torch.ones(2)}
    found = find_state_dict({"teacher": norm | {"module.head.mlp.1.running_mean": torch.zeros(2)}}, Path("dino.pth"))
    assert sorted(found) == ["head.mlp.1.running_mean", "norm.weight"]


@pytest.mark.parametrize("key", slow_after(1, ["state_dict_ema", "model_ema"]))
def test_moving_average_in_a_checkpoint_is_used(files, tmp_path, key):
    """As in the files of timm's training script, which timm itself reads in this way."""
    model, _ = files(TINY)
    state = model.state_dict()
    last = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    options = argparse.Namespace(model="vit_tiny_patch16_224")
    torch.save({"epoch": 3, "args": options, "state_dict": last, key: state}, tmp_path / "last.pth")
    ours = like(TINY)((224, 224), 3, 1000)
    Weights(name=TINY, file=str(tmp_path / "last.pth")).load(ours, 0.5, 0.5)
    assert torch.equal(ours.head.weight, state["head.weight"]) and torch.equal(ours.norm.weight, state["norm.weight"])


def test_folder_of_the_environment_variable_is_used_before_the_hub(files, tmp_path, monkeypatch):
    model, _ = files(TINY)
    monkeypatch.setenv("SMALLVIT_WEIGHTS", str(tmp_path))
    torch.save(model.state_dict(), tmp_path / f"{TINY}.pth")
    assert Weights(name=TINY).path() == tmp_path / f"{TINY}.pth"


# Files that do not fit


def rename_weight(state):
    state["blocks.3.attn.kqv.weight"] = state.pop("blocks.3.attn.qkv.weight")


@pytest.mark.parametrize(
    ("change", "message"),
    slow_after(2, [
        (rename_weight, r"blocks\.3\.attn\.qkv\.weight is missing, blocks\.3\.attn\.kqv\.weight is unknown"),
        (lambda state: state["norm.weight"].fill_(torch.nan), r"norm\.weight is not finite"),
        (lambda state: state.pop("pos_embed"), "pos_embed is missing"),
        (lambda state: state.update(pos_embed=torch.zeros(197)), r"pos_embed is \(197,\), expected \(1, 197, 192\)"),
        (lambda state: state.update(extra=torch.zeros(3)), "extra is unknown"),
        (
            lambda state: state.update({"blocks.3.mlp.fc1.weight": torch.zeros(5, 192)}),
            r"blocks\.3\.mlp\.fc1\.weight is \(5, 192\), expected \(768, 192\)",
        ),
        (lambda state: state.update({"patch_embed.proj.weight": torch.zeros(192, 7)}), r"patch_embed\.proj\.weight is \(192, 7\), expected"),
    ]),
    ids=["renamed", "not finite", "missing", "flat positions", "left over", "another shape", "flat kernel"],
)
def test_file_of_another_model_is_refused_with_the_name_of_the_weight(files, tmp_path, change, message):
    state = {key: tensor.clone() for key, tensor in files(TINY)[0].state_dict().items()}
    change(state)
    save_file(state, tmp_path / "changed.safetensors")
    with pytest.raises(ValueError, match=rf"changed\.safetensors is not {TINY}: {message}"):
        Weights(name=TINY, file=str(tmp_path / "changed.safetensors")).load(tiny(224, 3, 1000), *COLOR)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "new", "message"),
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
def test_parts_that_do_not_fit_must_be_listed_in_new(files, options, new, message):
    file = files(TINY)[1]
    with pytest.raises(ValueError, match=message):
        Weights(name=TINY, file=file).load(tiny4(**options), *GRAY)
    report = Weights(name=TINY, file=file, new=new).load(tiny4(**options), *GRAY)
    changed = [name for name in report["new"] + report["left_over"] if not name.startswith("head.")]
    assert changed and all(f".{new[0]}." in f".{name}." for name in changed)


def test_patch_embedding_in_new_is_not_read(files):
    file, model = files(TINY)[1], tiny4()
    before = {name: weight.clone() for name, weight in model.tokenizer.state_dict().items()}
    report = Weights(name=TINY, file=file, new=("tokenizer", "position")).load(model, *GRAY)
    assert report["resized"] == report["adapted"] == [] and {"tokenizer.proj.weight", "position.table"} <= {*report["new"]}
    assert all(torch.equal(weight, before[name]) for name, weight in model.tokenizer.state_dict().items())
    enlarged_model = like(TINY, tokenizer=enlarged(TINY))((28, 28), 1, 10)
    report = Weights(name=TINY, file=file, new=("tokenizer",)).load(enlarged_model, *GRAY)
    assert report["resized"] == report["adapted"] == [] and "tokenizer.tokenizer.proj.weight" in report["new"]


def test_home_folder_in_a_path_is_found(files, tmp_path, monkeypatch, offline):
    monkeypatch.setenv("HOME", str(tmp_path))
    save_file(files(TINY)[0].state_dict(), tmp_path / f"{TINY}.safetensors")
    expected = tmp_path / f"{TINY}.safetensors"
    assert Weights(name=TINY, file=f"~/{TINY}.safetensors").path() == expected
    monkeypatch.setenv("SMALLVIT_WEIGHTS", "~")
    assert Weights(name=TINY).path() == expected


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: like("vit_tiny_patch16_225"), r"timm has no model 'vit_tiny_patch16_225'; expected one of .*vit_tiny"),
        (lambda: like(None), "got the name None; expected the name of a timm model as text"),
        (lambda: like("resnet10t"), "got a ResNet; expected a plain Vision Transformer of timm"),
        (lambda: Weights(name=TINY, file="weights.onnx"), "'weights.onnx'; expected one that ends in .safetensors"),
        (lambda: Weights(name=""), "name is ''; expected timm's name"),
        (lambda: Weights(name=TINY, new="head"), "new is 'head'; expected names of parts"),
        (lambda: Weights(name=TINY, file=Path("weights.pth")), "expected its path as a text"),
        (lambda: Weights(name=TINY, file="nowhere.pth").path(), r"there is no file nowhere\.pth"),
        (lambda: Weights(name="vit_tiny_patch16_224.bogus").path(), r"timm has no weights 'vit_tiny_patch16_224\.bogus'"),
    ],
)
def test_unknown_names_and_wrong_options_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("model", "new", "message"),
    [
        (lambda: SmallCNN((28, 28), 1, 10), (), r"SmallCNN cannot start from .*; expected a ViT, such as like"),
        (lambda: tiny(224, 4), (), "the images have 4 channels, the weights 3; expected as many, or 1"),
        (lambda: tiny(224, 3), ("atention.scael",), r"names atention\.scael, where nothing is new"),
        (lambda: ViT((224, 224), 3, 10), ("weight", "bias", "table"), "does not fit the model"),
    ],
    ids=["CNN", "channels", "misspelled", "shape"],
)
def test_models_that_do_not_fit_are_refused(files, model, new, message):
    with pytest.raises(ValueError, match=message):
        Weights(name=TINY, file=files(TINY)[1], new=new).load(model(), 0.5, 0.5)


@pytest.mark.parametrize("damage", slow_but(("truncated",), ["text", "empty", "truncated", "changed"]))
@pytest.mark.parametrize("kind", slow_after(2, ["safetensors", "plain", "npz"]))
def test_damaged_file_is_refused_by_its_name(files, tmp_path, kind, damage):
    model, file = files(TINY)
    path = Path(file) if kind == "safetensors" else Path(write_file(model, kind, tmp_path))
    content = path.read_bytes()
    broken = tmp_path / f"broken{path.suffix}"
    middle = len(content) // 2
    flipped = content[:8] + bytes(200) + content[208:middle] + bytes(1000) + content[middle + 1000 :]
    broken.write_bytes({"text": b"not weights", "empty": b"", "truncated": content[:middle], "changed": flipped}[damage])
    with pytest.raises(ValueError, match=rf"broken\{path.suffix} cannot be read"):
        Weights(name=TINY, file=str(broken)).load(tiny(224, 3), 0.5, 0.5)


@pytest.mark.parametrize(
    ("content", "message"),
    slow_after(1, [
        ([1, 2], "holds a list without tensors"),
        ({"model": {"epoch": 3}}, "holds a dict without tensors"),
        ({"module.a": torch.zeros(1), "a": torch.zeros(1)}, "has two weights called a"),
        ({"a": torch.zeros(1, dtype=torch.long)}, "a in .* is torch.int64"),
    ]),
)
def test_checkpoint_without_usable_weights_is_refused_by_its_name(tmp_path, content, message):
    torch.save(content, tmp_path / "odd.pth")
    with pytest.raises(ValueError, match=message) as error:
        Weights(name=TINY, file=str(tmp_path / "odd.pth")).load(tiny(224, 3), 0.5, 0.5)
    assert "odd.pth" in str(error.value)


@pytest.mark.parametrize("name, options", slow_after(1, [(TINY, {"in_chans": 1}), ("vit_tiny_patch16_224", {"patch_size": 32})]))
def test_kernel_of_other_channels_or_patches_is_refused(tmp_path, name, options):
    model = random_weights(timm.create_model("vit_tiny_patch16_224", **options))
    for kind in ("plain", "npz"):
        with pytest.raises(ValueError, match=r"patch_embed.proj.weight is|embedding/kernel is"):
            Weights(name=TINY, file=write_file(model, kind, tmp_path)).load(tiny(224, 3), 0.5, 0.5)


@pytest.mark.slow
def test_head_of_other_classes_in_an_npz_is_not_loaded(tmp_path):
    model = random_weights(timm.create_model("vit_tiny_patch16_224", num_classes=30))
    report = Weights(name=TINY, file=write_file(model, "npz", tmp_path)).load(tiny(224, 3, 1000), 0.5, 0.5)
    assert report["new"] == ["head.weight", "head.bias"]


@pytest.mark.parametrize("options", slow_after(1, [{"pool": MeanTokens}, {"registers": 2}]), ids=["mean", "registers"])
def test_positions_of_patches_are_loaded_with_other_prefix_tokens(files, options):
    file = files(TINY)[1]
    ours, plain = tiny4(**options), tiny4()
    report = Weights(name=TINY, file=file, new=("prefix",)).load(ours, *GRAY)
    Weights(name=TINY, file=file).load(plain, *GRAY)
    assert torch.equal(ours.position.table[-49:], plain.position.table[-49:]) and "position.table" not in report["new"]


def test_positions_are_resampled_to_another_grid_of_equal_length(files):
    theirs, file = files(TINY)
    ours = like(TINY)((112, 448), 3, 10)
    report = Weights(name=TINY, file=file).load(ours, 0.5, 0.5)
    assert report["resized"] == ["position.table: 14 x 14 to 7 x 28"]
    square = theirs.pos_embed[0, 1:].detach().T.reshape(1, -1, 14, 14)
    expected = nn.functional.interpolate(square, size=(7, 28), mode="bicubic", antialias=True).flatten(2)[0].T
    assert (ours.position.table[1:] - expected).abs().max() < 1e-5
    assert torch.equal(ours.position.table[0], theirs.pos_embed[0, 0])


def test_positions_of_prefix_tokens_are_added_if_the_model_has_none(files):
    theirs, file = files(TINY)
    ours = tiny(224, 3, 1000, position=partial(Learned, on_prefix=False))
    report = Weights(name=TINY, file=file).load(ours, 0.5, 0.5)
    assert report["adapted"] == ["prefix: 1 tokens with their positions added"] and len(ours.position.table) == 196
    x = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert (ours(x) - theirs.eval()(x)).abs().max() < 1e-4


def test_no_code_in_a_file_is_executed(tmp_path):
    class Trap:
        def __reduce__(self):
            return (tmp_path / "sprung").touch, ()

    torch.save({"model": Trap()}, tmp_path / "trap.pth")
    with pytest.raises(ValueError, match=r"trap\.pth cannot be read"):
        Weights(name=TINY, file=str(tmp_path / "trap.pth")).load(tiny(224, 3), 0.5, 0.5)
    assert not (tmp_path / "sprung").exists()


# With other slots


def test_shifted_patches_without_norm_give_equal_features(files):
    plain, shifted = tiny4(), tiny4(tokenizer=partial(ShiftedPatchEmbed, patch=4, norm=False))
    for model in (plain, shifted):
        Weights(name=TINY, file=files(TINY)[1]).load(model, *GRAY)
    x = torch.randn(2, 1, 28, 28)
    with torch.no_grad():
        assert (plain.features(x) - shifted.features(x)).abs().max() <= 1e-5
    assert shifted.tokenizer.proj.weight.shape == (192, 5 * 16) and (shifted.tokenizer.proj.weight[:, 16:] == 0).all()


def test_locality_attention_without_mask_gives_equal_features(files):
    models = tiny4(), tiny4(attention=partial(LocalityAttention, mask_self=False))
    for model, new in zip(models, ((), ("attention.scale",))):
        Weights(name=TINY, file=files(TINY)[1], new=new).load(model, *GRAY)
    x = torch.randn(2, 1, 28, 28)
    with torch.no_grad():
        assert (models[0].features(x) - models[1].features(x)).abs().max() <= 1e-5


def test_learned_reduction_is_initialized_anew(files):
    model = tiny4(reduction=partial(LearnedPrune, keep=0.7))
    report = Weights(name=TINY, file=files(TINY)[1]).load(model, *GRAY)
    assert all("reduction" in name or name.startswith("head.") for name in report["new"]) and len(report["new"]) > 2


def test_layer_decay_gives_the_learning_rates_of_timm():
    from timm.optim import param_groups_layer_decay

    theirs = timm.create_model("vit_tiny_patch16_224", num_classes=3)
    expected = {}
    for group in param_groups_layer_decay(theirs, layer_decay=0.75):
        expected |= {id(p): group["lr_scale"] for p in group["params"]}
    names = {name: expected[id(p)] for name, p in theirs.named_parameters()}
    ours = like("vit_tiny_patch16_224")((224, 224), 3, 3)
    groups, rates = decay_groups(Supervised(ours), 0.05, 0.75)
    found = {id(p): rate(0.5, 1.0) for group, rate in zip(groups, rates) for p in group["params"]}
    assert len(found) == len(list(ours.parameters()))
    scale = {name: found[id(p)] for name, p in ours.named_parameters()}
    pairs = {"head.weight": "head.weight", "tokenizer.proj.weight": "patch_embed.proj.weight"}
    pairs |= {"position.table": "pos_embed", "prefix": "cls_token"}
    pairs |= {f"blocks.{index}.mlp.0.weight": f"blocks.{index}.mlp.fc1.weight" for index in range(12)}
    assert all(scale[ours] == pytest.approx(names[timms]) for ours, timms in pairs.items())
    with pytest.raises(ValueError, match="SmallCNN has none"):
        decay_groups(Supervised(SmallCNN((28, 28), 1, 3)), 0.05, 0.75)


# In a run


@pytest.fixture
def offline(monkeypatch):
    """The hub cannot be reached."""
    import huggingface_hub

    def fail(*args, **options):
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", fail)


SHAPE = like(TINY, tokenizer=PATCH4)
SHORT = Run(data=digits, model=SHAPE, steps=2, batch=4, labels=20, val=20, ema=0.0, lr=1e-4, layer_decay=0.75)


@pytest.mark.slow
def test_run_loads_weights_and_its_record_names_them(files, tmp_path):
    file = files(TINY)[1]
    run = SHORT.vary(init=Weights(name=TINY, file=file))
    record = fit(run, tmp_path / "tuned")
    assert record.init_weights["name"] == TINY and len(record.init_weights["sha256"]) == 64
    assert record.init_weights["new"] == ["head.weight", "head.bias"] and record.pretraining is None
    assert rebuild(describe(run)) == run and fingerprint(run) != fingerprint(SHORT)
    untrained = fit(run.vary(steps=0), tmp_path / "still")
    fresh = fit(SHORT.vary(steps=0), tmp_path / "fresh")
    assert untrained.test != fresh.test
    loaded = load(tmp_path / "tuned")
    assert loaded.run == run and isinstance(loaded.model, ViT)


@pytest.mark.slow
def test_file_of_weights_that_was_replaced_since_a_run_finished_is_refused(files, tmp_path):
    state, file = files(TINY)[0].state_dict(), tmp_path / "own.safetensors"
    runs = ablate({"tuned": SHORT.vary(init=Weights(name=TINY, file=str(file)), steps=0)}, labels=[20], seeds=range(2), references=False)
    save_file(state, file)
    first = launch(runs[:1], tmp_path, recipe="t", jobs=1)[0]
    save_file(state | {"norm.bias": state["norm.bias"] + 1}, file)
    with pytest.raises(ValueError, match=r"1 run that has finished began with another file .*; put the old file back, or train"):
        launch(runs, tmp_path, recipe="t", jobs=1)
    place = folder(runs[0], tmp_path, "t")
    with pytest.raises(ValueError, match=rf"pretrained weights {TINY} that it began with has been replaced since; put the old file"):
        fit(runs[0].run, place)
    save_file(state, file)
    assert fit(runs[0].run, place).weights_sha256 == first.weights_sha256
    file.unlink()
    assert fit(runs[0].run, place).finished, "a finished run does not need its file"


@pytest.mark.slow
def test_unavailable_weights_are_reported_once_and_the_other_arms_are_trained(tmp_path, capfd, monkeypatch, offline):
    monkeypatch.delenv("SMALLVIT_WEIGHTS", raising=False)
    with pytest.raises(Unavailable, match=r"put vit_tiny.*\.safetensors into a folder and set SMALLVIT_WEIGHTS to it"):
        fit(SHORT.vary(init=Weights(name=TINY)), tmp_path / "alone")
    small = Run(data=digits, model=partial(ViT, tokenizer=PATCH4, dim=8, depth=1, heads=1), steps=2, val=20)
    arms = {"scratch": small, "tuned": small.vary(model=SHAPE, init=Weights(name=TINY)), "wider": small.vary(dim=16)}
    runs = ablate(arms, labels=[20], seeds=range(6), references=False)
    records = launch(runs, tmp_path / "out", recipe="t", jobs=1)
    messages = capfd.readouterr().err
    assert messages.count("unavailable:") == 1 and messages.count(TINY) <= 3
    by_arm = {arm: {record.status for record in records if record.arm == arm} for arm in arms}
    assert by_arm == {"scratch": {"finished"}, "tuned": {"unavailable"}, "wider": {"finished"}}
    comparison = compare(records)
    verdicts = {row.arm: row.verdict for row in comparison.rows}
    assert comparison.family == 1 and verdicts["tuned"] is None and verdicts["wider"]
    for page in (markdown(records, title="t", doc="?"), html(records, title="t", doc="?")):
        assert "Unavailable here" in page and "SMALLVIT_WEIGHTS" in page and "Failures" not in page


@pytest.mark.slow
def test_weights_that_become_available_are_used(files, tmp_path, monkeypatch, offline):
    monkeypatch.setenv("SMALLVIT_WEIGHTS", str(tmp_path / "weights"))
    run = ArmRun(run=SHORT.vary(init=Weights(name=TINY), steps=1), arm="tuned")
    assert [record.status for record in launch([run], tmp_path / "out", recipe="t", jobs=1)] == ["unavailable"]
    (tmp_path / "weights").mkdir()
    save_file(files(TINY)[0].state_dict(), tmp_path / "weights" / f"{TINY}.safetensors")
    assert [record.status for record in launch([run], tmp_path / "out", recipe="t", jobs=1)] == ["finished"]


def test_pretrained_references_are_named_by_their_training_data():
    scratch = Run(steps=1_000, labels=None)
    arms = imagenet_vit_s(scratch, upsampled=True)
    assert list(arms)[:2] == ["ViT-S from ImageNet-21k (fine-tuned)", "ViT-S from ImageNet-21k (frozen)"] and len(arms) == 5
    runs = ablate({"scratch": scratch}, seeds=[0], extra_references=arms)
    assert {run.role for run in runs if run.arm in arms} == {"reference"} and len(runs) == 1 + 3 + 5
    assert {run.arm for run in runs if run.run.init is None and run.arm in arms} == {"ViT-S from scratch"}
    assert "ViT-S from scratch" not in imagenet_vit_s(scratch, scratch=False)
    assert [*imagenet_vit_s(scratch.vary(steps=0), upsampled=True)] == [name for name in arms if name.endswith("(frozen)")]
    assert training_data(DEIT) == "ImageNet-1k" and training_data("vit_small_patch16_224.dino") == "ImageNet-1k by DINO"
    tiny_arms = imagenet_vit_s(scratch, name=TINY, upsampled=True)
    kind = TINY.partition(".")[0]
    assert list(tiny_arms)[-2:] == [f"{kind} from ImageNet-21k at 224 pixels (frozen)", f"{kind} from scratch"]
    bilinear = imagenet_vit_s(scratch, name="vit_base_patch16_224_miil.in21k_ft_in1k", upsampled=True)
    with torch.device("meta"):
        models = [run.model((28, 28), 1, 10) for group in (arms, tiny_arms, bilinear) for run in group.values()]
    assert [model.norm.weight.shape[0] for model in models] == [384] * 5 + [192] * 5 + [768] * 5
    resizing = [(m.tokenizer.size, m.tokenizer.interpolation) for m in models if hasattr(m.tokenizer, "interpolation")]
    assert resizing == [(224, "bicubic")] * 4 + [(224, "bilinear")] * 2, "as in timm's configuration of the weights"
    judged = scratch.vary(evaluators=(balanced_accuracy, accuracy))
    of_arms = [run.evaluators for run in imagenet_vit_s(judged).values()]
    assert of_arms[0] == of_arms[2] == (balanced_accuracy, accuracy), "the score of the baseline"
    assert describe(of_arms[1][0]) == describe(partial(linear_probe, metric="balanced_accuracy"))
    assert [run.evaluators for run in arms.values()][:2] == [(accuracy,), (linear_probe, knn)]
    with pytest.raises(ValueError, match="is the name of an extra reference and of an arm"):
        ablate({"scratch": scratch, "ViT-S from scratch": scratch.vary(lr=1.0)}, extra_references=arms)
