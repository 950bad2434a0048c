"""smallvit predict: the classes of image files, as a table."""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from smallvit.data.files import find_parts, folders_in, looks_like_image, unread_suffix, unread_text
from smallvit.deploy.predict import find_files, ignored_files, predict_files, table
from smallvit.storage import write_atomic
from smallvit.train.trained_model import ImageClassifier
from smallvit.words import how_many

from .finished import load_model, with_words

TABLES = ("", ".csv", ".tsv", ".txt")  # suffixes of a file for the table
BAR = 200  # a progress bar is shown for so many files; fewer are fast, and a notebook would keep each state of the bar


def main(options: argparse.Namespace) -> int:
    """Predict the classes of image files with a trained model, and print a table in CSV format or write it to a file. In a file
    whose name ends in .tsv, tabs separate the columns. `options` are the arguments of the command line. Return the exit status
    0.
    """
    from tqdm import tqdm

    try:
        files = find_files(options.images)
    except ValueError as error:
        if meant := with_words(options.run, options.images):
            raise ValueError(f"{options.images[0]} is no file with images; did you mean {meant} in quotes?") from error
        raise
    check_output(options.output, files)
    ignored = ignored_files(options.images)
    unread = Counter({suffix: ignored.pop(suffix) for suffix in [*ignored] if unread_suffix(suffix)})
    if unread:
        print(f"note: {unread_text(unread)}", file=sys.stderr)
    if ignored:
        kinds = ", ".join(f"{count:,} {suffix or 'without a suffix'}" for suffix, count in ignored.most_common(5))
        more = ", ..." * (len(ignored) > 5)
        files_are = how_many(ignored.total(), "file that is no image is", "files that are no images are")
        print(f"smallvit: {files_are} ignored: {kinds}{more}", file=sys.stderr)
    model = load_model(options)
    if note := note_on_training_images(model, files):
        print(f"note: {note}", file=sys.stderr)
    print(f"smallvit: predicting {how_many(len(files), 'image')}", file=sys.stderr, flush=True)
    with tqdm(total=len(files), unit="image", disable=True if len(files) < BAR else None, leave=False) as bar:
        predictions = predict_files(model, files, skip_broken=options.skip_broken, watch=bar.update)
    for reason in predictions.broken.values():
        print(f"skipped: {reason}", file=sys.stderr)
    separator = "\t" if (options.output or "").lower().endswith(".tsv") else ","
    text = table(predictions, model.classes, separator=separator)
    content = text.encode("utf-8", "surrogateescape")
    if options.output in (None, "-"):
        if sys.stdout.isatty() or not hasattr(sys.stdout, "buffer"):  # such as that of a notebook
            print(text, end="")
        else:
            sys.stdout.buffer.write(content)  # keeps names of files that are not UTF-8
        return 0
    write_atomic(Path(options.output), lambda new: new.write_bytes(content))
    counts = Counter(predictions.probabilities.argmax(1).tolist())
    shown = ", ".join(f"{model.classes[index]} {count:,}" for index, count in counts.most_common(5))
    print(f"{options.output}: {how_many(len(predictions.files), 'image')}; {shown}" + ", ..." * (len(counts) > 5))
    return 0


def note_on_training_images(model: ImageClassifier, files: Sequence[str]) -> str:
    """Return a note that some image files lie in the folder from which the training images of a model come, or an empty text.
    `model` is a trained model or an ensemble, and `files` are the images to predict. If the folder has a part with test images,
    these are no training images.
    """
    records = [one.record for one in getattr(model, "models", [model])]
    path = (records[0].run.get("data") or {}).get("path")
    try:
        parts = find_parts(Path(path).expanduser()) if isinstance(path, str) else {}
    except (OSError, ValueError):  # the folder is not here, or has changed
        return ""
    folders = [folder for part, top in parts.items() if part != "test" for folder in (top, *folders_in(top))]
    ways = (os.path.abspath, os.path.realpath)  # folders and files may be links
    places = {way(folder) for folder in folders for way in ways}
    inside = sum(any(str(parent) in places for way in ways for parent in Path(way(file)).parents) for file in files)
    if not inside:
        return ""
    models = "this model" if len(records) == 1 else "these models"
    return (
        f"{how_many(inside, 'image lies', 'images lie')} in {path}, from which the training images of {models} come, and a "
        "model is too sure of images on which it was trained; smallvit report RECIPE --predictions ARM predicts test images "
        "only, by the models that were not trained on them"
    )


def check_output(output: str | None, files: Sequence[str]):
    """Raise ValueError if the table must not be written to the file `output`: it is a folder, it is one of the images `files`,
    or it has the suffix of an image or of another file that is no table. None and "-" stand for the standard output.
    """
    if output in (None, "-"):
        return
    is_folder = Path(output).is_dir()
    if is_folder or looks_like_image(output) or os.path.realpath(output) in map(os.path.realpath, files):
        raise ValueError(
            f"-o got {output}, which is {'a folder' if is_folder else 'the name of an image'}; expected one file, such as "
            "predictions.csv; if you meant the images, put the pattern before -o"
        )
    if Path(output).suffix.lower() not in TABLES:
        raise ValueError(f"-o got {output}; expected a name for the table, which ends in .csv, .tsv or .txt")
