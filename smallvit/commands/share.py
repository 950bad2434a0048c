"""smallvit share: a trained model with a model card, in a folder or on the Hugging Face Hub."""

import argparse
import sys
from pathlib import Path

from smallvit.deploy.hub import deliver, written_files
from smallvit.record import Record, read_record, settings_of

from .finished import find_folders, one_folder
from .stored import finished_records


def main(options: argparse.Namespace) -> int:
    """Write a folder with a trained model and its model card, or upload it to the Hugging Face Hub. `options` are the arguments
    of the command line. Return the exit status 0.
    """
    run = one_folder(find_folders(options), options, "choose one with --seed")
    records = other_seeds(Path(run))
    with written_files(run, options.target, records, options.license, options.onnx, options.private) as folder:
        for path in local_paths(read_record(Path(run))):
            print(f"note: {path} is a path of this machine; others can read it in record.json", file=sys.stderr)
        place = deliver(folder, options.target, options.private)
    print(f"shared: {place}\nload it with: smallvit.load({options.target!r})")
    return 0


def other_seeds(run: Path) -> list[Record]:
    """Return the records of all finished runs that differ from a run only in the seed, with the record of this run. They are
    looked for beside the folder `run`. A damaged record is left out.
    """
    record = read_record(run)
    if record is None:
        return []
    settings, beside = settings_of(record.run, "seed"), sorted(run.absolute().parent.iterdir())
    return [other for _, other in finished_records(beside) if settings_of(other.run, "seed") == settings]


def local_paths(record: Record | None) -> list[str]:
    """Return the paths among the settings of a run from its record: absolute ones, those in the home folder, and that of its
    data.
    """

    def texts(plain: object, name: object = None) -> list[str]:
        if isinstance(plain, dict | list):
            parts = plain.items() if isinstance(plain, dict) else enumerate(plain)
            return [text for key, part in parts for text in texts(part, key)]
        return [plain] if isinstance(plain, str) and (name == "path" or plain[:1] == "~" or Path(plain).is_absolute()) else []

    return list(dict.fromkeys(texts(record.run))) if record else []
