"""smallvit export: a trained model as one file, for ONNX Runtime or torch.export."""

import argparse
import sys
from pathlib import Path

from smallvit.deploy.onnx import export

from .finished import load_model


def main(options: argparse.Namespace) -> int:
    """Write a trained model to an ONNX file or a file of torch.export, and print how far its probabilities differ from those of
    the model in PyTorch. `options` are the arguments of the command line. Return the exit status 0.
    """
    model = load_model(options)
    text = f"writing {options.file}, with a check against PyTorch; this can take a minute"
    print(f"smallvit: {text}", file=sys.stderr, flush=True)
    difference = export(model, options.file, resize=False if options.fixed_size else None)
    size = Path(options.file).stat().st_size / 1e6
    print(f"{options.file}: {size:.1f} MB; largest difference of a probability from PyTorch: {difference:.1e}")
    return 0
