"""ConvShortcutBlock and gated MLPs: equations, off settings, other slots, and what is refused."""

import copy
import io
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from timm.layers import GluMlp, SwiGLU, SwiGLUPacked
from torch import nn
from toys import TINY_VIT, assert_close, randomize, tiny_vit, training_of

from smallvit import (
    DINO,
    MAE,
    Attention,
    Block,
    ClassToken,
    ConvShortcutBlock,
    DistilledTokens,
    LayerContext,
    LearnedPrune,
    MeanTokens,
    Merge,
    Prune,
    Rotary,
    Run,
    Supervised,
    TalkingHeadsAttention,
    describe,
    fingerprint,
    initialize,
    native,
    rebuild,
)
from smallvit.attention_positions import places_of
from smallvit.augment import Batch
from smallvit.flops import closed_form, counted
from smallvit.optim import decay_groups
from smallvit.train.stack import Stack
from smallvit.vit import Blocks, GatedUnit

D, GRID, PREFIX = 8, (3, 4), 2
BATCH_NORM = partial(ConvShortcutBlock, norm="batch")


def conv_block(prefix=PREFIX, **options):
    """A block with random weights, in double precision."""
    made = randomize(ConvShortcutBlock(D, 2, Attention, None, 0.0, **options).double(), 0.3)
    made.set_context(LayerContext(prefix=prefix))
    return made.eval()


def called(made, x, grid=GRID):
    """The tokens and sizes that a block gives for all patches of a grid."""
    return made(x, None, None, places_of(grid, x.device))[:2]


def plain_output(made, x):
    """What the block gives without its second path."""
    return Block.forward(made, x)[0]


def tokens(grid=GRID, prefix=PREFIX):
    return torch.randn(2, prefix + grid[0] * grid[1], D, dtype=torch.float64)


# The convolution


@pytest.mark.parametrize("norm", ["layer", "batch"])
@pytest.mark.parametrize(("grid", "prefix"), [((3, 4), 2), ((1, 1), 0), ((1, 5), 1)])
def test_second_path_follows_its_equation_patch_by_patch(norm, grid, prefix):
    made, x = conv_block(norm=norm, prefix=prefix), tokens(grid, prefix)
    path, (rows, columns) = made.shortcut, grid
    with torch.no_grad():
        if norm == "batch":
            path.norm.running_mean.normal_()
        given = F.gelu(x[:, prefix:]).unflatten(1, grid)
        if norm == "layer":
            given = F.layer_norm(given, (D,), path.norm.weight, path.norm.bias, 1e-6)
        else:
            scale = path.norm.weight / (path.norm.running_var + 1e-5).sqrt()
            given = (given - path.norm.running_mean) * scale + path.norm.bias
        expected = plain_output(made, x)
        for r in range(rows):
            for c in range(columns):
                expected[:, prefix + r * columns + c] += path.conv.bias
                for i, j in [(i, j) for i in range(3) for j in range(3) if 0 <= r + i - 1 < rows and 0 <= c + j - 1 < columns]:
                    expected[:, prefix + r * columns + c] += path.conv.weight[:, 0, i, j] * given[:, r + i - 1, c + j - 1]
        output, size = called(made, x, grid)
    assert_close(output, expected)
    assert size is None and torch.equal(output[:, :prefix], plain_output(made, x)[:, :prefix])


def test_kernel_of_one_tap_adds_the_activated_patch_itself():
    made, x = conv_block(norm="batch"), tokens()
    made.shortcut.norm = nn.Identity()
    with torch.no_grad():
        made.shortcut.conv.weight.copy_(F.pad(torch.ones(D, 1, 1, 1), (1, 1, 1, 1)))
        made.shortcut.conv.bias.zero_()
    assert_close(called(made, x)[0][:, PREFIX:], plain_output(made, x)[:, PREFIX:] + F.gelu(x[:, PREFIX:]), 1e-12)


def test_patches_move_with_the_image_and_border_patches_see_zeros_outside():
    path, x = conv_block().shortcut, torch.randn(1, 5, 6, D, dtype=torch.float64)
    moved = x.roll((1, 1), (1, 2))
    out, out_moved = (path(image.flatten(1, 2), (5, 6)).unflatten(1, (5, 6)) for image in (x, moved))
    assert_close(out_moved[:, 2:-1, 2:-1], out[:, 1:-2, 1:-2], 1e-12)
    assert not torch.allclose(out_moved[:, 0], out[:, -1])


def test_zero_start_and_no_layers_equal_the_plain_block_bit_for_bit():
    images = torch.randn(2, 1, 12, 12)
    plain = initialize(tiny_vit(), 1)
    for options in (dict(start="zero"), dict(layers=0)):
        for norm in ("layer", "batch"):
            ours = initialize(tiny_vit(block=partial(ConvShortcutBlock, norm=norm, **options)), 1)
            state = ours.state_dict()
            assert all(torch.equal(state[name], tensor) for name, tensor in plain.state_dict().items())
            new = {name.split(".")[2] for name in state.keys() - plain.state_dict().keys()}
            assert new == ({"shortcut"} if "start" in options else set())
            assert torch.equal(ours(images), plain(images))
    default = initialize(tiny_vit(block=ConvShortcutBlock), 1)
    assert not torch.equal(default(images), plain(images))
    ours = tiny_vit(block=partial(ConvShortcutBlock, start="zero"))
    ours(images).square().sum().backward()
    assert ours.blocks[0].shortcut.conv.weight.grad.abs().max() > 0  # zero is no dead end


def test_block_passes_on_where_the_tokens_are():
    rotary, images = partial(Attention, position=Rotary), torch.randn(2, 1, 12, 12)
    plain, ours = (initialize(tiny_vit(block=block, attention=rotary), 1) for block in (Block, partial(ConvShortcutBlock, start="zero")))
    assert torch.equal(ours(images), plain(images))
    made, x, places = tiny_vit(block=ConvShortcutBlock, attention=rotary).blocks[0], torch.randn(2, 13, 16), places_of((3, 4), "cpu")
    output, _, same = made(x, None, None, places)
    expected = Block.forward(made, x, None, None, places)[0]
    expected[:, 1:] += made.shortcut(x[:, 1:], (3, 4))
    assert same is places and torch.equal(output, expected)


def test_drop_path_skips_the_branches_and_keeps_the_convolution():
    made = ConvShortcutBlock(D, 2, Attention, None, 0.999999)
    made.prefix, x = 0, torch.randn(2, 12, D)
    assert torch.equal(called(made.train(), x)[0], x + made.shortcut(x, GRID))


@pytest.mark.parametrize("make", [ConvShortcutBlock, BATCH_NORM, partial(ConvShortcutBlock, norm_first=False, activation="geglu")])
@pytest.mark.parametrize("pool", [ClassToken, MeanTokens, DistilledTokens])
def test_models_train_on_every_image_size_with_any_prefix(make, pool):
    model = tiny_vit(block=make, pool=pool, registers=1, attention=TalkingHeadsAttention)
    for image in ((12, 12), (4, 18), (18, 4), (2, 4)):
        model.zero_grad()
        model(torch.randn(3, 1, *image)).square().sum().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
        assert all(p.grad.abs().max() > 0 for p in model.blocks[0].shortcut.parameters())
        with_class = pool is not MeanTokens  # then the last block changes patches that nobody reads
        assert (model.blocks[-1].shortcut.conv.weight.grad.abs().max() == 0) == with_class
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.randn(3, 1, 12, 12)).isfinite().all()


@pytest.mark.parametrize("make", [ConvShortcutBlock, BATCH_NORM])
def test_dino_takes_crops_of_two_sizes(make):
    dino = DINO(tiny_vit((8, 8), block=make), prototypes=12, hidden=16, bottleneck=8).train()
    views = torch.randn(8, 1, 8, 8), torch.randn(12, 1, 4, 4)
    dino(Batch(torch.randn(4, 1, 8, 8), torch.ones(4, 5) / 5, views), 0.0)["loss"].backward()
    assert dino.student.blocks[0].shortcut.conv.weight.grad.isfinite().all()


def test_shortcut_before_the_first_reduction_only():
    for reduction, layers in ((partial(Merge, r=8), 0), (partial(Prune, keep=0.5), 1), (partial(LearnedPrune, keep=0.5), 1)):
        model = tiny_vit(block=partial(ConvShortcutBlock, layers=layers), reduction=reduction, depth=4)
        assert model(torch.randn(2, 1, 12, 12)).shape == (2, 5)
        assert [block.shortcut is not None for block in model.blocks] == [layer < layers for layer in range(4)]
        for mode in (True, False):
            with pytest.raises(ValueError, match=r"needs all patches in their grid, and some are hidden \(MAE\), merged or pruned; .* layers=k"):
                tiny_vit(block=ConvShortcutBlock, reduction=reduction, depth=4).train(mode)(torch.randn(2, 1, 12, 12))


def test_hidden_patches_and_a_block_alone_are_refused_and_all_patches_work_again():
    model = tiny_vit(block=ConvShortcutBlock)
    images = torch.rand(2, 1, 12, 12)
    expected = model(images)
    mae = MAE(model, decoder_dim=16, decoder_depth=1)
    with pytest.raises(ValueError, match=r"ConvShortcutBlock needs all patches in their grid, and some are hidden \(MAE\)"):
        mae(Batch(images, torch.eye(5)[:2]), 0.0)
    assert torch.equal(model(images), expected)
    with pytest.raises(ValueError, match="needs the places of its patches and got none; expected a call by a ViT"):
        ConvShortcutBlock(D, 2, Attention, None, 0.0)(torch.randn(1, 5, D))


class OldCall(ConvShortcutBlock):
    def forward(self, x, size=None, mask=None):
        return super().forward(x, size, mask)


def test_block_that_does_not_pass_on_the_places_is_refused_when_the_model_is_built():
    with pytest.raises(ValueError, match=r"OldCall needs to know where the tokens are, and a OldCall does not pass it on"):
        tiny_vit(block=OldCall)
    assert tiny_vit(block=partial(OldCall, layers=0))(torch.randn(2, 1, 12, 12)).isfinite().all()  # it needs none


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(norm="group"), "got norm='group', start='default'; expected 'layer' or 'batch'"),
        (dict(start="one"), "start='one'; expected"),
        (dict(layers=-1), "layers is -1; expected None or a number of blocks"),
        (dict(layers=True), "layers is True"),
    ],
)
def test_unknown_options_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        tiny_vit(block=partial(ConvShortcutBlock, **options))


def test_options_are_written_to_records():
    default = Run(steps=1).vary(block=ConvShortcutBlock)
    for options in (dict(norm="batch"), dict(start="zero"), dict(layers=2), dict(mlp_ratio=2.0)):
        run = default.vary(block=partial(ConvShortcutBlock, **options))
        assert rebuild(describe(run)) == run and fingerprint(run) != fingerprint(default)


def test_only_the_kernel_of_the_convolution_decays():
    path = tiny_vit(block=ConvShortcutBlock).blocks[0].shortcut
    model = Supervised(nn.ModuleList([path]))
    (decayed, spared), _ = decay_groups(model, 0.1)
    assert [id(p) for p in decayed["params"]] == [id(path.conv.weight)] and len(spared["params"]) == 3


@pytest.mark.parametrize("options", [{}, {"layers": 1}, {"activation": "swiglu"}], ids=str)
def test_multiply_adds_are_those_that_torch_counts(options):
    model = tiny_vit(block=partial(ConvShortcutBlock, **options), registers=1)
    macs = closed_form(model)
    assert sum(macs.values()) == counted(model, torch.rand(1, 1, 12, 12)) / 2
    assert sum(closed_form(model, image=(8, 20)).values()) == counted(model, torch.rand(1, 1, 8, 20)) / 2


@pytest.mark.parametrize("make", [ConvShortcutBlock, BATCH_NORM, partial(Block, activation="swiglu")])
def test_runs_are_trained_in_a_stack_as_alone(make):
    run = Run(model=partial(TINY_VIT, block=make), labels=50, val=20, steps=2, batch=8)
    stack = Stack([training_of(run, seed) for seed in (0, 1)])  # compares losses and gradients with those of each run alone
    stack.train_step()
    assert all(member.step == 1 for member in stack.members)


def block_with(unit: nn.Module, *args, **options) -> Block:
    block = Block(*args, **options)
    block.mlp[1] = unit
    return block


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (ConvShortcutBlock, "ConvShortcutBlock is another kind of block"),
        (partial(block_with, GatedUnit(F.relu), activation="swiglu"), "GatedUnit() is another activation"),
        (partial(block_with, nn.GELU(approximate="tanh")), "GELU(approximate='tanh') is another activation"),
    ],
)
def test_native_kernel_leaves_them_to_pytorch(make, reason, capsys):
    if missing := native.reason_against():
        pytest.skip(missing)
    native.blocks.note.cache_clear()
    blocks = Blocks([make(32, 2, Attention, None, 0.0, mlp_ratio=3.0)])
    assert native.native_blocks(nn.ModuleList([blocks])) == []
    assert reason in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("make", [ConvShortcutBlock, BATCH_NORM, partial(Block, activation="geglu")])
def test_exported_model_gives_equal_logits_for_any_batch_size(make):
    model = randomize(tiny_vit((8, 8), block=make, depth=1)).eval()
    batch = {"x": {0: torch.export.Dim("batch", min=1, max=64)}}
    program, file = torch.export.export(model, (torch.randn(2, 1, 8, 8),), dynamic_shapes=batch), io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    x = torch.randn(5, 1, 8, 8)
    assert_close(torch.export.load(file).module()(x), model(x), 1e-6)


# Gated MLPs


def gated(activation, dim=16, ratio=4.0):
    return randomize(Block(dim, 2, Attention, None, 0.0, activation=activation, mlp_ratio=ratio).double(), 0.3).mlp


def test_gated_mlps_equal_those_of_timm():
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    for activation, make in (("swiglu", SwiGLUPacked), ("geglu", partial(GluMlp, act_layer=nn.GELU, gate_last=False))):
        mlp = gated(activation)
        hidden = mlp[3].in_features
        theirs = make(16, hidden_features=2 * hidden).double()
        theirs.load_state_dict({name.replace("0.", "fc1.").replace("3.", "fc2."): t for name, t in mlp.state_dict().items()})
        assert_close(mlp(x), theirs(x), 1e-12)
    mlp = gated("swiglu")
    hidden = mlp[3].in_features
    theirs = SwiGLU(16, hidden_features=hidden).double()
    (gate, values), (gate_bias, values_bias) = mlp[0].weight.chunk(2), mlp[0].bias.chunk(2)
    theirs.load_state_dict({
        "fc1_g.weight": gate, "fc1_g.bias": gate_bias, "fc1_x.weight": values, "fc1_x.bias": values_bias,
        "fc2.weight": mlp[3].weight, "fc2.bias": mlp[3].bias,
    })  # fmt: skip
    assert_close(mlp(x), theirs(x), 1e-12)


@pytest.mark.parametrize(("dim", "ratio", "hidden"), [(64, 4.0, 176), (192, 4.0, 512), (384, 4.0, 1024), (64, 2.0, 88)])
@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
def test_gated_mlp_has_about_as_many_weights(dim, ratio, hidden, activation):
    ours, plain = (Block(dim, 2, Attention, None, 0.0, activation=a, mlp_ratio=ratio).mlp for a in (activation, "gelu"))
    count, reference = (sum(p.numel() for p in mlp.parameters()) for mlp in (ours, plain))
    assert ours[3].in_features == hidden and count == 3 * dim * hidden + 2 * hidden + dim
    assert 0.99 < count / reference < 1.04


@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
def test_constant_gate_gives_a_linear_map_and_constant_values_a_plain_mlp(activation):
    mlp, act, x = gated(activation), {"swiglu": F.silu, "geglu": F.gelu}[activation], torch.randn(7, 16, dtype=torch.float64)
    constant, plain = copy.deepcopy(mlp), copy.deepcopy(mlp)
    hidden = mlp[3].in_features
    with torch.no_grad():
        constant[0].weight[:hidden] = 0
        plain[0].weight[hidden:] = 0
        plain[0].bias[hidden:] = 1
    assert_close(constant(x) - constant(0 * x) + constant(-x), constant(0 * x), 1e-12)
    weight, bias = mlp[0].weight[:hidden], mlp[0].bias[:hidden]
    assert_close(plain(x), act(x @ weight.T + bias) @ mlp[3].weight.T + mlp[3].bias, 1e-12)
