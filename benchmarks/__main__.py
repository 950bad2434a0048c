"""The command: time smallvit and its peers, write a record, print the table.

python -m benchmarks                            all of it, in about an hour on two cores
python -m benchmarks train dino --repeats 5     some of it
python -m benchmarks --out benchmarks/record.json && python -m benchmarks.table benchmarks/record.json README.md
"""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from platform import python_version

OUT = Path("runs/benchmarks.json")


def main(words: Sequence[str] | None = None) -> int:
    import torch

    from benchmarks.table import markdown
    from benchmarks.work import BENCHMARKS, compare
    from smallvit.record import write_text

    parser = arguments(list(BENCHMARKS))
    given = parser.parse_args(words)
    unknown = [name for name in given.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; expected some of {', '.join(BENCHMARKS)}")
    torch.set_num_threads(given.threads)
    chosen = BENCHMARKS | {name: partial(BENCHMARKS[name], steps=given.steps) for name in ("recipe", "gpu")}
    record = {"machine": machine(), "repeats": given.repeats, "lines": []}
    for name in given.names or BENCHMARKS:
        for work in chosen[name]():
            record["lines"] += compare(work, given.repeats)
            write_text(given.out, json.dumps(record, indent=1) + "\n")  # now: what comes later may fail
            print(work.name, file=sys.stderr, flush=True)
    print(markdown(record))
    return 0


def arguments(names: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Time smallvit beside its peers.")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(names)}; all by default")
    parser.add_argument("--repeats", type=int, default=9, help="turns that count; one before them does not (default 9)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads; a whole recipe takes all cores (default 1)")
    parser.add_argument("--steps", type=int, nargs="+", default=[20, 60], help="how long a recipe's runs are (default 20 60)")
    parser.add_argument("--out", type=Path, default=OUT, help=f"the record (default {OUT})")
    return parser


def machine() -> dict:
    """Where it was measured, and of what."""
    import torch

    from benchmarks.peers import PEERS, native_bf16, version
    from smallvit import record
    from smallvit.launch import cores

    return {
        "cpu": record.cpu(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "bf16": native_bf16(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {"python": python_version()} | {name: found for name in ("torch", *PEERS) if (found := version(name))},
        "code": record.code(),
    }


if __name__ == "__main__":
    sys.exit(main())
