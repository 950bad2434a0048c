"""The command line of the benchmarks: time smallvit and the other libraries, write a record, print the table.

python -m benchmarks                            all benchmarks, about two hours on two cores
python -m benchmarks train dino --repeats 5     some of them
python -m benchmarks --out benchmarks/record.json
python -m benchmarks views --out benchmarks/record.json --update    measure the views again; keep the other numbers
python -m benchmarks.table benchmarks/record.json docs/explanation/speed.md
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
    """Run the benchmarks that the command line names; return the exit code."""
    import torch

    from benchmarks.table import markdown
    from benchmarks.tasks import BENCHMARKS, WARM_UP, compare
    from smallvit.numerics import parse_numerics
    from smallvit.storage import write_text

    parser = argument_parser(list(BENCHMARKS))
    args = parser.parse_args(words)
    unknown = [name for name in args.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; expected some of {', '.join(BENCHMARKS)}")
    torch.set_num_threads(args.threads)
    benchmarks = BENCHMARKS | {name: partial(BENCHMARKS[name], steps=args.steps) for name in ("recipe", "gpu", "verdict")}
    given = parse_numerics(args.numerics)
    benchmarks |= {name: partial(BENCHMARKS[name], given=given) for name in ("train", "inference", "dino", "views")}
    record = {"machine": describe_machine(), "repeats": args.repeats, "warm_up": WARM_UP, "lines": []}
    if args.update and args.out.exists():
        earlier = json.loads(args.out.read_text())
        if reason := difference(earlier, record):
            parser.error(f"--update: the record in {args.out} has {reason}; measure all lines again in a new file")
        record["lines"] = with_code(earlier)
    for name in args.names or BENCHMARKS:
        for task in benchmarks[name]():
            record["lines"] = replaced(record["lines"], [*compare(task, args.repeats)])
            write_text(args.out, json.dumps(record, indent=1) + "\n")  # after each task: a later one may fail
            print(task.name, file=sys.stderr, flush=True)
    print(markdown(record))
    return 0


def difference(earlier: dict, record: dict) -> str | None:
    """Return what makes the numbers of two records differ, as text, or None: the machine, the versions, the repetitions, or how
    long a call is warmed up. The code of smallvit may differ.
    """
    for name, value in record["machine"].items():
        if name != "code" and earlier["machine"][name] != value:
            return f"another value of {name}"
    if earlier["repeats"] != record["repeats"]:
        return "another number of repetitions"
    return None if earlier.get("warm_up") == record["warm_up"] else "another warm-up"


def with_code(earlier: dict) -> list[dict]:
    """Return the lines of an earlier record. Each has the item `code`: the code of smallvit with which it was measured. A line
    without this item was measured with the code of the whole record.
    """
    return [{"code": earlier["machine"]["code"]} | line for line in earlier["lines"]]


def replaced(lines: list[dict], new: list[dict]) -> list[dict]:
    """Return the lines of a record, with the `new` lines of one task in the place of its earlier ones, or else at the end."""
    same = [(line["task"], line["steps"]) == (new[0]["task"], new[0]["steps"]) for line in lines]
    at = same.index(True) if True in same else len(lines)
    return [*lines[:at], *new, *(line for line, replaced in zip(lines[at:], same[at:]) if not replaced)]


def argument_parser(names: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of the command line; `names` are the benchmarks for the help text."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Time smallvit and other libraries.")
    parser.add_argument("names", nargs="*", help=f"benchmarks to run: {', '.join(names)} (default: all)")
    parser.add_argument("--repeats", type=int, default=9, help="counted repetitions (default 9)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads; whole recipes use all cores (default 1)")
    parser.add_argument("--steps", type=int, nargs="+", default=[20, 60], help="steps of a recipe's runs (default 20 60)")
    parser.add_argument("--numerics", nargs="+", default=[], help="options of smallvit that are fixed, such as kernel=native")
    parser.add_argument("--update", action="store_true", help="keep the other lines of the record that exists")
    parser.add_argument("--out", type=Path, default=OUT, help=f"file for the record (default {OUT})")
    return parser


def describe_machine() -> dict:
    """Return the processor, the number of cores and threads, the GPU and the versions of all libraries."""
    import torch

    from benchmarks.peers import PEERS, has_native_bf16, version
    from smallvit import record
    from smallvit.launch import cores

    return {
        "cpu": record.cpu(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "bf16": has_native_bf16(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {"python": python_version()} | {name: found for name in ("torch", *PEERS) if (found := version(name))},
        "code": record.code(),
    }


if __name__ == "__main__":
    sys.exit(main())
