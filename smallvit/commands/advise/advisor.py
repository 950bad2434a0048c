"""The phases of `smallvit advise`: trials, a test of the chosen ViT on other images, and the final training."""

import io
import math
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from smallvit.ablation import ArmRun
from smallvit.flops import counted
from smallvit.launch import launch
from smallvit.launch.results import folder as folder_of_run
from smallvit.native import reason_against
from smallvit.numerics import Numerics
from smallvit.pretrained import VIT_S, Weights
from smallvit.pretrained.weights import Unavailable
from smallvit.recipe import load_recipe
from smallvit.record import Record
from smallvit.reference_runs import FINE_TUNING, imagenet_vit_s
from smallvit.references import SmallCNN
from smallvit.storage import write_text
from smallvit.tuning import FIRST_SEED
from smallvit.verdicts import compare

from .answer import model_to_keep
from .options import Group, Option, groups_of_options
from .page import kept_text, write_page
from .plan import (
    BATCH,
    FEWEST_PASSES,
    FEWEST_STEPS,
    MOST_PASSES,
    SPARE,
    START,
    WANTED_PASSES,
    Plan,
    folds_of_judging,
    length_of_judging,
    runs_of,
    steps_of_trials,
)
from .recipes import (
    ADVICE,
    CNN,
    FINE_TUNED,
    FROZEN,
    IMAGES_TO_LEARN,
    PLAIN,
    final_recipe,
    last_recipe,
    options_of,
    trial_recipe,
)
from .screening import try_options

if TYPE_CHECKING:
    from ..inspection import Inspection

MEASURE = "trials_0_measure"  # the recipe whose runs measure the machine
STACK = 8  # runs that are trained as one model
CNN_STACK = 2  # runs of the small CNN that measure the machine, for each worker process
PROBE_STEPS, PROBE_PIXELS = 60, 48 * 48  # training steps of the runs that measure the machine, for images of so many pixels
LATE = 1.07  # expected end of the command, as a share of the time, up to which one more pass is tested
LATEST = 0.55  # no further group of options is started after this share of the time
LEARNING_SHARE = 0.25  # largest share of the test time for the learning curve
ALONE = 1.5  # time of a step of a run that is not in a stack, relative to one that is
REFERENCE_SECONDS = 1.0  # training time of a classifier on raw pixels
IMAGENET_SHARE = 0.3  # largest share of the test time for models with weights from ImageNet
PROBE_SECONDS = 3.0  # time to load these weights and to fit a logistic regression on their features


def probe_steps(size: tuple[int, int]) -> int:
    """Return the number of training steps of the runs that measure the machine: fewer for larger images, of which each step
    takes longer. `size` is the (height, width) of the images in pixels.
    """
    return max(10, min(PROBE_STEPS, PROBE_STEPS * PROBE_PIXELS // (size[0] * size[1])))


def too_little_time(needed: float, given: float, step: float) -> str:
    """Return a warning if trials, test and final training of the fewest steps do not fit into the time that was given, so that
    some are cut short, or an empty text. `needed` and `given` are seconds, and `step` is the time of a training step of the
    plain ViT in seconds.
    """
    if needed <= 1.25 * given:
        return ""
    return (
        f"warning: a training step takes {1e3 * step:.3g} ms here, so {given / 60:g} minutes are too few for a reliable "
        f"answer; for a better one, give at least --minutes {2 * math.ceil(needed / 60)}, or a smaller --size, with another "
        "--into"
    )


class Advisor:
    """All phases of `smallvit advise`. Each phase writes its decisions into the plan. If the command is started again, complete
    phases are not repeated, and finished runs are not trained again.

    images   what was found in the folder of images
    plan     the plan; a new one, or that of an earlier start of the command
    out      the folder for all results
    device   such as "cpu"
    started  the time at which the command was started, from `time.perf_counter`
    """

    def __init__(self, images: "Inspection", plan: Plan, out: Path, device: str, started: float):
        self.images, self.plan, self.out, self.device = images, plan, out, device
        self.runs = out / "runs"
        self.began = started - plan.spent
        numerics = Numerics(kernel="native" if device == "cpu" and reason_against() is None else None)
        self.options: dict[str, Any] = {"jobs": plan.jobs, "stack": STACK, "device": device, "numerics": numerics}

    @cached_property
    def groups(self) -> list[Group]:
        """The groups of options to try, in the order in which they are tried."""
        return groups_of_options(self.images, self.plan.minutes)

    @property
    def tried(self) -> list[Group]:
        """The groups that the plan has time for."""
        return [group for group in self.groups if group.name in self.plan.groups]

    @property
    def chosen(self) -> list[Option]:
        """The options that were chosen so far, without those that change nothing."""
        return options_of(self.groups, self.plan.chosen)

    @property
    def spent(self) -> float:
        """Seconds that the command has run, including earlier starts."""
        return time.perf_counter() - self.began

    @property
    def total(self) -> float:
        """The time for everything, in seconds."""
        return 60 * self.plan.minutes

    def say(self, text: str):
        """Print a progress message to the error stream, with the time that has passed."""
        minutes, seconds = divmod(int(self.spent), 60)
        print(f"smallvit: [{minutes}:{seconds:02} of {self.plan.minutes:g}:00] {text}", file=sys.stderr, flush=True)

    def save(self, _record: Record | None = None):
        """Write the plan to its file, with the time that has passed."""
        self.plan.spent = round(self.spent, 1)
        self.plan.write(self.out / "plan.json")

    def write_recipe(self, name: str, text: str) -> Path:
        """Write a recipe file into the output folder, unless it already has this text. Return its path."""
        path = self.out / f"{name}.py"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_text(path, text)
        return path

    # Trials

    def plan_trials(self):
        """Measure the machine, and plan which groups of options are tried and with how many training steps."""
        if self.plan.steps:
            return
        self.say("measuring the speed of this machine")
        probe = probe_steps(self.images.size)
        self.plan.steps, self.plan.step = probe, 0.0
        text = trial_recipe(self.images, self.plan, self.groups[0], [])
        plain = load_recipe(self.write_recipe(MEASURE, text)).RUNS[0]
        counts = {"plain ViT": (plain.run, STACK), "small CNN": (plain.run.vary(model=SmallCNN), CNN_STACK)}
        runs = [
            ArmRun(run=run.vary(seed=FIRST_SEED + i), arm=f"measure {name}")
            for name, (run, count) in counts.items()
            for i in range(count * self.plan.jobs)
        ]
        how: dict[str, Any] = {"validation_only": True, "curves": False, "retry": True} | self.options
        records = launch(runs, self.runs / "trials", recipe="measure", **how)
        check_not_missing(runs, records)
        if failed := [record for record in records if not record.finished]:
            raise ValueError(f"a run of {probe} training steps failed: {failed[0].error}")
        self.plan.step, self.plan.cnn_step = (
            median(record.seconds or 0.0 for record in records if record.arm == f"measure {name}") / probe
            for name in counts
        )
        cnn = self.plan.cnn_step / self.plan.step
        shortest = FEWEST_PASSES * (self.plan.folds or 1) * (2 + cnn) + ALONE * self.plan.jobs * max(cnn, 1)
        steps, count = steps_of_trials(self.groups, self.plan.minutes, self.spent, self.plan.step, self.plan.jobs, shortest)
        self.plan.steps, self.plan.groups = steps, [group.name for group in self.groups[:count]]
        least = (sum(runs_of(self.groups[0])) + shortest) * FEWEST_STEPS * self.plan.step / self.plan.jobs
        if warning := too_little_time(self.spent + least, self.total, self.plan.step):
            self.say(warning)
        self.save()

    def describe(self) -> str:
        """Return the plan as text."""
        plan, lines = self.plan, []
        if plan.folds:
            lines.append(
                f"{1 - (plan.share or 0):.0%} of the images are for trials ({plan.val} of them for validation in each run); "
                f"the chosen ViT is tested on the other {plan.share:.0%}, by cross-validation"
            )
        else:
            val = f"{plan.val} images in val/" if "val" in self.images.counts else f"{plan.val} of them"
            lines.append(f"trials use the images in train/ ({val} for validation); the chosen ViT is tested on those in test/")
        lines.append(f"trials: {plan.steps:,} training steps of {1e3 * plan.step:.1f} ms; options, largest known gain first:")
        for group in self.groups:
            known = f" (up to {group.gain:+.1f} points in the recipe {group.source})" if group.gain is not None else ""
            left_out = "" if group.name in plan.groups else "; no time for it"
            lines.append(f"    {group.name}{known}: {'; '.join(option.name for option in group.options)}{left_out}")
        return "\n".join(lines)

    def try_groups(self):
        """Try the options of each group, in addition to those already chosen, and choose the best one."""
        for number, group in enumerate(self.tried, 1):
            if group.name in self.plan.chosen:
                continue
            expected = START + sum(runs_of(group)) * self.plan.step * self.plan.steps / self.plan.jobs
            if number > 1 and self.spent + expected * self.plan.slower > LATEST * self.total:
                self.say(f"no time left to try {group.name}")
                self.plan.groups = [name for name in self.plan.groups if name in self.plan.chosen]
                break
            self.say(f"trying {group.name}: {'; '.join(option.name for option in group.options)}")
            name = f"trials_{number}_{group.name.replace(' ', '_')}"
            recipe = self.write_recipe(name, trial_recipe(self.images, self.plan, group, self.chosen))
            began = self.spent
            best, scores, seconds = try_options(group.name, recipe, self.runs / "trials", self.save, **self.options)
            self.plan.chosen[group.name], self.plan.trials[group.name] = best, [list(score) for score in scores]
            self.plan.best_step = seconds / self.plan.steps
            self.plan.slower = max(1.0, (self.spent - began) / expected)
            self.save()
            self.say("; ".join(f"{option} {100 * score:.1f}%" if score is not None else option for option, score, _ in scores))
            self.say(f"chosen: {best}")
        self.save()

    # Test

    def judge(self):
        """Train the chosen ViT, the plain ViT and a small CNN again, and test them on images that no trial has used. The first
        two passes show how long a pass takes; then as many more passes are trained as there is time for.
        """
        plan = self.plan
        if plan.imagenet is None:
            plan.imagenet = self.affordable_imagenet()
            self.save()
        if not plan.final_steps:
            if plan.folds:
                one_pass, last = self.seconds_of_judging()
                plan.folds = folds_of_judging(plan.folds, one_pass / plan.folds, last, self.left)
            plan.final_steps, plan.passes = length_of_judging(*self.seconds_of_judging(), self.left, plan.steps)
            plan.judging_from = self.spent
            self.save()
        if not plan.judged:
            self.say(f"testing on images that no trial has used: {plan.final_steps:,} training steps")
            self.train_passes(range(2))
            self.plan_the_rest((self.spent - plan.judging_from) / 2)
        if plan.sizes:
            self.say("training with fewer images, to estimate the gain from more images")
            self.train([entry for entry in self.final_runs if entry.labels is not None])
        if plan.passes > 2:
            self.say(f"testing in {plan.passes - 2} more passes")
        self.train_passes(range(plan.passes))
        while plan.pass_seconds and plan.passes < MOST_PASSES and self.has_time_for_a_pass:
            self.say("testing in one more pass, because there is time")
            plan.passes += 1
            self.save()
            self.train_passes(range(plan.passes))
        self.save()

    @property
    def has_time_for_a_pass(self) -> bool:
        """Whether one more pass is expected to end in time, or only a little late. After the final training there is none."""
        if (self.out / "model").exists():
            return False
        plan = self.plan
        steps = {PLAIN: self.slowdown * plan.step, ADVICE: plan.best_step, CNN: self.slowdown * plan.cnn_step}
        kept = self.kept
        last = ALONE * plan.final_steps * steps[kept] if kept in steps else self.last_seconds
        return self.spent + plan.pass_seconds + last <= LATE * self.total

    def affordable_imagenet(self) -> list[str]:
        """Return the names of the models with weights from ImageNet that there is time to test. The list is empty if the
        weights are not on this machine and cannot be downloaded.
        """
        left, found = IMAGENET_SHARE * self.left, []
        try:
            Weights(name=VIT_S).path()
        except Unavailable as error:
            self.say(f"no comparison with a ViT-S from ImageNet: {error}")
            return []
        for name, seconds in self.imagenet_seconds.items():
            needed = FEWEST_PASSES * (self.plan.folds or 1) * seconds * self.slowdown / self.plan.jobs
            if needed > left:
                self.say(f"no time for {name}, which would take {needed / 60:.1f} min")
                break
            left -= needed
            found.append(name)
        return found

    @cached_property
    def imagenet_seconds(self) -> dict[str, float]:
        """The expected seconds of a run with weights from ImageNet, frozen and fine-tuned. They are estimated from the time of
        a step of the plain ViT and the ratio of the multiply-adds.
        """
        import torch

        size, channels, classes = self.images.size, self.images.channels, len(self.images.classes)
        plain = load_recipe(self.out / f"{MEASURE}.py").RUNS[0].run
        large = imagenet_vit_s(plain, patch=self.images.patch)[FROZEN]
        pixels = torch.zeros(1, channels, *size)
        small_macs, large_macs = (counted(run.model(size, channels, classes), pixels) for run in (plain, large))
        each = self.plan.step / (3 * BATCH) * large_macs / small_macs  # seconds for the forward pass of an image
        frozen = PROBE_SECONDS + each * sum(next(iter(self.images.counts.values())).values())
        return {FROZEN: frozen, FINE_TUNED: frozen + 3 * BATCH * FINE_TUNING * each}

    @property
    def slowdown(self) -> float:
        """How many times longer a step takes now than when the machine was measured, at least 1. It is the time of a step with
        all chosen options in the last trials, divided by the time expected of it.
        """
        return max(1.0, self.plan.best_step / (self.plan.step * math.prod(option.cost for option in self.chosen)))

    def seconds_of_judging(self) -> tuple[float, float]:
        """Return the expected seconds of one pass and of the final training, if both have as many steps as the trials."""
        plan, folds = self.plan, self.plan.folds or 1
        plain, cnn = self.slowdown * plan.step, self.slowdown * plan.cnn_step
        step = plain + (plan.best_step if self.chosen else 0.0) + cnn
        others = 2 * REFERENCE_SECONDS + sum(self.imagenet_seconds[name] for name in plan.imagenet or ())
        one_pass = folds * (plan.steps * step + self.slowdown * others) / plan.jobs
        return one_pass, ALONE * plan.steps * max(plan.best_step, cnn)

    @property
    def last_seconds(self) -> float:
        """The expected seconds of the final training."""
        return self.seconds_of_judging()[1] * self.plan.final_steps / self.plan.steps

    @property
    def left(self) -> float:
        """Seconds that are left for the test and the final training."""
        return max(SPARE * self.total - self.spent, 0.1 * self.total)

    def plan_the_rest(self, each: float):
        """Plan the total number of passes, and whether there is time for a learning curve. `each` is the time of one of the
        first passes, in seconds.
        """
        plan = self.plan
        left = self.left - self.last_seconds
        sizes = learning_sizes(self.images, plan)
        curve = 2 * len(sizes) * each * (plan.best_step or plan.step) / (plan.step + plan.cnn_step + plan.best_step)
        each = max(each, 0.1)
        fewer = int((left - curve) / each) + 2 < WANTED_PASSES <= int(left / each) + 2  # too few for a verdict with the curve
        plan.sizes = sizes if sizes and curve <= LEARNING_SHARE * left and not fewer else []
        more = int((left - curve * bool(plan.sizes)) / each)
        plan.passes = 2 + min(max(more, 0), MOST_PASSES - 2)
        plan.judged, plan.pass_seconds = 2, each
        self.save()

    @property
    def final_recipe(self) -> Path:
        """The path of the recipe that tests the chosen ViT. The file is written if it has changed."""
        return self.write_recipe("recipe", final_recipe(self.images, self.plan, self.chosen))

    @property
    def final_runs(self) -> list[ArmRun]:
        """All runs of the recipe that tests the chosen ViT."""
        return load_recipe(self.final_recipe).RUNS

    def train_passes(self, numbers: range):
        """Train all arms in some passes. `numbers` are those of the passes, or the seeds if the folder has test images."""
        folds = self.plan.folds or 1
        self.train([entry for entry in self.final_runs if entry.labels is None and entry.seed // folds in numbers])

    def train(self, runs: Sequence[ArmRun]):
        """Train some runs of the recipe that tests the chosen ViT.

        Raises ValueError if some of them do not finish. Runs whose weights from ImageNet are unavailable are left out.
        """
        everything = self.final_runs
        path = self.final_recipe
        how: dict[str, Any] = {"recipe_runs": everything, "source": path, "retry": True, "show": self.save} | self.options
        records = launch(runs, self.runs, recipe=path.stem, **how)
        check_not_missing(runs, records)
        if left := [record for record in records if record.status not in ("finished", "unavailable")]:
            raise ValueError(
                f"{len(left)} of {len(runs)} runs did not finish; the first one, of {left[0].arm!r}, has the status "
                f"{left[0].status}: {left[0].error}; start the command again to train them"
            )

    # The model

    @property
    def kept(self) -> str:
        """The name of the arm (variant) that is best in the test so far. Its model is given to the user."""
        from ..report import collect

        return model_to_keep(compare(collect(self.final_runs, self.runs, self.final_recipe.stem)))

    def train_last(self) -> Path:
        """Train the model that is given to the user, the best one of the test, and return its folder. It is trained on all
        images. If the folder has test images, it is trained on those in train/ and scored on those in test/.
        """
        model = self.out / "model"
        if model.exists():
            return model
        kept = self.kept
        which = "on all images" if self.plan.share else "on the images in train/"
        self.say(f"training the model {which}: {kept_text(kept, self.chosen)}")
        path = self.write_recipe("last_training", last_recipe(self.images, self.plan, self.chosen, kept))
        runs = load_recipe(path).RUNS
        how: dict[str, Any] = {"source": path, "validation_only": bool(self.plan.share), "retry": True, "show": self.save}
        records = launch(runs, self.runs, recipe=path.stem, **how | self.options)
        check_not_missing(runs, records)
        (entry,), (record,) = runs, records
        if not record.finished:
            raise ValueError(f"the final training failed: {record.error}; start the command again")
        unfinished = model.with_name("model.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(folder_of_run(entry, self.runs, path.stem), unfinished)
        unfinished.rename(model)
        self.save()
        return model

    # The page

    def write_page(self) -> list[str]:
        """Write the full report of the comparison, and the page with the answer. Return the sentences of the answer."""
        from ..report import collect, write_report

        path, runs = self.final_recipe, self.final_runs
        records = collect(runs, self.runs, path.stem)
        with redirect_stdout(io.StringIO()):
            write_report(path, load_recipe(path), records, self.runs / path.stem / "report", out=self.runs)
        sentences = write_page(self.out / "report.html", self.plan, self.tried, self.chosen, runs, records)
        self.save()
        return sentences


def check_not_missing(runs: Sequence[ArmRun], records: Sequence[Record]):
    """Raise ValueError if some of the runs have no record, because another process trains them."""
    if missing := len(runs) - len(records):
        raise ValueError(
            f"{missing} of {len(runs)} runs are being trained by another process; start the command again when it has ended"
        )


def learning_sizes(images: "Inspection", plan: Plan) -> list[int]:
    """Return the numbers of labelled images for the learning curve, besides all of them: a quarter and a half of the training
    images of a run. Such a subset has equally many images of each class. So the list is empty if the classes are of unequal
    size, because a subset could not be compared with all images. `images` is what was found in the folder.
    """
    counts = next(iter(images.counts.values()))
    total = sum(counts.values())
    if plan.folds:
        total -= -(-round(total * (plan.share or 0)) // plan.folds)
    sizes = [int(share * total) // len(counts) * len(counts) for share in IMAGES_TO_LEARN]
    return [] if images.unequal or min(sizes) < 2 * len(counts) else sizes
