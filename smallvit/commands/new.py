"""smallvit new: look at a folder of images and write a recipe that compares all techniques on them, or three of them."""

import argparse
import re
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from smallvit.words import how_many

from .inspection import FEWEST, Inspection, inspect_images
from .recipe_template import QUICK_ARMS, literal, possible_verdicts, recipe_text, seeds_of

if TYPE_CHECKING:
    from smallvit.ablation import ArmRun


def main(options: argparse.Namespace) -> int:
    """Write a recipe file (a Python file that lists the runs of a comparison) for a folder of images. `options` are the
    arguments of the command line: `data` is the folder, `name` is the name or path of the new file (None: that of the folder),
    `digits` is True if mirroring an image changes its label, `size` is the side of the images in pixels (None: by those of the
    files), and `quick` is True for a recipe with three techniques and few runs. Return the exit status 0.

    Raises ValueError for a folder that does not exist, for a file that exists already, and for a folder from which no recipe
    can be made. If the recipe was written and its runs cannot be planned, the message names the line to change.
    """
    folder = Path(options.data).expanduser()
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder.absolute()}; expected one with a folder of images for each class")
    file = recipe_file(options.name, folder)
    print(f"smallvit: reading the images in {folder}", file=sys.stderr, flush=True)
    images = inspect_images(folder, options.digits, size=options.size)
    print("\n".join(findings(images, arms=QUICK_ARMS if options.quick else None)))
    shown = folder.resolve()
    with_relative = shown.is_relative_to(Path.cwd()) and shown != Path.cwd()
    text = recipe_text(images, str(shown.relative_to(Path.cwd()) if with_relative else shown), options.quick)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_new(file, text)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{file} cannot be written ({error}); choose another name") from error
    print(f"wrote {file}", flush=True)
    print("smallvit: measuring a few steps, to estimate the time", file=sys.stderr, flush=True)
    try:
        print(planned(file, images, "" if options.quick else quick_command(file, options)))
    except Exception as error:  # of the recipe, of its data or of its models
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        advice = line_to_change(text, error)
        raise ValueError(f"{file} is written, but its runs cannot be planned: {kind}{error}; {advice}") from error
    print(f"next: read it, write down what you expect, then {shlex.join(['smallvit', 'run', str(file), '--dry-run'])}")
    return 0


def write_new(file: Path, text: str):
    """Write a text to a new file. If that fails, no file is left. Raises FileExistsError if the file exists."""
    content = text.encode()
    with file.open("xb") as stream:
        try:
            stream.write(content)
            stream.flush()
        except OSError:
            file.unlink(missing_ok=True)
            raise


def line_to_change(text: str, error: Exception) -> str:
    """Return which line of a recipe should be changed, as text. `text` is the content of the recipe file, and `error` is the
    reason why its runs cannot be planned: the line is that of an option of `folder` which the error names, such as
    `group_by=`. Without one, it is the line where the data set begins.
    """
    lines = dict(enumerate(text.splitlines(), 1))
    options = {n: match[1] for n, line in lines.items() if (match := re.match(r"    (\w+)=", line))}
    named = [n for n, option in options.items() if re.search(rf"\b{option}=", str(error))]
    number = named[0] if named else next(n for n, line in lines.items() if line.startswith("data ="))
    return f"change line {number}: {lines[number].strip()}"


def recipe_file(name: str | None, folder: Path) -> Path:
    """Return the path of the recipe file to write. `name` is its name or path, with or without `.py`; None means the name of
    the `folder` of images. Raises ValueError for a file that exists and for a name that is no Python name.
    """
    stem = "".join(letter if letter.isalnum() else "_" for letter in folder.resolve().name) or "images"
    path = Path(name or (f"images_{stem}" if stem[0].isdigit() else stem)).expanduser()
    if not path.name:
        raise ValueError(f"the recipe would be called {name!r}, which is a folder; expected a name such as cells.py")
    path = path if path.suffix == ".py" else path.with_name(f"{path.name}.py")
    if not path.stem.replace("-", "_").isidentifier():
        raise ValueError(f"the recipe would be called {path.name!r}; expected letters, digits, '_' and '-', such as cells.py")
    if path.exists():
        raise ValueError(f"{path} exists already and is never overwritten; choose another name, such as {path.stem}_2.py")
    return path


def findings(images: Inspection, recipe: bool = True, arms: Sequence[str] | None = None) -> list[str]:
    """Return what was found in the folder of images as lines of text: classes with their numbers of images, sizes, color modes,
    files that cannot be read, and groups. A wrong guess of the groups is corrected in the recipe, or without a recipe by the
    option --group-by. `arms` are the arms (variants) of the recipe; None means all.
    """
    lines = []
    for part, counts in images.counts.items():
        where = "" if part == "pool" else f"{part}: "
        each = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        lines.append(f"{where}{sum(counts.values()):,} images of {len(counts)} classes: {each}")
    if images.unequal:
        weights = ", and an arm weights the classes" * (recipe and arms is None)
        lines.append(f"the classes are unequal: balanced accuracy judges{weights}")
    heights, widths = zip(*images.sizes.elements())
    same = len(images.sizes) == 1
    sizes = f"{heights[0]} x {widths[0]}, all" if same else f"{min(heights)} x {min(widths)} to {max(heights)} x {max(widths)}"
    chosen = f"{images.size[0]} x {images.size[1]}"
    kept = same and images.size == (heights[0], widths[0])
    smaller = images.size[0] < max(heights) or images.size[1] < max(widths)
    lost = " (small details are lost; a larger --size keeps more)" * smaller
    lines.append(f"size (height x width): {sizes}; " + ("kept" if kept else f"resized to {chosen}{lost}"))
    modes = ", ".join(f"{count:,} {mode}" for mode, count in images.modes.most_common())
    kind = {1: "gray", 3: "color", 4: "color with transparency"}[images.channels]
    depth = ", as floats, which keep more than 8 bits" if images.floats else ""
    lines.append(f"color modes of the files: {modes}; trained in {kind}{depth}")
    if images.paged:
        lines.append(f"TIFF files with several pages, of which only the first one is read: {images.paged:,}")
    if images.broken:
        count = len(images.broken)
        lines.append(f"{how_many(count, 'file')} cannot be read and will be left out:")
        lines += [f"    {reason}" for reason in [*images.broken.values()][:FEWEST]]
        lines += [f"    and {len(images.broken) - FEWEST:,} more"] * (len(images.broken) > FEWEST)
    if images.group_by:
        used = "images of one group stay on one side of a split"
        unused = "a class has only one group, so groups are not used; if they are right, the scores will be too high"
        sentence = used if images.grouped else unused
        lines.append(f"the file names show {images.groups:,} groups, such as {images.example!r}: {sentence}")
        if not recipe:
            wrong = "if it is wrong, use --group-by with another pattern, or with '' for no groups"
        elif images.grouped:
            wrong = "correct it in the recipe if it is wrong"
        else:
            wrong = "write it into the recipe if you add images"
        lines.append(f"    the pattern is group_by={literal(images.group_by)}; {wrong}")
    elif images.folds or images.test:
        how = "set group_by or groups (a table) in the recipe" if recipe else "use --group-by"
        advice = f"if several images show the same patient or object, {how}"
        lines.append(f"no groups were found in the file names; {advice}")
    if images.folds and images.folds < 5:
        unit = "groups" if images.grouped else "images"
        lines.append(f"{images.folds} folds instead of 5, because the smallest class has {images.folds} {unit}")
    return lines


def quick_command(file: Path, options: argparse.Namespace) -> str:
    """Return the command that writes a quick recipe beside the recipe `file`. `options` are the command-line arguments."""
    name = file.with_name(f"{file.stem}_quick.py")
    size = [] if options.size is None else ["--size", str(options.size)]
    return shlex.join(["smallvit", "new", str(name), "--data", options.data, *["--digits"] * options.digits, *size, "--quick"])


def planned(file: Path, images: Inspection, smaller: str) -> str:
    """Return a text about the recipe in `file`: the numbers of arms (variants) and runs, an estimate of the time, and which
    verdicts are possible. `images` is what was found in the folder of images, and `smaller` is the command that writes a recipe
    with fewer runs, of which the time is estimated, too. It is empty for such a recipe.
    """
    from smallvit.ablation import with_dependencies
    from smallvit.launch.local import cores
    from smallvit.launch.plan import busy, clock, computing_processes, parallel, slowdown
    from smallvit.passes import run_count
    from smallvit.recipe import load_recipe

    runs, _ = with_dependencies(load_recipe(file).RUNS)
    seconds, measured = seconds_of_arms(runs)
    arms = Counter(entry.arm for entry in runs if entry.role in ("baseline", "technique"))
    jobs = min(cores(), len(runs))
    other_programs = computing_processes()
    factor = slowdown(other_programs, jobs)
    baseline = next(entry for entry in runs if entry.role == "baseline")
    each = run_count([entry.seed for entry in runs if entry.arm == baseline.arm], baseline.run.folds)
    others = how_many(len(seconds) - len(arms), "reference or earlier run", "references and earlier runs")

    def time(entries: Sequence["ArmRun"]) -> str:
        return clock(factor * parallel([seconds[entry.arm] for entry in entries], jobs))

    like_first = "; the others count like the first one" * (len(measured) < len(seconds))
    workers = how_many(jobs, "worker process", "worker processes")
    lines = [
        f"{len(arms)} arms and {others}, {each} of each arm, {len(runs):,} runs in all",
        f"about {time(runs)} with {workers} (measured: a few steps of {', '.join(measured)}{like_first}){busy(other_programs)}",
        possible_verdicts(images, quick=not smaller),
    ]
    if smaller:
        last = seeds_of(images, True) * (images.folds or 1)
        few = [e for e in runs if e.seed < last and e.run.labels is None and (e.arm in QUICK_ARMS or e.role == "reference")]
        lines.append(f"to make it smaller, delete arms; or take {len(few):,} runs (about {time(few)}): {smaller}")
    return "\n".join(lines)


def seconds_of_arms(runs: Sequence["ArmRun"]) -> tuple[dict[str, float], list[str]]:
    """Return the estimated seconds of one run of each arm (variant), as a dict from its name, and the names of the arms that
    were measured. `runs` are all runs of a recipe, with the earlier runs that they need.

    Measured are the baseline, the small CNN, earlier runs such as pretraining, and techniques with another objective than the
    baseline. The others get the seconds of the baseline: techniques that change one part of the model or of the images, and
    classifiers of raw pixels, whose measurement would take longer than all the rest.
    """
    from smallvit.launch.plan import estimate
    from smallvit.run import describe

    def objective(entry: "ArmRun") -> str:
        return describe(entry.run)["objective"]["call"]

    first = {entry.arm: entry for entry in reversed(runs)}
    baseline = next(entry for entry in runs if entry.role == "baseline")
    found: dict[str, float] = {baseline.arm: estimate(baseline.run, "cpu")}
    measured = [baseline.arm]
    for arm, entry in reversed(first.items()):
        if arm in found:
            continue
        if not entry.run.steps or (entry.role == "technique" and objective(entry) == objective(baseline)):
            found[arm] = found[baseline.arm]
        else:
            found[arm] = estimate(entry.run, "cpu")
            measured.append(arm)
    return found, measured
