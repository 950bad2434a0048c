"""smallvit new: images at a folder of images and write a recipe that compares all techniques on them."""

import argparse
import sys
from collections import Counter
from pathlib import Path

from .inspection import FEWEST, Inspection, inspect_images
from .recipe_template import recipe_text


def main(options: argparse.Namespace) -> int:
    """Write a recipe file (a Python file that lists the runs of a comparison) for a folder of images. `options` are the
    arguments of the command line: `data` is the folder, `name` is the name or path of the new file (None: that of the folder),
    and `digits` is True if mirroring an image changes its label. Return the exit status 0.

    Raises ValueError for a file that exists already, and for a folder from which no recipe can be made.
    """
    folder = Path(options.data).expanduser()
    file = recipe_file(options.name, folder)
    print(f"smallvit: reading the images in {folder}", file=sys.stderr, flush=True)
    images = inspect_images(folder, options.digits)
    print("\n".join(findings(images)))
    shown = folder.resolve()
    with_relative = shown.is_relative_to(Path.cwd()) and shown != Path.cwd()
    text = recipe_text(images, str(shown.relative_to(Path.cwd()) if with_relative else shown))
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise ValueError(f"{file} cannot be written ({error}); choose another name") from error
    print(f"wrote {file}: {planned(file)}")
    print(f"next: read it, write down what you expect, then smallvit run {file} --dry-run")
    return 0


def recipe_file(name: str | None, folder: Path) -> Path:
    """Return the path of the recipe file to write. `name` is its name or path, with or without `.py`; None means the name of
    the `folder` of images. Raises ValueError for a file that exists and for a name that is no Python name.
    """
    stem = "".join(letter if letter.isalnum() else "_" for letter in folder.resolve().name) or "images"
    path = Path(name or (f"images_{stem}" if stem[0].isdigit() else stem)).expanduser()
    path = path if path.suffix == ".py" else path.with_name(f"{path.name}.py")
    if not path.stem.replace("-", "_").isidentifier():
        raise ValueError(f"the recipe would be called {path.name!r}; expected letters, digits, '_' and '-', such as cells.py")
    if path.exists():
        raise ValueError(f"{path} exists already and is never overwritten; choose another name, such as {path.stem}_2.py")
    return path


def findings(images: Inspection) -> list[str]:
    """Return what was found in the folder of images as lines of text: classes with their numbers of images, sizes, color modes,
    files that cannot be read, and groups.
    """
    lines = []
    for part, counts in images.counts.items():
        where = "" if part == "pool" else f"{part}: "
        each = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        lines.append(f"{where}{sum(counts.values()):,} images of {len(counts)} classes: {each}")
    if images.unequal:
        lines.append("the classes are unequal: balanced accuracy judges, and an arm weights the classes")
    heights, widths = zip(*images.sizes.elements())
    same = len(images.sizes) == 1
    sizes = f"{heights[0]} x {widths[0]}, all" if same else f"{min(heights)} x {min(widths)} to {max(heights)} x {max(widths)}"
    chosen = f"{images.size[0]} x {images.size[1]}"
    kept = same and images.size == (heights[0], widths[0])
    lines.append(f"size (height x width): {sizes}; " + ("kept" if kept else f"resized to {chosen}"))
    modes = ", ".join(f"{count:,} {mode}" for mode, count in images.modes.most_common())
    kind = {1: "gray", 3: "color", 4: "color with transparency"}[images.channels]
    depth = ", as floats, which keep more than 8 bits" if images.floats else ""
    lines.append(f"color modes of the files: {modes}; trained in {kind}{depth}")
    if images.broken:
        count = len(images.broken)
        lines.append(f"{count:,} file{'s' * (count > 1)} cannot be read and will be left out (skip_broken=True):")
        lines += [f"    {reason}" for reason in [*images.broken.values()][:FEWEST]]
        lines += [f"    and {len(images.broken) - FEWEST:,} more"] * (len(images.broken) > FEWEST)
    if images.group_by:
        used = "images of one group stay on one side of a split"
        sentence = used if images.grouped else "the classes have too few groups for a split, so group_by is not used"
        lines.append(f"the file names show {images.groups:,} groups, such as {images.example!r}: {sentence}")
        lines.append(f"    the pattern is {images.group_by!r}; correct group_by in the recipe if it is wrong")
    elif images.folds or images.test:
        lines.append("no groups were found in the file names; if several images show the same patient or object, set group_by")
    if images.folds and images.folds < 5:
        unit = "groups" if images.grouped else "images"
        lines.append(f"{images.folds} folds instead of 5, because the smallest class has {images.folds} {unit}")
    return lines


def planned(file: Path) -> str:
    """Return a text about the recipe in `file`: the numbers of arms (variants) and runs, and a rough estimate of the time. A
    few training steps of the baseline are measured for it.
    """
    from smallvit.ablation import with_dependencies
    from smallvit.launch.local import cores
    from smallvit.launch.plan import clock, estimate, parallel
    from smallvit.recipe import load_recipe

    runs, _ = with_dependencies(load_recipe(file).RUNS)
    arms = Counter(entry.arm for entry in runs if entry.role in ("baseline", "technique"))
    jobs = min(cores(), len(runs))
    total = parallel([estimate(runs[0].run, "cpu")] * len(runs), jobs)
    time = f"about {clock(total)} with {jobs} worker processes if every run takes as long as the baseline"
    return f"{len(arms)} arms, {len(runs):,} runs, {time}"
