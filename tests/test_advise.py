"""smallvit advise: the plan, the recipes that it writes, the choice, the sentences of the answer, stopping and starting again."""

import ast
import random
import re
import shutil
from argparse import Namespace
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageOps
from toys import slow_after

from smallvit.__main__ import main
from smallvit.ablation import ablate
from smallvit.commands.advise import advisor as phases
from smallvit.commands.advise import command, page, plan
from smallvit.commands.advise.advisor import Advisor
from smallvit.commands.advise.answer import answer, model_to_keep, names_of
from smallvit.commands.advise.command import check_into, opened_plan, shows_characters
from smallvit.commands.advise.doubts import Doubts, WrongLabels
from smallvit.commands.advise.options import KNOWN, Option, groups_of_options, known_gain, stem_layers
from smallvit.commands.advise.page import (
    Judged,
    division,
    division_of_trials,
    final_training,
    independent_images,
    more_time,
    other_models,
    row_of,
)
from smallvit.commands.advise.plan import (
    LONGEST,
    MOST_PASSES,
    MOST_STEPS,
    START,
    Plan,
    divide,
    folds_of_judging,
    length_of_judging,
    runs_of,
    steps_of_trials,
    validation_images,
)
from smallvit.commands.advise.recipes import (
    ADVICE,
    CNN,
    FINE_TUNED,
    FROZEN,
    PLAIN,
    final_recipe,
    last_recipe,
    options_of,
    trial_recipe,
)
from smallvit.commands.inspection import inspect_images
from smallvit.commands.new import findings
from smallvit.pretrained.weights import Unavailable, Weights
from smallvit.recipe import find_recipe, load_recipe
from smallvit.record import Record, read_record, read_records
from smallvit.references import SmallCNN
from smallvit.run import Run, describe
from smallvit.verdicts.compare import compare
from smallvit.verdicts.comparison import Comparison


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    random.seed(0)


def draw(file: Path, kind: str, size: int = 16, mode: str = "RGB"):
    """Draw a filled circle or square at a random place."""
    image = Image.new("RGB", (size, size), "white")
    x, y, r = random.randint(5, size - 6), random.randint(5, size - 6), 3
    paint = ImageDraw.Draw(image)
    (paint.ellipse if kind == "circle" else paint.rectangle)((x - r, y - r, x + r, y + r), fill="black")
    file.parent.mkdir(parents=True, exist_ok=True)
    image.convert(mode).save(file)


def shapes(count: int = 20, folder: str = "shapes", names=("circle", "square"), mode: str = "RGB") -> Path:
    """A folder of circles and squares, `count` of each."""
    for kind, name in zip(("circle", "square"), names):
        for number in range(count):
            draw(Path(folder) / name / f"{number}.png", kind, mode=mode)
    return Path(folder)


def shades(count: int = 20) -> Path:
    """A folder of black circles on white and white circles on black, which a model tells apart after a few training steps."""
    folder = shapes(count, "shades", ("white", "black"))
    for number in range(count):
        draw(folder / "black" / f"{number}.png", "circle")
        with Image.open(folder / "black" / f"{number}.png") as image:
            ImageOps.invert(image).save(folder / "black" / f"{number}.png")
    return folder


def options(**changes) -> Namespace:
    defaults = {"folder": "shapes", "group_by": None, "size": None, "minutes": 15.0, "digits": False, "photos": True, "into": "advice", "jobs": 2, "device": "cpu",
                "no_imagenet": False}
    return Namespace(**defaults | changes)


# What is found, and how images are divided


def test_characters_are_recognized_and_photos_are_not():
    letters = shapes(names=("a", "b"))
    assert shows_characters(letters, inspect_images(letters))
    strokes = shapes(folder="ink", mode="L")
    assert shows_characters(strokes, inspect_images(strokes))
    for kind in ("cat", "dog"):
        for number in range(4):
            path = Path("photos") / kind / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.effect_noise((16, 16), 40).convert("RGB").save(path)
    assert not shows_characters(Path("photos"), inspect_images(Path("photos")))


def test_images_for_the_judgement_are_a_large_part_of_few_images_and_a_small_one_of_many():
    images = inspect_images(shapes())
    assert divide(images) == (0.4, 5) and validation_images(images, 0.4) == 6

    def of_size(count):
        return replace(images, counts={"pool": {"circle": count, "square": count}})

    assert divide(of_size(1_000))[0] == 0.2 and divide(of_size(10_000))[0] == 0.1
    with pytest.raises(ValueError, match=r"'circle' has 6 images.*needs at least 8 of each class"):
        divide(of_size(6))
    parts = replace(images, counts={"train": {"circle": 9, "square": 9}, "test": {"circle": 9, "square": 9}})
    assert divide(parts) == (None, None)


def in_parts(**counts: int) -> Path:
    """A folder of circles and squares that is already divided: in each part, this number of images of each class."""
    for part, count in counts.items():
        shapes(count, f"parts/{part}")
    return Path("parts")


def test_as_many_processes_share_a_gpu_as_in_other_commands(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    images = replace(inspect_images(shapes()), patch=4)
    assert opened_plan(Path("shapes"), images, Path("advice"), options(jobs=None, device="cuda")).jobs == 8
    assert opened_plan(Path("shapes"), images, Path("other"), options(jobs=3, device="cuda")).jobs == 3


def test_trials_use_at_most_the_validation_images_of_the_folder():
    images = replace(inspect_images(in_parts(train=40, test=5, val=4)), patch=4)
    made = opened_plan(Path("parts"), images, Path("advice"), options(folder="parts"))
    assert made.val == 8 and made.share is None
    made.steps = 300
    Path("trial.py").write_text(trial_recipe(images, made, groups_of_options(images, 15)[0], []))
    run = load_recipe("trial.py").RUNS[0].run
    subset = run.data().subset(labels=None, val=run.val, seed=0)
    assert (len(subset.train), len(subset.val)) == (80, 8)
    assert validation_images(replace(images, counts=images.counts | {"val": {"circle": 50, "square": 50}}), None) == 20
    assert "8 images in val/ were validation images" in division_of_trials(made, own_val=True)
    assert "8 of these images, drawn anew for each seed, were" in division_of_trials(made, own_val=False)
    assert "images in train/ (8 images in val/ for validation)" in Advisor(images, made, Path("advice"), "cpu", 0.0).describe()


# Options and their order


def test_groups_are_tried_in_the_order_of_what_is_known():
    images = inspect_images(shapes())
    names = [group.name for group in groups_of_options(images, 30)]
    assert names[:2] == ["augmentation", "first layer"] and names[-1] == "pretraining"
    assert "pretraining" not in [group.name for group in groups_of_options(images, 5)]
    for group in groups_of_options(images, 30):
        assert not group.options[0].changes and len(group.options) > 1 and all(option.means for option in group.options[1:])
    first, of_short = (next(g for g in groups_of_options(images, minutes) if g.name == "first layer") for minutes in (30, 5))
    assert first.options[:-1] == of_short.options and first.options[-1].name == "tokenizer of CCT"


@pytest.mark.parametrize("patch, layers", [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2), (7, 3), (8, 3), (16, 4)])
def test_stem_has_about_as_many_tokens_as_patches(patch, layers):
    assert stem_layers(patch) == layers


@cache
def committed(recipe: str) -> Comparison:
    """The comparison of the committed records of a recipe."""
    return compare(read_records(find_recipe(recipe).with_suffix(".jsonl")))


@pytest.mark.parametrize(("recipe", "arm", "gains"), slow_after(1, [known for group in KNOWN.values() for known in group]))
def test_what_is_known_is_what_the_committed_records_say(recipe, arm, gains):
    rows = [row for row in committed(recipe).main_rows if row.arm == arm and row.difference]
    sign = -1 if arm.startswith("no ") else 1
    assert {row.labels: round(100 * sign * row.difference.mean, 2) for row in rows} == gains


@pytest.mark.parametrize(
    ("group", "labels", "expected"),
    [
        ("optimizer", 3, (1.75, "few_and_many")),
        ("optimizer", 31, (1.75, "few_and_many")),
        ("optimizer", 33, (0.90, "optimizers")),
        ("optimizer", 3_000, (0.76, "optimizers")),
        ("optimizer", 4_000, (0.87, "few_and_many")),
        ("attention", 50_000, (0.13, "spt_lsa")),
        ("size", 100, (None, "")),
    ],
)
def test_known_gain_is_that_of_the_most_similar_number_of_labels(group, labels, expected):
    assert known_gain(group, labels) == expected


# The time


def test_trials_fit_into_their_share_of_the_time():
    groups = groups_of_options(inspect_images(shapes()), 15)
    for minutes, step in ((2, 0.02), (5, 0.005), (15, 0.01), (15, 0.2), (120, 0.01)):
        steps, count = steps_of_trials(groups, minutes, 20.0, step, 2, 50.0)
        assert 1 <= count <= len(groups) and 50 <= steps <= MOST_STEPS
        run = steps * step / 2
        seconds = 20 + START * count + run * sum(sum(runs_of(group)) for group in groups[:count])
        fits = seconds <= 60 * minutes * 0.4 and seconds + 50 * run <= 60 * minutes
        assert fits or (count == 1 and steps == 200)


@pytest.mark.parametrize(
    ("one_pass", "last", "left", "expected"),
    [
        (10.0, 5.0, 65.0, (1_000, 6)),
        (10.0, 5.0, 45.0, (1_000, 4)),
        (10.0, 5.0, 25.0, (1_000, 2)),
        (10.0, 5.0, 12.5, (500, 2)),
        (10.0, 5.0, 130.0, (2_000, 6)),
        (1.0, 0.5, 1_000.0, (1_000 * LONGEST, MOST_PASSES)),
    ],
)
def test_six_passes_are_wanted_first_then_longer_training_then_more_passes(one_pass, last, left, expected):
    assert length_of_judging(one_pass, last, left, 1_000) == expected


@pytest.mark.parametrize(("left", "folds"), [(1_000, 5), (310, 5), (309, 4), (190, 3), (130, 2), (129, 5)])
def test_there_are_as_many_folds_as_six_passes_have_time_for(left, folds):
    assert folds_of_judging(5, 10.0, 10.0, left) == folds
    assert folds_of_judging(2, 10.0, 10.0, left) == 2


# The recipes


def test_all_recipes_can_be_loaded_and_say_what_they_do():
    images = replace(inspect_images(shapes()), patch=4)
    made = Plan("shapes", 15, False, 2, 0.4, 5, 6, steps=300, final_steps=600, passes=3, sizes=[8, 16])
    groups = groups_of_options(images, 15)
    chosen = [group.options[-1] for group in groups]
    for number, group in enumerate(groups):
        others = [option for option in chosen if option not in group.options]
        file = Path(f"trial_{number}.py")
        file.write_text(trial_recipe(images, made, group, others))
        runs = load_recipe(file).RUNS
        assert [entry.arm for entry in runs] == [option.name for option in group.options]
        assert all(entry.run.steps == 300 and entry.run.val == 6 for entry in runs)
    Path("recipe.py").write_text(final_recipe(images, made, chosen))
    runs = load_recipe("recipe.py").RUNS
    judged = {entry.arm: entry for entry in runs if entry.labels is None}
    assert {PLAIN, ADVICE, CNN} < {*judged} and judged[CNN].baseline == ADVICE
    assert judged[ADVICE].run.augment == judged[CNN].run.augment != judged[PLAIN].run.augment == ()
    assert {entry.labels for entry in runs} == {None, 8, 16}
    trial = load_recipe("trial_0.py").RUNS[0].run.data()
    assert trial.test.count == 16 and len(trial.train) == 24
    held_out = {*trial.test.open().files}
    tested = [{*judged[PLAIN].run.data().at_seed(seed).test.open().files} for seed in range(5)]
    assert set.union(*tested) == held_out and sum(map(len, tested)) == 16  # what no trial has read, each image once
    Path("last.py").write_text(last_recipe(images, made, chosen))
    (entry,) = load_recipe("last.py").RUNS
    assert len(entry.run.data().train) == 40
    assert entry.run.steps == 600 and entry.run.augment == judged[ADVICE].run.augment
    for kept in (PLAIN, CNN):
        Path("last.py").write_text(last_recipe(images, made, chosen, kept))
        (entry,) = load_recipe("last.py").RUNS
        assert len(entry.run.data().train) == 40 and describe(entry.run.model) == describe(judged[kept].run.model)


def test_models_with_weights_from_imagenet_are_arms_with_the_score_of_the_others():
    images = replace(inspect_images(shapes()), patch=4, counts={"pool": {"circle": 20, "square": 60}})
    made = Plan("shapes", 15, False, 2, 0.4, 5, 6, steps=300, final_steps=600, passes=2, imagenet=[FROZEN, FINE_TUNED])
    chosen = [Option("flips", {"augment": "(sv.augment.Flip(),)"})]
    Path("recipe.py").write_text(final_recipe(images, made, chosen))
    runs = {entry.arm: entry for entry in load_recipe("recipe.py").RUNS}
    assert runs[FROZEN].baseline == runs[FINE_TUNED].baseline == ADVICE and runs[FROZEN].role == "technique"
    assert runs[FINE_TUNED].run.augment == runs[ADVICE].run.augment and runs[FINE_TUNED].run.init is not None
    assert runs[FINE_TUNED].run.evaluators == runs[ADVICE].run.evaluators
    assert describe(runs[FROZEN].run)["evaluators"][0]["metric"] == "balanced_accuracy"
    Path("last.py").write_text(last_recipe(images, made, chosen, FINE_TUNED))
    (entry,) = load_recipe("last.py").RUNS
    assert entry.run.init == runs[FINE_TUNED].run.init and len(entry.run.data().train) == 40


def test_without_the_weights_from_imagenet_the_command_goes_on_and_says_so(monkeypatch, capsys):
    def unavailable(weights):
        raise Unavailable("not here")

    monkeypatch.setattr(Weights, "path", unavailable)
    images = inspect_images(shapes())
    advisor = Advisor(images, opened_plan(Path("shapes"), images, Path("advice"), options()), Path("advice"), "cpu", 0.0)
    assert advisor.affordable_imagenet() == []
    assert "no comparison with a ViT-S from ImageNet: not here" in capsys.readouterr().err


@pytest.mark.parametrize("load", [1.0, 2.0])
def test_a_costly_option_is_not_taken_for_a_busy_machine(load):
    images, tokenizer = inspect_images(shapes()), "tokenizer of CCT"
    costly = 3.5 * 0.01 * load  # seconds of a step with this tokenizer, on a machine that other programs use
    made = Plan("shapes", 15, False, 2, 0.4, 2, 6, step=0.01, cnn_step=0.03, best_step=costly, slower=3.5 * load, steps=700)
    made.groups, made.chosen, made.imagenet = ["first layer"], {"first layer": tokenizer}, []
    advisor = Advisor(images, made, Path("advice"), "cpu", 0.0)
    assert [option.name for option in advisor.chosen] == [tokenizer] and advisor.slowdown == pytest.approx(load)
    one_pass, _ = advisor.seconds_of_judging()  # two folds of the chosen ViT, the plain ViT and the CNN, with two processes
    assert one_pass == pytest.approx(700 * load * (0.035 + 0.01 + 0.03), rel=0.1)


def test_nothing_chosen_gives_a_comparison_of_the_plain_vit_and_the_cnn():
    images = inspect_images(shapes())
    made = Plan("shapes", 15, False, 2, 0.4, 5, 6, steps=300, final_steps=600, passes=2)
    Path("recipe.py").write_text(final_recipe(images, made, []))
    runs = load_recipe("recipe.py").RUNS
    arms = {entry.arm: entry for entry in runs}
    assert ADVICE not in arms and arms[CNN].baseline == PLAIN


def test_model_is_trained_on_the_images_in_train_if_the_folder_has_test_images(monkeypatch):
    images = replace(inspect_images(in_parts(train=20, test=5)), patch=4)
    made = opened_plan(Path("parts"), images, Path("advice"), options(folder="parts"))
    made.steps, made.final_steps, made.passes = 100, 100, 2
    Path("last.py").write_text(last_recipe(images, made, [], PLAIN))
    module = load_recipe("last.py")
    assert module.__doc__ == "The model of smallvit advise: trained on the images in parts/train, and tested on those in parts/test."
    data = module.RUNS[0].run.data()
    assert (len(data.train), data.test.count) == (40, 10)
    assert "on the images in train/" in final_training(made) and "on all images" in final_training(replace(made, share=0.4))
    records, options_of_launch = [], {}

    def launch(runs, out, **how):
        options_of_launch.update(how)
        return records

    monkeypatch.setattr(phases, "launch", launch)
    monkeypatch.setattr(phases, "model_to_keep", lambda comparison: PLAIN)
    advisor = Advisor(images, made, Path("advice"), "cpu", 0.0)
    with pytest.raises(ValueError, match="1 of 1 runs are being trained by another process; start the command again"):
        advisor.train_last()
    assert options_of_launch["validation_only"] is False  # without validation images, the run needs the test images as a score


def result_of(entry, status: str = "finished", error: str | None = None) -> Record:
    """The record of a run that ended with this status."""
    return Record(
        recipe="recipe", arm=entry.arm, role=entry.role, labels=None, seed=entry.seed, fingerprint="", run={}, status=status, error=error
    )


@pytest.mark.parametrize(
    ("status", "message"),
    [
        ("interrupted", r"1 of 10 runs did not finish; .* 'plain ViT', has the status interrupted: killed; start the command again"),
        ("failed", r"1 of 10 runs did not finish; .* 'plain ViT', has the status failed: killed; start the command again"),
        ("missing", r"1 of 10 runs are being trained by another process; start the command again"),
    ],
)
def test_test_goes_on_only_if_all_its_runs_have_finished(status, message, monkeypatch):
    images = replace(inspect_images(shapes()), patch=4)
    made = opened_plan(Path("shapes"), images, Path("advice"), options(no_imagenet=True))
    made.steps, made.step, made.final_steps, made.passes, made.folds = 100, 0.01, 100, 2, 2
    ended, trained = [status], []

    def launch(runs, out, **how):
        trained.append(len(runs))
        first = [] if ended[0] == "missing" else [result_of(runs[0], ended[0], "killed" * (ended[0] != "finished"))]
        return [*first, *map(result_of, runs[1:])]

    monkeypatch.setattr(phases, "launch", launch)
    monkeypatch.setattr(Advisor, "final_runs", property(lambda self: load_recipe(self.final_recipe).RUNS[:10]))
    advisor = Advisor(images, made, Path("advice"), "cpu", 0.0)
    with pytest.raises(ValueError, match=message):
        advisor.judge()
    assert made.judged == 0
    ended[0] = "unavailable"  # such as weights from ImageNet
    advisor.judge()
    assert made.judged == 2
    trained.clear()
    advisor.judge()  # a restart: a run of the first passes may be damaged
    assert trained == [10]


@pytest.mark.parametrize(
    ("each", "kept", "passes"), [(90, CNN, 5), (118, CNN, 5), (119, CNN, 4), (140, PLAIN, 5), (141, PLAIN, 4), (8, CNN, 8)]
)
def test_another_pass_is_tested_if_it_ends_in_time_or_a_little_late(each, kept, passes, monkeypatch):
    images = replace(inspect_images(shapes()), patch=4)
    made = opened_plan(Path("shapes"), images, Path("advice"), options(no_imagenet=True))
    made.steps, made.step, made.cnn_step, made.final_steps, made.folds = 300, 0.05, 0.1, 300, 2
    made.passes, made.judged, made.pass_seconds = 4, 2, float(each)
    advisor = Advisor(images, made, Path("advice"), "cpu", 0.0)
    assert advisor.last_seconds == pytest.approx(45)
    clock = [800.0 - 4 * each]  # of 900 seconds; 7% more are allowed
    monkeypatch.setattr(Advisor, "spent", property(lambda self: clock[0]))
    trained = []

    def train_passes(self, numbers):
        clock[0] += each * (len(numbers) - len(trained))
        trained[:] = numbers

    monkeypatch.setattr(Advisor, "train_passes", train_passes)
    monkeypatch.setattr(Advisor, "kept", kept)
    advisor.judge()
    assert made.passes == len(trained) == passes
    Path("advice/model").mkdir(parents=True)
    made.passes = 2
    advisor.judge()
    assert made.passes == 2  # the model has been trained


def test_images_of_groups_and_of_small_classes_count_less():
    labels = np.array([0] * 90 + [1] * 10)
    judged = Judged([str(i) for i in range(100)], labels, ("a", "b"), np.zeros((1, 100, 2)), [])
    (entry, *_) = ablate({"a": Run(steps=1)}, references=False)
    record = replace(result_of(entry), score="accuracy")
    groups = [f"patient {i // 10}" for i in range(100)]
    assert independent_images(judged, [record]) == 100
    assert independent_images(judged, [replace(record, test_groups=groups)]) == 10
    assert independent_images(judged, [replace(record, score="balanced_accuracy")]) == 36  # 2² / (1 / 90 + 1 / 10)


def test_options_that_change_nothing_are_not_a_part_of_the_choice():
    groups = groups_of_options(inspect_images(shapes()), 15)
    chosen = {group.name: group.options[0].name for group in groups} | {"first layer": "convolutional stem"}
    assert [option.name for option in options_of(groups, chosen)] == ["convolutional stem"]


# The command


def test_files_of_something_else_are_never_replaced():
    check_into(Path("advice"))
    Path("advice").mkdir()
    Path("advice/.hidden").touch()
    check_into(Path("advice"))
    Path("advice/report.html").write_text("mine")
    for place in ("advice", "advice/report.html"):
        with pytest.raises(ValueError, match=rf"--into {place} is a .*; expected a new or an empty folder; use another --into"):
            check_into(Path(place))
    Path("advice/plan.json").write_text("{}")
    check_into(Path("advice"))


def test_plan_is_kept_and_belongs_to_one_folder_and_one_time():
    images = inspect_images(shapes())
    kept = opened_plan(Path("shapes"), images, Path("advice"), options())
    kept.steps, kept.chosen = 300, {"augmentation": "flips + shifts"}
    kept.write(Path("advice/plan.json"))
    assert opened_plan(Path("shapes"), images, Path("advice"), options()) == kept
    with pytest.raises(ValueError, match=r"advice with minutes 15.0, and now it is 30.0; use another --into"):
        opened_plan(Path("shapes"), images, Path("advice"), options(minutes=30.0))
    Path("shapes").rename("moved")
    with pytest.raises(ValueError, match=r"folder \S+shapes, and now it is \S+moved; if the images were moved, leave a link to them"):
        opened_plan(Path("moved"), images, Path("advice"), options())
    Path("shapes").symlink_to("moved")
    assert opened_plan(Path("shapes"), images, Path("advice"), options()) == kept
    Path("advice/plan.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a plan of this version"):
        opened_plan(Path("shapes"), images, Path("advice"), options())


def test_another_number_of_processes_and_no_imagenet_change_a_plan_that_was_found(capsys):
    images = inspect_images(shapes())
    kept = opened_plan(Path("shapes"), images, Path("advice"), options())
    kept.write(Path("advice/plan.json"))
    assert opened_plan(Path("shapes"), images, Path("advice"), options(jobs=None)) == kept and not capsys.readouterr().err
    changed = opened_plan(Path("shapes"), images, Path("advice"), options(jobs=3, no_imagenet=True))
    assert changed == replace(kept, jobs=3, imagenet=[])
    assert "--jobs is now 3; the time was planned for 2 worker processes" in capsys.readouterr().err
    changed.write(Path("advice/plan.json"))
    assert opened_plan(Path("shapes"), images, Path("advice"), options(jobs=3, no_imagenet=True)) == changed
    replace(kept, imagenet=[FROZEN]).write(Path("advice/plan.json"))
    with pytest.raises(ValueError, match=r"got --no-imagenet, but .*\(ViT-S from ImageNet-21k \(frozen\)\); leave out --no-imagenet"):
        opened_plan(Path("shapes"), images, Path("advice"), options(no_imagenet=True))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "there is no folder .*nowhere"),
        (["shapes", "--minutes", "1"], "--minutes is 1; expected at least 2"),
        (["shapes", "--minutes", "nan"], "--minutes is nan; expected at least 2"),
        (["shapes", "--minutes", "inf"], "--minutes is inf; expected at least 2.* and no infinite number"),
        (["shapes", "--digits", "--photos"], "got --digits and --photos"),
        (["few"], "needs at least 8 of each class"),
    ],
)
def test_wrong_arguments_are_refused(words, message, capsys):
    shapes(2, "few")
    shapes(8)
    assert main(["advise", *words]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_texts_of_the_answer():
    assert names_of([Option("a", {})]) == "a" and names_of([Option(name, {}) for name in "abcd"]) == "a, b, c and d"
    assert Option("x", {}).cost == 1


def judged(advice: tuple[str, float], cnn: tuple[str, float]) -> Comparison:
    """A comparison in which the plain ViT reaches 90% and the others have these verdicts and means."""
    found = committed("regularize")
    row = next(row for row in found.main_rows if row.arm == "mixup")
    arms = {PLAIN: (None, 0.9), ADVICE: advice, CNN: cnn}
    condition = row.condition._replace(labels=None)
    row = replace(row, condition=condition, new_images=(0.85, 0.985))
    rows = [replace(row, arm=arm, verdict=verdict, mean=mean) for arm, (verdict, mean) in arms.items()]
    return replace(found, rows=tuple(rows))


@pytest.mark.parametrize(
    ("advice", "cnn", "kept", "first", "second"),
    slow_after(2, [
        (("better", 0.95), ("worse", 0.9), ADVICE, "Use a ViT with stem:", "A small CNN, trained in the same way, reaches 90.0%"),
        (("better", 0.95), ("better", 0.97), CNN, "Use a small CNN", "If you want a small ViT, use a ViT with stem"),
        (("inconclusive", 0.91), ("better", 0.97), CNN, "Use a small CNN", "A ViT with stem was best in the trials"),
        (("inconclusive", 0.91), ("inconclusive", 0.92), ADVICE, "A ViT with stem was best", "no difference was shown"),
        (("worse", 0.8), ("inconclusive", 0.82), PLAIN, "Use the plain ViT", "no difference was shown"),
        (("worse", 0.8), ("better", 0.85), PLAIN, "Use the plain ViT", "A small CNN, trained in the same way, reaches 85.0%"),
        (("worse", 0.8), ("better", 0.95), CNN, "Use a small CNN", "If you want a small ViT, use the plain ViT"),
    ]),
)
def test_model_that_was_shown_to_be_best_is_kept_and_advised(advice, cnn, kept, first, second):
    comparison = judged(advice, cnn)
    assert model_to_keep(comparison) == kept
    sentences = answer(comparison, [Option("stem", {"dim": "96"})])
    assert sentences[0].startswith(first) and second in sentences[1]
    assert re.search(r"\d\d\.\d% accuracy \(95% interval: 85\.0 to 98\.5\)", " ".join(sentences))
    assert row_of(comparison.rows[1], [Option("stem", {})])["interval"] == "85.0 to 98.5"
    others = other_models(comparison, kept, Path("my advice"))
    assert bool(others) == (cnn[1] > {PLAIN: 0.9, ADVICE: advice[1], CNN: cnn[1]}[kept])
    assert all("'my advice/recipe.py:small CNN' IMAGES --out 'my advice/runs' --ensemble" in line for _, line in others)


@pytest.mark.parametrize(
    ("advice", "cnn", "pixels", "compared", "warned"),
    slow_after(2, [
        (("worse", 0.8), ("better", 0.85), 0.82, "A small CNN, .*85.0%.* the ViT with stem", False),
        (("worse", 0.8), ("inconclusive", 0.82), 0.92, "no difference was shown: it is .* the ViT with stem", True),
        (("worse", 0.8), ("better", 0.95), 0.92, "Use a small CNN, .*: it reaches 95.0%.* the ViT with stem", False),
        (("worse", 0.8), ("better", 0.95), 0.96, "Use a small CNN, .*: it reaches 95.0%.* the ViT with stem", True),
        (("better", 0.95), ("worse", 0.9), 0.92, "A small CNN, .*90.0%.* this ViT", False),
        (("inconclusive", 0.8), ("better", 0.95), 0.82, "Use a small CNN, .*: it reaches 95.0%.* the small ViT", False),
    ]),
)
def test_other_models_are_compared_by_name_and_raw_pixels_with_the_recommended_model(advice, cnn, pixels, compared, warned):
    found = judged(advice, cnn)
    reference = replace(found.rows[0], arm="pixels, nearest neighbor", role="reference", mean=pixels)
    sentences = answer(replace(found, rows=(*found.rows, reference)), [Option("stem", {"dim": "96"})])
    assert any(re.search(compared, sentence) for sentence in sentences), sentences
    assert ("Even nearest neighbor on raw pixels" in sentences[-1]) == warned


@pytest.mark.parametrize("score, learned", [(0.52, False), (0.9, True)])
def test_answer_begins_with_a_warning_if_nothing_was_learned(score, learned):
    runs = [
        Record(
            recipe="recipe", arm=arm, role=role, baseline=PLAIN, labels=None, seed=seed, fingerprint=f"{arm}{seed}", run={},
            status="finished", score="accuracy", test={"accuracy": score}, test_images=100, test_majority=0.5,
        )
        for arm, role in ((PLAIN, "baseline"), (ADVICE, "technique"), (CNN, "technique"))
        for seed in range(2)
    ]  # fmt: skip
    first, *others = answer(judged(("inconclusive", score), ("inconclusive", score)), [Option("stem", {"dim": "96"})], runs)
    assert first.startswith("No model was shown to be better than guessing") != learned
    assert len(others) == (1 if learned else 2)
    if not learned:
        assert "guessing (50.0%)" in first and others[0].startswith("The highest mean is 90.0% accuracy")


def guessing(arms: dict[str, float], chosen: list[Option]) -> str:
    """The second sentence of an answer if no model was shown to be better than guessing. `arms` are the means of the rows."""
    found = judged(("inconclusive", 0.0), ("inconclusive", 0.0))
    rows = [
        replace(found.rows[0], arm=arm, mean=mean, role="reference" if arm.startswith("pixels") else "technique", new_images=(mean - 0.17, mean + 0.17))
        for arm, mean in arms.items()
    ]  # fmt: skip
    record = Record(
        recipe="recipe", arm=PLAIN, role="baseline", labels=None, seed=0, fingerprint="a", run={}, status="finished", score="accuracy",
        test={"accuracy": 0.402}, test_images=100, test_majority=0.402,
    )  # fmt: skip
    return answer(replace(found, rows=tuple(rows)), chosen, [record])[1]


def test_highest_mean_is_named_with_the_reason_why_it_does_not_count():
    stem = [Option("stem", {"dim": "96"})]
    reference = guessing({PLAIN: 0.402, ADVICE: 0.45, CNN: 0.44, "pixels, logistic regression": 0.603}, stem)
    assert "by the reference “pixels, logistic regression”. A reference is a simple classifier" in reference
    assert "Its interval lies above guessing, so these images show something of the classes" in reference
    assert reference.endswith("Of the models, the ViT with stem has the highest mean, 45.0% accuracy (95% interval: 28.0 to 62.0).")
    near = guessing({PLAIN: 0.402, CNN: 0.44, "pixels, nearest neighbor": 0.5}, [])
    assert "Its interval" not in near and "the small CNN has the highest mean" in near
    model = guessing({PLAIN: 0.402, CNN: 0.44, "pixels, nearest neighbor": 0.4}, [])
    assert model.startswith("The highest mean is 44.0% accuracy") and "by the small CNN: not enough above guessing" in model


@pytest.mark.parametrize(
    ("steps", "words"), [(10, "had 10 training steps in place of the 200 .* so briefly is of little use"), (150, "in place of .* a better model"), (200, "")]
)
def test_answer_and_page_say_that_long_trials_left_few_steps_for_the_model(steps, words, monkeypatch):
    made = Plan("shapes", 3, False, 2, 0.4, 2, 6, steps=200, final_steps=steps, passes=2, judging_from=478.0)
    runs = ablate({PLAIN: Run(steps=1), CNN: Run(steps=1, model=SmallCNN)}, seeds=range(2), references=False)
    records = [replace(result_of(entry), score="accuracy", test={"accuracy": 0.9}, test_images=4, test_majority=0.5) for entry in runs]
    tested = Judged(list("abcd"), np.arange(4) % 2, ("circle", "square"), np.full((2, 4, 2), 0.5), [])
    fixed = {"judged_images": tested, "forest": "", "confusion_matrices": "", "training_images": 4, "what_would_help": [], "picture": ""}
    for name, value in fixed.items():
        monkeypatch.setattr(page, name, lambda *words, value=value: value)
    monkeypatch.setattr(page, "doubts", lambda *words, **names: Doubts(images=(), doubted=0, wrong=WrongLabels(estimate=None, low=None, high=None, images=4, text="")))
    sentences = page.write_page(Path("report.html"), made, [], [], runs, records)
    short = [each for each in sentences if "in place of" in each]
    assert len(short) == bool(words) and all(each in Path("report.html").read_text() for each in short)
    if words:
        assert re.search(words, short[0]) and "because 8.0 of the 3 minutes had passed when the trials ended" in short[0]
        assert "with --minutes 20 and another folder" in short[0] and "with --minutes 20 and" in more_time(made, Path("."))[0]


def test_docstrings_of_the_recipes_name_the_folder_alone():
    images = replace(inspect_images(shapes()), patch=4)
    made = Plan(str(Path("a place", 'sh"apes').resolve()), 15, False, 2, 0.4, 5, 6, steps=300, final_steps=600, passes=3)
    for text in (final_recipe(images, made, []), last_recipe(images, made, [], PLAIN)):
        doc = ast.get_docstring(ast.parse(text))
        assert "images in sh'apes" in doc and "a place" not in doc


def test_page_says_which_images_were_kept_together():
    made = Plan("shapes", 5, False, 2, 0.4, 2, 6, passes=3)
    assert "with --group-by" in division(made, 100)
    assert "--group-by" not in division(made, 100, 20) and "belong to 20 groups" in division(made, 100, 20)


@pytest.mark.parametrize(("minutes", "passes", "advised"), [(5, 2, "15"), (5, 3, "10"), (7, 5, "10"), (5, 6, None)])
def test_page_advises_more_time_if_there_are_too_few_passes_for_a_precise_verdict(minutes, passes, advised):
    found = more_time(Plan("shapes", minutes, False, 2, 0.4, 2, 6, passes=passes), Path("advice"))
    assert [advised] * bool(advised) == re.findall(r"--minutes (\d+)", " ".join(found))


def patients(count: int, images: int) -> Path:
    """A folder with this many patients in each class, and this many images of each patient."""
    for kind in ("circle", "square"):
        for patient in range(count):
            for number in range(images):
                draw(Path("scans", kind, f"P{patient}{kind[0]}_{number}.png"), kind)
    return Path("scans")


def test_images_of_a_patient_stay_together_in_as_many_folds_as_there_are_patients(capsys):
    images = inspect_images(patients(10, 6))
    assert images.grouped and images.groups == 20
    made = opened_plan(Path("scans"), images, Path("advice"), options(folder="scans"))
    assert (made.share, made.folds) == (0.4, 4) and made.group_by == images.group_by
    made.steps, made.final_steps, made.passes = 100, 100, 6
    Path("recipe.py").write_text(final_recipe(replace(images, patch=4), made, []))
    data = load_recipe("recipe.py").RUNS[0].run.data()
    parts = [data.at_seed(fold).test.open().files for fold in range(4)]
    groups = [{file[:-6] for file in part} for part in parts]
    assert all(groups) and sum(map(len, groups)) == len(set.union(*groups)) == 8


def test_groups_are_named_by_a_pattern_or_switched_off():
    patients(10, 6)
    assert inspect_images(Path("scans"), group_by="").group_by == "" and not inspect_images(Path("scans"), group_by="").grouped
    ten = inspect_images(Path("scans"), group_by=r"(P\d).*")
    assert ten.groups == 10 and ten.grouped
    with pytest.raises(ValueError, match="must match the whole file name"):
        inspect_images(Path("scans"), group_by=r"(Q\d).*")
    assert "use --group-by" in " ".join(findings(inspect_images(Path("scans"), group_by=""), recipe=False))


def test_one_group_in_a_class_is_an_error_if_the_groups_were_asked_for():
    for kind, groups in (("circle", 4), ("square", 1)):
        for number in range(8):
            draw(Path("scans") / kind / f"P{number % groups}_{number}.png", kind)
    with pytest.raises(ValueError, match=r"class 'square' in scans has one group, 'P0'; expected at least 2"):
        inspect_images(Path("scans"), group_by=r"(P\d)_.*")
    guessed = replace(inspect_images(Path("scans")), group_by=r"(P\d)_.*", groups=4, example="P0")
    assert not guessed.grouped and "the scores will be too high" in " ".join(findings(guessed))


def test_chosen_size_is_that_of_all_recipes_and_belongs_to_the_advice():
    shapes()
    images = inspect_images(Path("shapes"), size=96, patches=command.MOST_PATCHES)
    assert (images.size, images.patch) == ((96, 96), 16)
    made = opened_plan(Path("shapes"), images, Path("advice"), options(size=96))
    made.steps = 100
    text = trial_recipe(images, made, groups_of_options(images, 15)[0], [])
    Path("trials.py").write_text(text)
    run = load_recipe("trials.py").RUNS[0].run
    assert run.data().spec.size == (96, 96) and "patch = 16" in text
    made.write(Path("advice/plan.json"))
    with pytest.raises(ValueError, match=r"advice with size \[96, 96, 16\], and now it is \[16, 16, 2\]"):
        opened_plan(Path("shapes"), inspect_images(Path("shapes")), Path("advice"), options())


@pytest.mark.parametrize(("size", "steps"), [((16, 16), 60), ((48, 48), 60), ((96, 96), 15), ((480, 480), 10)])
def test_measuring_takes_fewer_steps_of_larger_images(size, steps):
    assert phases.probe_steps(size) == steps


def test_too_little_time_is_named_with_the_time_that_is_needed():
    assert phases.too_little_time(200, 180, 0.1) == ""
    assert "takes 110 ms here, so 3 minutes are too few for a reliable answer; for a better one, give at least --minutes 22, or" in (
        phases.too_little_time(640, 180, 0.11)
    )


def test_groups_are_refused_for_a_folder_with_a_test_part():
    shapes()
    Path("parts").mkdir()
    for part in ("train", "test"):
        shutil.copytree("shapes", Path("parts", part))
    with pytest.raises(ValueError, match=r"got --group-by, but parts is already divided into train/ and test/"):
        inspect_images(Path("parts"), group_by=r"(\d).*")
    assert not inspect_images(Path("parts"), group_by="").grouped


def test_too_few_groups_are_refused_with_the_way_out():
    images = inspect_images(patients(2, 10), group_by=r"(.*)_.*")
    with pytest.raises(ValueError, match=r"too few groups .*--group-by ''"):
        opened_plan(Path("scans"), images, Path("advice"), options(folder="scans"))


def test_copies_of_images_count_once_where_the_folds_are_planned():
    for name, different, copies in (("one", 10, 2), ("two", 30, 1), ("few", 4, 4)):
        for number in range(different):
            image = Image.fromarray(np.random.default_rng([different, number]).integers(0, 256, (8, 8), np.uint8))
            for copy in range(copies):
                Path("copies", name).mkdir(parents=True, exist_ok=True)
                image.save(Path("copies", name, f"{number}_{copy}.png".replace("_0", "")))
    images = inspect_images(Path("copies"), group_by="")
    with pytest.raises(ValueError, match=r"tests on another, and copies: .*'few' has .*; add images"):
        opened_plan(Path("copies"), images, Path("advice"), options(folder="copies", group_by=""))
    shutil.rmtree("copies/few")
    images = inspect_images(Path("copies"), group_by="")
    made = opened_plan(Path("copies"), images, Path("advice"), options(folder="copies", group_by=""))
    assert made.folds == 4, "20 files of class 'one' are 10 different images, and 40% of them are 4"
    page = division(made, 24, 0)
    assert "taken to be independent" in page and "such as patients." not in page


@pytest.mark.slow
def test_a_folder_becomes_an_answer_and_a_model_also_after_an_interruption(monkeypatch, capsys):
    shades()  # few steps, on any machine, are enough to learn something
    monkeypatch.setattr(command, "FEWEST_MINUTES", 0.1)
    monkeypatch.setattr(plan, "FEWEST_STEPS", 20)
    words = ["advise", "shades", "--minutes", "0.2", "--photos", "--jobs", "2"]
    stopped = Advisor.judge
    monkeypatch.setattr(Advisor, "judge", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(words) == 130
    decided = Plan.read(Path("advice/plan.json"))
    assert decided and decided.chosen and not decided.passes
    monkeypatch.setattr(Advisor, "judge", stopped)
    assert main(words) == 0
    after = Plan.read(Path("advice/plan.json"))
    assert after and after.chosen == decided.chosen and after.trials == decided.trials and after.passes >= 2
    output = capsys.readouterr().out
    page = Path("advice/report.html").read_text()
    assert "on images that no trial has" in output and re.search("small CNN.* reaches", page)
    assert "://" not in page.replace("http://www.w3.org", "")
    assert main(["predict", "advice/model", "shades/white/0.png"]) == 0
    assert re.search(r"shades/white/0.png,(white|black),", capsys.readouterr().out)
    assert main(words) == 0  # nothing is trained again
    assert "training" not in capsys.readouterr().err.partition("reading the images")[2].partition("\n")[2]


@pytest.mark.slow
def test_a_folder_with_small_validation_and_test_parts_becomes_an_answer_and_a_model(monkeypatch, capsys):
    in_parts(train=20, test=8, val=3)
    monkeypatch.setattr(command, "FEWEST_MINUTES", 0.1)
    monkeypatch.setattr(plan, "FEWEST_STEPS", 20)
    assert main(["advise", "parts", "--minutes", "0.2", "--photos", "--jobs", "2", "--no-imagenet"]) == 0
    record = read_record(Path("advice/model"))
    assert record and record.finished and record.test_images == 16
    page = Path("advice/report.html").read_text()
    assert "trained on the images in train/" in page and "6 images in val/ were validation images" in page
