"""Conditional positions, PEG and PEGBlock: the equation, parity with timm, off settings, other slots, and what is refused."""

import io
from functools import partial

import pytest
import torch
from timm.models.twins import PosConv
from toys import TINY_VIT, assert_close, option_id, randomize, tiny_vit, training_of

from smallvit import (
    DINO,
    MAE,
    PEG,
    Attention,
    Block,
    ClassToken,
    DistilledTokens,
    LearnedPrune,
    MeanTokens,
    Merge,
    PEGBlock,
    Prune,
    Rotary,
    Run,
    Supervised,
    describe,
    fingerprint,
    initialize,
    native,
    position_similarity,
    rebuild,
    to_timm,
)
from smallvit.attention_positions import places_of
from smallvit.augment import Batch
from smallvit.flops import closed_form, counted
from smallvit.optim import decay_groups
from smallvit.train.stack import Stack

D = 8
BOTH = {"before the blocks": dict(position=PEG), "after a block": dict(position=None, block=PEGBlock)}
both = pytest.mark.parametrize("slots", BOTH.values(), ids=BOTH)


def random_peg(grid, prefix):
    return randomize(PEG(D, grid, prefix).double(), 0.5)


# The convolution


@pytest.mark.parametrize(("grid", "prefix"), [((3, 4), 2), ((1, 1), 0), ((1, 5), 1), ((2, 2), 0)])
def test_positions_follow_their_equation_patch_by_patch(grid, prefix):
    peg, (rows, columns) = random_peg((7, 7), prefix), grid  # any grid: no weight depends on it
    x = torch.randn(2, prefix + rows * columns, D, dtype=torch.float64)
    expected = x.clone()
    for r in range(rows):
        for c in range(columns):
            added = peg.conv.bias.detach().clone()
            for i, j in [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if 0 <= r + i < rows and 0 <= c + j < columns]:
                added = added + peg.conv.weight.detach()[:, 0, i + 1, j + 1] * x[:, prefix + (r + i) * columns + c + j]
            expected[:, prefix + r * columns + c] += added
    found = peg(x, grid)
    assert_close(found, expected, 1e-12)
    assert torch.equal(found[:, :prefix], x[:, :prefix])


@pytest.mark.parametrize("grid", [(4, 4), (3, 7), (1, 1)])
def test_positions_equal_those_of_timm(grid):
    theirs, ours = randomize(PosConv(D, D).double(), 0.5), PEG(D, (2, 2), 1).double()
    ours.conv.load_state_dict(theirs.proj[0].state_dict())
    x = torch.randn(2, 1 + grid[0] * grid[1], D, dtype=torch.float64)
    assert_close(ours(x, grid)[:, 1:], theirs(x[:, 1:], grid), 1e-12)


def test_patches_move_with_the_image_and_the_border_tells_where_they_are():
    peg, x = random_peg((5, 6), 0), torch.randn(1, 5, 6, D, dtype=torch.float64)
    moved = x.roll((1, 1), (1, 2))
    out, out_moved = (peg(image.flatten(1, 2), (5, 6)).unflatten(1, (5, 6)) for image in (x, moved))
    assert_close(out_moved[:, 2:-1, 2:-1], out[:, 1:-2, 1:-2], 1e-12)
    alike = peg(torch.ones(1, 30, D, dtype=torch.float64), (5, 6)).unflatten(1, (5, 6))
    assert_close(alike[:, 1:-1, 1:-1], alike[:, 1:2, 1:2].expand(-1, 3, 4, -1), 1e-12)
    assert len(alike.flatten(0, 2).round(decimals=8).unique(dim=0)) == 9  # inside, four sides and four corners


@both
def test_a_model_with_them_knows_where_patches_are(slots):
    """Without positions, images with the same patches in another order have the same mean of tokens."""
    order, x = torch.randperm(36), torch.randn(2, 1, 12, 12)
    mixed = x.unfold(2, 2, 2).unfold(3, 2, 2).flatten(2, 3)[:, :, order].unflatten(2, (6, 6)).permute(0, 1, 2, 4, 3, 5).reshape(x.shape)
    plain, ours = tiny_vit(position=None, pool=MeanTokens), randomize(tiny_vit(pool=MeanTokens, **slots), 0.3)
    assert_close(plain(mixed), plain(x), 1e-5)
    assert (ours(mixed) - ours(x)).abs().max() > 1e-3


# Off


def test_zero_start_and_no_layers_equal_a_model_without_positions_bit_for_bit():
    x, plain = torch.randn(2, 1, 12, 12), initialize(tiny_vit(position=None, registers=1), 1)
    off = (dict(position=partial(PEG, start="zero")), *(dict(position=None, block=partial(PEGBlock, **o)) for o in (dict(start="zero"), dict(layers=0))))
    for slots in off:
        ours = initialize(tiny_vit(registers=1, **slots), 1)
        assert all(torch.equal(ours.state_dict()[name], tensor) for name, tensor in plain.state_dict().items())
        assert torch.equal(ours(x), plain(x))
        ours(x).square().sum().backward()
        new = [p for name, p in ours.named_parameters() if name not in plain.state_dict()]
        assert len(new) == (0 if "layers" in getattr(slots.get("block"), "keywords", {}) else 2)
        assert all(p.grad.abs().max() > 0 for p in new)  # zero is no dead end
    for slots in BOTH.values():
        assert not torch.equal(initialize(tiny_vit(registers=1, **slots), 1)(x), plain(x))


def test_block_is_a_plain_block_and_then_the_positions():
    made, x, places = randomize(PEGBlock(D, 2, Attention, None, 0.0), 0.3), torch.randn(2, 13, D), places_of((3, 4), torch.device("cpu"))
    output, size, same = made(x, None, None, places)
    assert torch.equal(output, made.peg(Block.forward(made, x)[0], (3, 4))) and size is None and same is places


@pytest.mark.parametrize(("layers", "count"), [(1, 1), (0, 0), (2, 2), (None, 3), (9, 3)])
def test_layers_is_the_number_of_blocks_with_positions(layers, count):
    model = tiny_vit(block=partial(PEGBlock, layers=layers), depth=3, registers=1)
    assert [block.peg is not None for block in model.blocks] == [index < count for index in range(3)]
    assert all(block.peg.prefix == 2 for block in model.blocks[:count])


# With the other slots


@both
@pytest.mark.parametrize("pool", [ClassToken, MeanTokens, DistilledTokens])
def test_models_train_on_every_image_size_with_any_prefix(pool, slots):
    model = tiny_vit(pool=pool, registers=1, **slots)
    new = model.position or model.blocks[0].peg
    for image in ((12, 12), (4, 18), (18, 4), (2, 2)):
        model.zero_grad()
        model(torch.randn(3, 1, *image)).square().sum().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
        assert all(p.grad.abs().max() > 0 for p in new.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.randn(3, 1, 12, 12)).isfinite().all()
    assert model.to(torch.bfloat16)(torch.randn(3, 1, 12, 12).bfloat16()).isfinite().all()


@pytest.mark.parametrize("reduction", [partial(Merge, r=4), partial(Prune, layers=(1,)), partial(LearnedPrune, layers=(1,))], ids=option_id)
def test_position_slot_works_with_every_reduction_and_the_block_only_before_it(reduction):
    x = torch.randn(2, 1, 12, 12)
    for mode in (True, False):
        assert tiny_vit(position=PEG, reduction=reduction).train(mode)(x).isfinite().all()
        assert tiny_vit(position=PEG, reduction=reduction, attention=partial(Attention, position=Rotary)).train(mode)(x).isfinite().all()
        if reduction.func is not Merge:
            assert tiny_vit(block=PEGBlock, reduction=reduction).train(mode)(x).isfinite().all()
        with pytest.raises(ValueError, match=r"PEGBlock needs all patches .* some are hidden \(MAE\), merged or pruned; expected .* position=PEG"):
            tiny_vit(block=partial(PEGBlock, layers=None), reduction=reduction).train(mode)(x)


def test_masked_autoencoder_with_the_position_slot_sees_no_hidden_pixel_and_the_block_is_refused():
    mae = MAE(tiny_vit(position=PEG), decoder_dim=16, decoder_depth=1)
    images = torch.rand(2, 1, 12, 12, requires_grad=True)
    visible, _ = mae.hide(images)
    mae.encode(images, visible).square().sum().backward()
    seen = images.grad.unfold(2, 2, 2).unfold(3, 2, 2).abs().amax((1, 4, 5)).flatten(1) > 0
    assert torch.equal(seen, torch.zeros(2, 36, dtype=torch.bool).scatter(1, visible, True))
    everything = torch.arange(36).expand(2, 36)
    assert torch.equal(mae.encode(images, everything), mae.model.tokens(images)[0])
    with pytest.raises(ValueError, match="PEGBlock needs all patches in their grid, and some are hidden"):
        MAE(tiny_vit(block=PEGBlock), decoder_dim=16, decoder_depth=1)(Batch(images, torch.eye(5)[:2]), 0.0)


@both
def test_dino_takes_crops_of_two_sizes(slots):
    dino = DINO(tiny_vit((8, 8), **slots), prototypes=12, hidden=16, bottleneck=8, patches=1.0).train()
    views = torch.randn(8, 1, 8, 8), torch.randn(12, 1, 4, 4)
    dino(Batch(torch.randn(4, 1, 8, 8), torch.ones(4, 5) / 5, views), 0.0)["loss"].backward()
    new = dino.student.position or dino.student.blocks[0].peg
    assert new.conv.weight.grad.isfinite().all()


def test_kernels_do_not_decay():
    for slots in BOTH.values():
        model = tiny_vit(**slots)
        new = model.position or model.blocks[0].peg
        groups, _ = decay_groups(Supervised(model), 0.1)
        decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
        assert not decayed & {id(p) for p in new.parameters()}


@both
def test_multiply_adds_are_those_that_torch_counts(slots):
    model, plain = tiny_vit(registers=1, **slots), tiny_vit(registers=1, position=None)
    for image, patches in (((12, 12), 36), ((8, 20), 40)):
        macs = sum(closed_form(model, image=image).values())
        assert macs == counted(model, torch.rand(1, 1, *image)) / 2 == sum(closed_form(plain, image=image).values()) + 9 * patches * 16


@both
def test_runs_are_trained_in_a_stack_as_alone(slots):
    run = Run(model=partial(TINY_VIT, **slots), labels=50, val=20, steps=2, batch=8)
    stack = Stack([training_of(run, seed) for seed in (0, 1)])  # compares losses and gradients with those of each run alone
    stack.train_step()
    assert all(member.step == 1 for member in stack.members)


def test_native_kernel_computes_the_blocks_behind_the_position_slot(capsys):
    if missing := native.reason_against():
        pytest.skip(missing)
    model, x = tiny_vit(dim=32, position=PEG).eval(), torch.randn(2, 1, 12, 12)
    expected = model(x)
    ((blocks, call),) = native.native_blocks(model)
    blocks._compiled_call_impl = call
    assert_close(model(x), expected, 1e-5)
    native.blocks.note.cache_clear()
    assert native.native_blocks(tiny_vit(dim=32, block=PEGBlock)) == []
    assert "PEGBlock is another kind of block" in capsys.readouterr().err


@pytest.mark.slow
@both
def test_exported_model_gives_equal_logits_for_any_batch_size(slots):
    model = randomize(tiny_vit((8, 8), depth=1, **slots)).eval()
    batch = {"x": {0: torch.export.Dim("batch", min=1, max=64)}}
    program, file = torch.export.export(model, (torch.randn(2, 1, 8, 8),), dynamic_shapes=batch), io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    x = torch.randn(5, 1, 8, 8)
    assert_close(torch.export.load(file).module()(x), model(x), 1e-6)


def test_options_are_written_to_records():
    default = Run(steps=1).vary(position=PEG, block=PEGBlock)
    for changes in (dict(position=partial(PEG, start="zero")), dict(block=partial(PEGBlock, layers=2)), dict(block=partial(PEGBlock, start="zero"))):
        run = default.vary(**changes)
        assert rebuild(describe(run)) == run and fingerprint(run) != fingerprint(default)


# Bad input


@pytest.mark.parametrize(
    ("wrong", "key_words"),
    [
        (lambda: tiny_vit(position=partial(PEG, start="one")), "start is 'one'; expected 'default' or 'zero'"),
        (lambda: tiny_vit(block=partial(PEGBlock, start="one")), "start is 'one'; expected 'default' or 'zero'"),
        (lambda: tiny_vit(block=partial(PEGBlock, layers=-1)), "layers is -1; expected None or a number of blocks"),
        (lambda: PEG(D, (3, 5), 2)(torch.zeros(1, 15, D), (3, 5)), "got 15 tokens; expected 2 prefix tokens and a grid of 3 x 5"),
        (lambda: PEGBlock(D, 2, Attention, None, 0.0)(torch.randn(1, 5, D)), "needs the places of its patches and got none"),
        (lambda: to_timm(tiny_vit(position=PEG)), "PEG"),
        (lambda: to_timm(tiny_vit(position=None, block=PEGBlock)), "PEGBlock"),
        (lambda: position_similarity(tiny_vit(position=PEG)), r"the positions of this ViT \(PEG\) depend on the image"),
    ],
)
def test_bad_input_is_refused(wrong, key_words):
    with pytest.raises(ValueError, match=key_words):
        wrong()
