"""Alarms of a report: arms that were trained too briefly, that lose to raw pixels or that only guess."""

import html as entities
import math
import re
from dataclasses import replace

import pytest

from smallvit.packing import pack_bits, pack_floats
from smallvit.record import Record
from smallvit.report import html, markdown, text
from smallvit.report.alarms import at_the_edge, below_raw_pixels, no_better_than_guessing, undertrained
from smallvit.report.provenance import warnings
from smallvit.verdicts import compare

pytestmark = pytest.mark.usefixtures("without_figures")
PIXELS = {"model": {"call": "smallvit.references.Pixels"}}


def runs(arm: str, curve=None, *, accuracy=0.9, labels=1000, seeds=4, role="technique", **fields) -> list[Record]:
    """The records of one arm. `curve` is a function from the seed to the field `curve`."""
    return [
        Record(
            recipe="demo", arm=arm, role=role, labels=labels, seed=seed, fingerprint=f"{arm}{seed}", status="finished",
            score="accuracy", test={"accuracy": accuracy}, curve=curve(seed) if curve else None,
            **{"run": {"model": {"call": "smallvit.vit.ViT"}}, "steps": 600, **fields},
        )
        for seed in range(seeds)
    ]  # fmt: skip


def curve(losses, accuracies, noise=0.0):
    """A curve of 12 checks of which the last four are given: the training losses and the validation accuracies."""
    first = [(2.3, 0.2)] * 8
    return lambda seed: [
        [50 * (k + 1), loss, accuracy + noise * (seed - 1.5) * (k - 8)]
        for k, (loss, accuracy) in enumerate([*first, *zip(losses, accuracies)])
    ]


# Loss and accuracy at the last four checks, as means over the seeds of committed records.
CURVES = {
    "explain, 2-D sines, 600 steps": (True, [1.30, 1.24, 1.18, 1.14], [0.632, 0.66, 0.68, 0.687]),
    "explain, no positions, 600 steps": (True, [1.715, 1.69, 1.67, 1.647], [0.403, 0.41, 0.413, 0.417]),
    "mixup, whose loss stays high": (True, [1.70, 1.69, 1.68, 1.665], [0.846, 0.85, 0.86, 0.866]),
    "dino, scratch as long at 1,000 labels": (False, [0.113, 0.10, 0.09, 0.077], [0.9801, 0.9802, 0.9803, 0.9803]),
    "regularize, plain ViT, all images learned by heart": (False, [0.0022, 0.0021, 0.002, 0.0019], [0.885, 0.889, 0.89, 0.893]),
    "the loss does not fall": (False, [0.50, 0.50, 0.50, 0.50], [0.86, 0.87, 0.88, 0.89]),
}


@pytest.mark.parametrize("case", CURVES)
def test_training_that_was_too_short_gives_a_warning(case):
    short, losses, accuracies = CURVES[case]
    lines = undertrained(runs("A", curve(losses, accuracies)))
    assert bool(lines) == short
    if short:
        assert re.match(r"Probably not trained long enough: “A”\. .* rose by \d\.\d points.*--scale-steps 4$", lines[0])


def test_a_rise_that_chance_explains_gives_no_warning():
    losses, accuracies = [0.6, 0.58, 0.56, 0.54], [0.90, 0.902, 0.903, 0.905]
    assert undertrained(runs("A", curve(losses, accuracies, noise=0.0001)))
    assert not undertrained(runs("A", curve(losses, accuracies, noise=0.005)))
    assert not undertrained(runs("A", curve(losses, accuracies), seeds=1)) and not undertrained(runs("A"))


def test_arms_with_the_same_alarm_share_one_sentence():
    steep = curve([1.30, 1.24, 1.18, 1.14], [0.632, 0.66, 0.68, 0.687])
    flat = curve([1.0] * 4, [0.7] * 4)
    rows = [*runs("A", steep), *runs("B", steep), *runs("C", steep), *runs("pixels", steep, role="reference")]
    (line,) = undertrained(rows)
    assert "all 3 arms." in line and "5.5 points" in line
    (line,) = undertrained([*rows, *runs("D", flat), *runs("A", steep, labels=100), *runs("B", flat, labels=100)])
    assert "“A”, “B” and “C” at 1,000 labels; “A” at 100 labels." in line
    (line,) = undertrained([*rows, *runs("D, tall", steep), *runs("E", flat)])
    assert "“A”, “B”, “C” and 1 more." in line


def test_warnings_are_about_the_settings_that_the_tables_show():
    """The tables show tuned settings as soon as one run with them has finished, and common settings before."""
    steep = curve([1.30, 1.24, 1.18, 1.14], [0.632, 0.66, 0.68, 0.687])
    tuned = [replace(r, status="missing", fingerprint=f"t{r.seed}") for r in runs("A", steep, tuning={"trials": 0})]
    flat = [replace(r, status="finished") for r in runs("A", curve([1.0] * 4, [0.7] * 4), tuning={"trials": 0})]
    assert undertrained(runs("A", steep)) and undertrained([*runs("A", steep), *tuned])
    assert undertrained([*runs("A", steep), *(replace(r, status="finished") for r in tuned)])
    assert not undertrained([*runs("A", steep), *flat])


def test_only_the_longest_training_can_be_too_short():
    steep = curve([1.30, 1.24, 1.18, 1.14], [0.632, 0.66, 0.68, 0.687])
    flat = curve([1.0] * 4, [0.7] * 4)
    assert not undertrained([*runs("A", steep, length=500), *runs("A", flat, length=2_000)])
    assert undertrained([*runs("A", flat, length=500), *runs("A", steep, length=2_000)])


def test_an_arm_that_loses_to_raw_pixels_gives_a_warning():
    pixels = runs("pixels, nearest neighbor", accuracy=0.85, role="reference", run=PIXELS, steps=0)
    pixels += runs("pixels, logistic regression", accuracy=0.88, role="reference", run=PIXELS, steps=0)
    good, bad, cnn = runs("A", accuracy=0.9), runs("B", accuracy=0.86), runs("small CNN", accuracy=0.5, role="reference")
    (line,) = below_raw_pixels([*pixels, *good, *bad, *cnn])
    assert "raw pixels" in line and ": “B”." in line and "--scale-steps 4" in line
    assert not below_raw_pixels([*pixels, *good]) and not below_raw_pixels(bad)
    assert not below_raw_pixels([*pixels, *runs("off the shelf", accuracy=0.5, steps=0)]), "it has no training to lengthen"
    assert not below_raw_pixels([*pixels, *runs("B", accuracy=0.86, labels=100)]), "another number of labels"


def test_a_best_value_at_the_edge_of_its_range_gives_one_warning_for_each_option():
    edge = {"settings": {"lr": 0.006, "weight_decay": 0.1}, "trials": 8, "edge": ["lr"], "curve": []}
    rows = [*runs("A", tuning=edge), *runs("B", tuning=edge), *runs("C", tuning=edge | {"edge": ["weight_decay"]})]
    lines = at_the_edge(rows)
    assert (
        len(lines) == 2 and "best learning rate lies at the edge of its range" in lines[0] and "“A” and “B”. Widen" in lines[0]
    )
    assert "best weight decay" in lines[1] and "“C”" in lines[1]
    assert not at_the_edge(runs("A", tuning=edge | {"edge": []})) and set(lines) <= set(warnings(rows))


@pytest.mark.parametrize("chosen, warned", [(0.001, True), (0.002, False), (0.004, True)])
def test_the_highest_and_the_lowest_value_that_were_tried_are_an_edge_too(chosen, warned):
    curve = [[{"lr": value, "schedule": "cosine"}, 0.9, 1] for value in (0.004, 0.001, 0.002)]
    tuning = {"settings": {"lr": chosen, "schedule": "cosine"}, "trials": 3, "edge": [], "curve": curve}
    assert bool(at_the_edge(runs("A", tuning=tuning))) is warned
    assert not at_the_edge(runs("A", tuning=tuning | {"curve": curve[1:], "trials": 2})), "two values have no middle"
    assert not at_the_edge(runs("A", tuning=tuning | {"trials": 4})), "a trial with an infinite loss may lie beyond"


@pytest.mark.parametrize("images, guesses", [(100, True), (10_000, False), (None, False)])
def test_guessing_depends_on_the_number_of_test_images(images, guesses):
    rows = [replace(r, test={"accuracy": 0.135 + r.seed / 10_000}) for r in runs("A", seeds=8, test_majority=0.1135)]
    lines = no_better_than_guessing([replace(r, test_images=images) for r in rows])
    assert bool(lines) == guesses
    if images:
        assert guesses == (1.96 * math.sqrt(0.1135 * 0.8865 / images) > 0.1354 - 0.1135)


def test_guessing_depends_on_the_number_of_groups_of_test_images():
    """1,000 images of 10 patients tell no more about the score of guesses than 10 images."""
    rows = [replace(r, test={"accuracy": 0.6 + r.seed / 10_000}, test_images=1_000) for r in runs("A", seeds=8, test_majority=0.5)]
    assert not no_better_than_guessing(rows)
    assert not no_better_than_guessing([replace(r, test_groups=[*range(1_000)]) for r in rows])
    assert no_better_than_guessing([replace(r, test_groups=[k // 100 for k in range(1_000)]) for r in rows])


def folded(arms: dict[str, float], score="balanced_accuracy", passes=6, noise=0.0, **fields) -> list[Record]:
    """The records of a cross-validation with two folds of 30 images of three classes. `arms` is a dict from an arm to its score;
    the first one is the baseline. `noise` makes the differences of odd and even passes different.
    """
    rows = []
    for arm, value in arms.items():
        for r in runs(arm, seeds=2 * passes, role="technique" if rows and arm != rows[0].arm else "baseline"):
            index = pack_bits([k // 30 == r.seed % 2 for k in range(60)])
            chance = noise * (-1) ** (r.seed // 2) if rows and arm != rows[0].arm else (r.seed // 2 - (passes - 1) / 2) / 1000
            test = {score: value + chance}
            values = pack_floats([test[score]] * 30)
            rows.append(replace(r, score=score, test=test, contributions=values, test_images=30, folds=2, pool_images=60, test_index=index))
    return [replace(r, confusion=[[10, 0, 0]] * 3, **fields) for r in rows]


@pytest.mark.parametrize("score, chance", [("balanced_accuracy", 1 / 3), ("auc", 0.5)])
def test_scores_at_chance_give_an_alarm_on_both_pages(score, chance):
    rows = folded({"A": chance, "B": 0.9}, score)
    (line,) = no_better_than_guessing(rows)
    name = {"auc": "AUC"}.get(score, "balanced accuracy")
    assert line.startswith(f"A at 1,000 labels: {name} {100 * chance:.2f}%, not shown to be better than guessing ({100 * chance:.2f}%)")
    assert not no_better_than_guessing(folded({"A": 0.8, "B": 0.9}, score)) and "than guessing" not in text(rows)
    assert not no_better_than_guessing(folded({"A": chance}, "macro_f1"))
    rows, first = folded({"A": chance, "B": chance + 0.01}, score, noise=0.03), f"No arm was shown to be better than guessing ({100 * chance:.2f}%): "
    assert text(rows).startswith(first)
    for page in (markdown, html):
        found = page(rows, title="demo", doc="")
        assert found.count(first) == 1 and "before adding passes." in found and "would help" not in found
        assert found.index(first) < found.index("no technique was shown") and "inconclusive" in found
    learned = folded({"A": 0.8, "B": 0.81}, score, noise=0.03)
    assert "more seeds would help" in markdown(learned, title="demo", doc="").replace("passes", "seeds")


def test_the_chance_of_classes_is_known_without_a_confusion_matrix():
    rows = [replace(r, confusion=None, preprocess={"classes": ["a", "b", "c"]}) for r in folded({"A": 0.34})]
    assert len(no_better_than_guessing(rows)) == 1
    assert not no_better_than_guessing([replace(r, preprocess=None) for r in rows])


def test_the_alarm_of_a_cross_validation_has_the_mean_of_the_table():
    rows = folded({"A": 0.3171, "B": 0.9}, "accuracy", test_majority=0.34)
    sizes = {0: 20, 1: 40}  # folds of different sizes
    rows = [
        replace(
            r, test={"accuracy": 0.3 + 0.03 * (r.seed % 2)} if r.arm == "A" else r.test, test_images=sizes[r.seed % 2],
            test_index=pack_bits([(k >= 20) == r.seed % 2 for k in range(60)]),
            contributions=pack_floats([(0.3 + 0.03 * (r.seed % 2)) if r.arm == "A" else r.result] * sizes[r.seed % 2]),
        )
        for r in rows
    ]  # fmt: skip
    (line,) = no_better_than_guessing(rows)
    assert "accuracy 32.00%" in line and "| A | 32.00 ± 0.00" in markdown(rows, title="demo", doc="")


def test_guessing_at_few_labels_is_no_reason_to_stop():
    rows = [replace(r, labels=10) for r in folded({"A": 1 / 3, "B": 1 / 3})] + folded({"A": 0.8, "B": 0.9})
    assert len(no_better_than_guessing(rows)) == 2 and "No arm was shown" not in text(rows)


def test_the_baseline_is_the_first_row_in_any_order_of_records():
    rows = folded({"A": 0.8, "B": 0.9, "C": 0.85})
    assert [row.arm for row in compare(rows[::-1]).rows] == ["A", "C", "B"]


def test_unfinished_passes_are_counted():
    rows = folded({"A": 0.8, "B": 0.9})
    assert "complete" not in text(rows)
    first = "o pass over all folds is complete yet (2 of 24 runs have finished), so there is nothing to compare"
    assert text(missing(rows, lambda r: r.seed > 0)) == f"n{first}"
    assert f"N{first}." in markdown(missing(rows, lambda r: r.seed > 0), title="demo", doc="").replace("\\", "")
    assert text(missing(rows, lambda r: True)) == "no run has finished, so there is nothing to compare"
    some = missing(rows, lambda r: r.seed > 3 or (r.arm, r.seed) == ("B", 2))
    assert text(some).startswith("1 of 6 passes is complete for all arms.\n")
    page = html(some, title="demo", doc="")
    assert "1 of 6 passes is complete for all arms. " in page and "17 of 24 runs have no result; see Failures." in page
    behind = missing(rows, lambda r: (r.arm, r.seed) == ("B", 2))
    assert text(behind).startswith("5 of 6 passes are complete for all arms; runs of “B” are missing.\n")


def test_a_missing_reference_does_not_make_the_passes_incomplete():
    """Neither references without runs nor arms whose weights are not on this machine keep a pass from being complete."""
    rows = [replace(r, role="reference") if r.arm == "pixels" else r for r in folded({"A": 0.8, "B": 0.9, "pixels": 0.7})]
    assert "complete" not in text(rows)
    behind = missing(rows, lambda r: r.arm == "pixels" and r.seed > 0)
    line = "6 of 6 passes are complete for all arms; runs of the reference “pixels” are missing."
    assert text(behind).startswith(f"{line}\n") and f"{line} " in html(behind, title="demo", doc="")
    assert "11 of 36 runs have no result" in markdown(behind, title="demo", doc="")
    nothing = dict.fromkeys(("test", "contributions", "confusion", "test_images", "test_index"))
    without = [replace(r, status="unavailable", error="no file", **nothing) if r.arm == "pixels" else r for r in rows]
    assert "complete" not in text(without) and "no result" not in (page := markdown(without, title="demo", doc=""))
    assert "Not run: pixels." in page


def missing(rows, which) -> list[Record]:
    """The records, where the runs for which `which` is true have not started."""
    nothing = dict.fromkeys(("test", "contributions", "confusion", "test_images", "test_index"))
    return [replace(r, status="missing", **nothing) if which(r) else r for r in rows]


@pytest.mark.parametrize(("options", "copies"), [({"group_by": None, "groups": None}, True), ({"group_by": "(.*)_"}, False), ({"groups": "p.csv"}, False)])
def test_copies_of_an_image_are_not_called_patients(options, copies):
    data = {"call": "smallvit.data.folder", "path": "cells", **options}
    rows = [replace(r, test_groups=[0, 0, *range(1, 1_999)], run=r.run | {"data": data}) for r in runs("A", role="baseline")]
    page = " ".join(markdown(rows, title="demo", doc="").split())
    assert ("There are 1,999 different images. Images with identical pixels stay together" in page) == copies
    assert ("1,999 groups, such as patients" in page) == (not copies)


def test_commands_of_a_report_have_the_folder_of_its_runs():
    rows = runs("A", role="baseline")
    found = markdown(rows, title="demo", doc="", command="smallvit run two.py --scale-steps 2 --out both")
    assert "- Run again: smallvit run two.py --scale-steps 2 --out both\n" in found
    assert "- Write this page again: smallvit report two.py --scale-steps 2 --out both\n" in found
    assert re.search(r"Write this page again: smallvit report \S+ \(or its path\)", markdown(rows, title="demo", doc=""))


def test_a_cross_validation_counts_passes_and_its_words_are_explained():
    rows = [replace(r, test=r.test | {"nll": 1.0}, unused_seeds=[7]) for r in folded({"A": 0.8, "B": 0.81}, noise=0.03)]
    for passes in (6, 4, 1):
        found = html([r for r in rows if r.seed < 2 * passes], title="demo", doc="")
        soft = found.split("<h1>")[1].replace("Passes take the place of seeds", "")
        assert not re.search(r"\b[Ss]eeds?\b", soft.split("Provenance")[0] + soft.split("How to read")[1])
        assert "Numbers of images are means over passes" in soft and "with other passes (7) are not used" in soft
        assert all(word in soft for word in ("A pass trains 2 models", "“Holm p” is", "“80% power at”", "nll (negative log"))
        assert "a corrected p below 0.05 and no missing run" in soft
        assert ("the means of the passes say little" in soft) == (passes == 4)
        assert ("Nadeau and Bengio's correction makes" in entities.unescape(soft)) == (passes == 1)
    found = markdown(runs("A", role="baseline"), title="demo", doc="")
    assert "at least 6 seeds and no missing run" in found and "negative log" not in found and "A pass trains" not in found
