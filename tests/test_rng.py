"""Streams: the same numbers on every machine for ever, and no two streams that know of each other."""

import ast
import hashlib
from itertools import product
from pathlib import Path

import pytest
import torch

from smallvit import rng
from smallvit.rng import shuffled, stream

# Committed records rest on these: a change makes every published number irreproducible.
GOLDEN = {
    (0, "subset", 0): 6518292570242966442,
    (0, "order", 3): 5172884068272721061,
    (1, "augment", 1999): 8738349064578972562,
    (0, "dropout", 0): 3176066597680403895,
    (2**31, "init", "blocks.0.attention.qkv"): 1306923716798607640,
}
SHUFFLED = {0: [2, 10, 8, 5, 11, 0, 9, 7, 4, 6, 3, 1], 1: [8, 11, 0, 5, 1, 7, 4, 10, 9, 6, 2, 3]}


@pytest.mark.parametrize("name", GOLDEN, ids=str)
def test_a_stream_starts_where_it_always_has(name):
    assert stream(*name) == GOLDEN[name]


@pytest.mark.parametrize("seed", SHUFFLED)
def test_an_order_is_what_it_always_was(seed):
    assert shuffled(range(12), seed, "subset") == SHUFFLED[seed]


def test_the_rule_written_out():
    digest = hashlib.sha256(b"7/order/12").hexdigest()
    low_end_first = int("".join(reversed([digest[i : i + 2] for i in range(0, 16, 2)])), 16)
    assert stream(7, "order", 12) == low_end_first // 2


def test_no_two_streams_are_one_and_torch_takes_them_all():
    names = ["subset", "subset/class", "val", "order", "augment", "init", "dropout", "mask"]
    states = [stream(*key) for key in product(range(20), names, range(50))]
    assert len(set(states)) == len(states) == 8_000
    assert all(0 <= state < 2**63 for state in states)
    torch.manual_seed(max(states))
    ones = torch.tensor([[state >> bit & 1 for bit in range(63)] for state in states]).double().mean(0)
    assert (ones - 0.5).abs().max() < 5 * 0.5 / 8_000**0.5  # every bit is a fair coin


def test_neighbouring_streams_draw_unrelated_numbers():
    drawn = torch.stack(
        [torch.rand(500, generator=torch.Generator().manual_seed(stream(0, "augment", step))) for step in range(40)]
    )
    related = torch.corrcoef(drawn) - torch.eye(40)
    assert related.abs().max() < 5 / 500**0.5


def test_a_stream_depends_on_nothing_that_was_drawn_before():
    state = torch.get_rng_state()
    before = [stream(0, "order", 1), shuffled(range(50), 0, "val")]
    torch.rand(7)
    changed = torch.get_rng_state()
    assert [stream(0, "order", 1), shuffled(range(50), 0, "val")] == before
    assert torch.equal(changed, torch.get_rng_state())
    torch.set_rng_state(state)


@pytest.mark.parametrize("items", [[], ["a"], list(range(1000)), ["b", "a", "ä", "c/d"]], ids=len)
def test_shuffled_is_a_permutation(items):
    given = list(items)
    found = shuffled(items, 3, "val")
    assert sorted(found) == sorted(given) and items == given
    assert shuffled(given[::-1], 3, "val") == found  # the order they came in does not matter


def test_shuffles_differ_by_seed_and_by_name_and_prefer_no_place():
    orders = [tuple(shuffled(range(30), seed, name)) for seed, name in product(range(200), ("subset", "val"))]
    assert len(set(orders)) == 400
    where = torch.tensor([order.index(0) for order in orders]).double()
    assert abs(where.mean() - 14.5) < 5 * (30**2 / 12) ** 0.5 / 400**0.5


def test_the_docstring_lists_the_names_in_use():
    place, used = {"stream": 1, "shuffled": 2, "draw": 3}, set()
    for path in Path(rng.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and place.get(node.func.id)
            named = (
                name and len(node.args) > name and isinstance(node.args[name], ast.Constant)
            )  # explain has a draw of its own
            used |= {node.args[name].value} if named else set()
    assert used >= {"subset", "val", "order", "augment", "init", "dropout", "digits/test"}
    assert not [name for name in used if f"`{name}`" not in rng.__doc__]
