"""Bands: does a run that is trained again still give what its committed record says?"""

from collections.abc import Sequence

from smallvit.record import amount

LEVEL = 0.99  # of the prediction interval: one arm in a hundred falls out by chance


def band(committed: Sequence[dict], again: Sequence[dict]) -> tuple[list[str], bool]:
    """A line for every arm trained again, saying whether its mean lies in the band of the committed seeds; and whether all do.

    The band is the 99% prediction interval for the mean of as many new runs, from the mean and the SD over the committed seeds
    (t distribution). A run that failed, or an arm with fewer than 2 committed seeds, is not in its band; nor is all well where
    no arm has one.
    """
    from scipy.stats import t

    lines, good, held = [], True, 0
    for arm, labels in dict.fromkeys((record["arm"], record["labels"]) for record in again):
        old = [
            r["test"][r["score"]] for r in committed if (r["arm"], r["labels"]) == (arm, labels) and r["status"] == "finished"
        ]
        mine = [r for r in again if (r["arm"], r["labels"]) == (arm, labels)]
        new = [r["test"][r["score"]] for r in mine if r["status"] == "finished"]
        if all(r["status"] == "unavailable" for r in mine):
            lines.append(f"{arm} at {amount(labels)}: left out, unavailable here ({mine[0]['error']})")
            continue
        if len(old) < 2 or len(new) < len(mine):
            why = (
                "fewer than 2 committed seeds"
                if len(old) < 2
                else next((r["error"] for r in mine if r["error"]), "a run failed")
            )
            lines.append(f"{arm} at {amount(labels)}: no band ({why})")
            good = False
            continue
        centre = sum(old) / len(old)
        sd = (sum((x - centre) ** 2 for x in old) / (len(old) - 1)) ** 0.5
        half = t.ppf((1 + LEVEL) / 2, len(old) - 1) * sd * (1 / len(old) + 1 / len(new)) ** 0.5
        mean = sum(new) / len(new)
        inside = abs(mean - centre) <= half + 1e-12
        same = {(r["fingerprint"], r["test"][r["score"]]) for r in committed if r["status"] == "finished"}
        exact = all((r["fingerprint"], r["test"][r["score"]]) in same for r in mine)
        lines.append(
            f"{arm} at {amount(labels)}: {100 * mean:.2f}%, band {100 * (centre - half):.2f} to {100 * (centre + half):.2f}%"
            f" (99%, {len(old)} committed seeds): "
            + ("OUTSIDE" if not inside else "identical to the record" if exact else "inside")
        )
        good, held = good and inside, held + 1
    return lines, good and held > 0
