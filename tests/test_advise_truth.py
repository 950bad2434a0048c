"""smallvit advise where the truth is known: it finds a technique that helps, and claims none where none can help; it survives
kills. These are experiments of many minutes.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from smallvit.__main__ import main
from smallvit.commands.advise import command, plan
from smallvit.commands.advise.plan import Plan
from smallvit.commands.advise.recipes import ADVICE, CNN
from smallvit.commands.report import collect
from smallvit.recipe import load_recipe
from smallvit.verdicts import Comparison, Row, compare

pytestmark = pytest.mark.long
KINDS = ("circle", "square", "triangle", "cross")
MINUTES, FEW_MINUTES = 3.0, 2.0
SMALLVIT = (sys.executable, "-m", "smallvit")


def planted(folder: Path, seed: int, count: int = 80, random_labels: bool = False, size: int = 28):
    """Draw `count` images of each of four shapes, at random places in gray noise. Shifting the images helps, because a shape is
    the same at all places. With random labels no technique can help: every model has an accuracy of 25% on new images.
    """
    dice = random.Random(seed)
    noise = np.random.default_rng(seed)
    for number in range(count * len(KINDS)):
        kind = KINDS[number % len(KINDS)]
        image = Image.fromarray(noise.normal(128, 25, (size, size)).clip(0, 255).astype(np.uint8))
        r = dice.randint(4, 6)
        x, y = dice.randint(r, size - r - 1), dice.randint(r, size - r - 1)
        paint = ImageDraw.Draw(image)
        if kind == "circle":
            paint.ellipse((x - r, y - r, x + r, y + r), outline=230, width=2)
        elif kind == "square":
            paint.rectangle((x - r, y - r, x + r, y + r), outline=230, width=2)
        elif kind == "triangle":
            paint.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], outline=230, width=2)
        else:
            paint.line((x - r, y, x + r, y), fill=230, width=2)
            paint.line((x, y - r, x, y + r), fill=230, width=2)
        name = dice.choice(KINDS) if random_labels else kind
        (folder / name).mkdir(parents=True, exist_ok=True)
        image.save(folder / name / f"{number}.png")


def words(place: Path, minutes: float) -> list[str]:
    into = place / "advice"
    return ["advise", str(place / "images"), "--photos", "--minutes", str(minutes), "--into", str(into)]


def advised(place: Path, minutes: float) -> Comparison:
    """What `smallvit advise` finds in the folder `images` of `place`."""
    subprocess.run([*SMALLVIT, *words(place, minutes)], check=True, capture_output=True)
    return judged(place)


def judged(place: Path) -> Comparison:
    """The comparison on images that no trial has read."""
    return compare(collect(load_recipe(place / "advice" / "recipe.py").RUNS, place / "advice" / "runs", "recipe"))


def row(comparison: Comparison, arm: str) -> Row | None:
    return next((row for row in comparison.rows if row.arm == arm and row.labels is None), None)


def test_technique_that_helps_is_found_and_none_is_claimed_where_none_helps(tmp_path):
    wrong, lines = 0, []
    for seed in range(10):
        for random_labels in (False, True):
            place = tmp_path / f"{seed}-{random_labels}"
            planted(place / "images", seed, random_labels=random_labels)
            found = row(advised(place, FEW_MINUTES if random_labels else MINUTES), ADVICE)
            verdict = found.verdict if found else "inconclusive"
            wrong += verdict != ("inconclusive" if random_labels else "better")
            d = found.difference if found else None
            points = f"{100 * d.mean:+.1f} [{100 * d.low:.1f}, {100 * d.high:.1f}]" if d else "nothing chosen"
            lines.append(f"seed {seed}, {'random labels' if random_labels else 'shapes'}: {verdict}, {points}")
            print(lines[-1], flush=True)
    assert wrong <= 1, lines


def test_interval_covers_the_truth_although_the_best_of_many_options_was_chosen(tmp_path, monkeypatch):
    """The upper bound was not met: 156 of 156 intervals were right. Models that are trained for 10 steps name few classes, and
    each fold has equally many images of each class, so their accuracy varies less than that of independent images. In
    simulations with six other kinds of classifiers, the interval covers the truth in 94 to 99.7%.
    """
    monkeypatch.setattr(command, "FEWEST_MINUTES", 0.1)
    monkeypatch.setattr(plan, "FEWEST_STEPS", 20)
    covered, accuracies = [], []
    for seed in range(100):
        place = tmp_path / str(seed)
        planted(place / "images", seed, random_labels=True)
        assert main(words(place, 0.3)) == 0
        comparison = judged(place)
        for arm in (ADVICE, CNN):
            found = row(comparison, arm)
            d = found.difference if found else None
            if found and d is not None:
                covered.append((arm, d.low <= 0 <= d.high))
                low, high = found.new_images or (0.0, 1.0)
                accuracies.append(low <= 1 / len(KINDS) <= high)
    shares = {arm: np.mean([inside for name, inside in covered if name == arm]) for arm in (ADVICE, CNN)}
    print(shares, len(covered), np.mean(accuracies))
    assert np.mean(accuracies) >= 0.9
    assert all(0.9 <= share <= 0.99 for share in shares.values())


def test_twenty_kills_change_no_decision_and_lose_no_run(tmp_path):
    planted(tmp_path / "images", 0)
    dice, decided, kills = random.Random(1), {}, 0
    path = tmp_path / "advice" / "plan.json"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    while True:
        process = subprocess.Popen([*SMALLVIT, *words(tmp_path, MINUTES)], **quiet)
        try:
            process.wait(dice.uniform(4, 15) if kills < 20 else 600)
            break
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
        time.sleep(1)
        now = json.loads(path.read_text()) if path.exists() else {}
        for name, value in now.get("chosen", {}).items():
            assert decided.setdefault(name, value) == value
    assert process.returncode == 0 and kills >= 10
    killed, comparison = Plan.read(path), judged(tmp_path)
    assert killed is not None

    again = tmp_path / "again"
    (again / "advice").mkdir(parents=True)
    (tmp_path / "images").rename(again / "images")
    killed.folder = str((again / "images").resolve())
    measured = {name: getattr(killed, name) for name in ("step", "cnn_step", "steps", "groups", "final_steps", "passes")}
    fresh = Plan(killed.folder, killed.minutes, killed.digits, killed.jobs, killed.share, killed.folds, killed.val, **measured)
    fresh.write(again / "advice" / "plan.json")
    without_kills = advised(again, MINUTES)
    plan_of_it = Plan.read(again / "advice" / "plan.json")
    assert plan_of_it is not None and plan_of_it.chosen == killed.chosen and plan_of_it.trials == killed.trials
    for arm in {ADVICE, CNN} & {*comparison.arms}:  # the number of passes depends on the time
        one, other = row(comparison, arm), row(without_kills, arm)
        assert one and other and one.values[:2] == other.values[:2]
        print(arm, one.verdict, other.verdict, one.values, other.values)
