"""Named randomness: every draw of a run comes from a stream known by (seed, name, step), never from what was drawn before.

A generator that is passed around couples everything that draws from it: one more parameter in the model and the batches
come in another order. Here each draw names its stream, so switching a technique on leaves the subset, the batch order, the
augmented pixels and the initial weights of all shared layers byte-identical, and a resumed run needs no generator state.

The names in use: `subset` (which images are labelled and, where the data brings no validation images, which validate) and
`subset/class` (in which order the classes take turns), `val` (which of the data's own validation images),
`few_shot` (which images a few-shot probe draws), `order` (batches), `augment` (pixels),
`init` (weights; an objective's own are `init/objective`) and `dropout` (inside the step, first of all the patches that an
objective hides).
The fixed test split of `digits()` belongs to no run: it is drawn as a subset is, under `digits/test` with seed 0.
"""

import hashlib


def stream(seed: int, name: str, step: int | str = 0) -> int:
    """The 63-bit state of the stream `name` at `step`; the same on every machine and for every version of torch and numpy."""
    digest = hashlib.sha256(f"{seed}/{name}/{step}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def shuffled(items: list, seed: int, name: str) -> list:
    """`items` in an order fixed by (seed, name): sorted by hash, so that no library's generator can change it."""
    return sorted(items, key=lambda item: hashlib.sha256(f"{seed}/{name}/{item}".encode()).digest())
