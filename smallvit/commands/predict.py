"""smallvit predict: the classes of image files, as a table."""

import argparse
import sys
from collections import Counter
from pathlib import Path

from smallvit.deploy.predict import find_files, predict_files, table
from smallvit.record import write_atomic

from .finished import load_model

BAR = 200  # a progress bar is shown for so many files; fewer are fast, and a notebook would keep each state of the bar


def main(options: argparse.Namespace) -> int:
    """Predict the classes of image files with a trained model, and print a table in CSV format or write it to a file. `options`
    are the arguments of the command line. Return the exit status 0.
    """
    from tqdm import tqdm

    files = find_files(options.images)
    model = load_model(options)
    print(f"smallvit: predicting {len(files):,} images", file=sys.stderr, flush=True)
    with tqdm(total=len(files), unit="image", disable=True if len(files) < BAR else None, leave=False) as bar:
        predictions = predict_files(model, files, skip_broken=options.skip_broken, watch=bar.update)
    for reason in predictions.broken.values():
        print(f"skipped: {reason}", file=sys.stderr)
    text = table(predictions, model.classes)
    if options.output is None:
        print(text, end="")
        return 0
    content = text.encode("utf-8", "surrogateescape")
    write_atomic(Path(options.output), lambda new: new.write_bytes(content))
    counts = Counter(predictions.probabilities.argmax(1).tolist())
    shown = ", ".join(f"{model.classes[index]} {count:,}" for index, count in counts.most_common(5))
    print(f"{options.output}: {len(predictions.files):,} images; {shown}" + ", ..." * (len(counts) > 5))
    return 0
