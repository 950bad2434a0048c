"""Random streams: each random draw of a run depends only on (seed, name, step), never on earlier draws.

A generator that is passed around couples all its users: one more parameter in the model would change the order of the batches.
Here each draw has a stream of its own name. Enabling a technique therefore leaves the labelled subset, the batch order, the
augmented pixels and the initial weights of all shared layers byte-identical, and a resumed run needs no generator state.

Names in use:

`subset`         which images are labelled and, if the data has no validation images, which ones validate
`subset/class`   the order in which the classes take turns to get a label
`subset/group`   the order in which groups are taken for validation
`val`            which of the data's own validation images are used
`few_shot`       the images of a few-shot probe
`order`          the batches
`augment`        the pixels
`init`           the weights; those of an objective are `init/objective`
`dropout`        draws inside a training step, beginning with the patches that an objective masks

`unlabelled` is the seed of the streams for unlabelled images that a step sees beside the labelled ones: `order`, and `view`
(the pixels of their first and second view).

The fixed test split of `digits()` is independent of the run: it is drawn like a subset, as `digits/test` with seed 0. So is the
held-out part of your own images: it is drawn as `test/group` with seed 0.
"""

import hashlib


def stream(seed: int, name: str, step: int | str = 0) -> int:
    """Return a random seed (a 63-bit integer) for one random draw. The result depends only on the `seed` of the run, the `name`
    of what is drawn (such as "augment") and the `step` (such as the training step).

    The result is the same on every machine and library version.
    """
    digest = hashlib.sha256(f"{seed}/{name}/{step}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def shuffled(items: list, seed: int, name: str) -> list:
    """Return the list `items` in a random order. The order depends only on `seed` and on `name`, a text that says what the
    order is for. Earlier random draws do not matter.

    The items are sorted by a hash of seed, name and item, so no generator is needed.
    """
    return sorted(items, key=lambda item: hashlib.sha256(f"{seed}/{name}/{item}".encode()).digest())
