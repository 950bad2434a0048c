"""smallvit export: a trained model as one file, for ONNX Runtime or torch.export."""

import argparse
import sys
from math import ceil
from pathlib import Path

from smallvit.deploy.onnx import check_target, export, members

from .finished import load_model

MODELS_A_MINUTE = 5  # that are written to one file, on a slow processor


def main(options: argparse.Namespace) -> int:
    """Write a trained model to an ONNX file or a file of torch.export, and print how far its probabilities differ from those of
    the model in PyTorch. `options` are the arguments of the command line. Return the exit status 0.
    """
    check_target(options.file)
    model = load_model(options)
    minutes, count = ceil(len(members(model)) / MODELS_A_MINUTE), len(members(model))
    what = f"{options.file} with {count} models" if count > 1 else options.file
    time = f"{minutes} minutes" if minutes > 1 else "a minute"
    print(f"smallvit: writing {what}, with a check against PyTorch; this can take {time}", file=sys.stderr, flush=True)
    difference = export(model, options.file, resize=False if options.fixed_size else None)
    size = Path(options.file).stat().st_size / 1e6
    kept = f"the mean of {count} models, " if count > 1 else ""
    print(f"{options.file}: {kept}{size:.1f} MB; largest difference of a probability from PyTorch: {difference:.1e}")
    return 0
