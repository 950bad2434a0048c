"""smallvit status: show which runs of a recipe have finished, and which are being trained, from any terminal or machine."""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from shutil import get_terminal_size

from smallvit.ablation import ArmRun
from smallvit.launch.progress import clock, count_text
from smallvit.launch.status import Progress, RecipeState
from smallvit.looks import with_looks
from smallvit.recipe import find_recipe, load_recipe, only
from smallvit.shapes import printable
from smallvit.words import how_many

from .report import scaled
from .stored import known_looks

SECONDS = 2.0  # between two tables with --watch
COLUMNS = ("finished", "running", "waiting", "failed")  # always shown; other states only if there are such runs
CLEAR = "\x1b[H\x1b[J"  # moves the cursor to the upper left corner of the terminal and clears what is below


def main(options: argparse.Namespace) -> int:
    """Print a table with the states of all runs of a recipe file, which lists the runs of a comparison, and the runs that are
    being trained at the moment, also by other processes and machines that share the folder of results. `options` are the
    arguments of the command line. Return the exit status: 0 if all runs have finished or their weights are unavailable,
    otherwise 1.

    With `--watch`, the table is shown again every 2 seconds, until all runs have ended. If the output is not a terminal, a line
    is printed when something has changed.
    """
    path = find_recipe(options.recipe)
    runs, out = scaled(load_recipe(path, old_options=True).RUNS, options)
    runs = with_looks(runs, known_looks(runs, out, path.stem))
    if not (place := Path(out, path.stem)).is_dir():
        print(f"note: there is no folder {place.absolute()}; if the runs are elsewhere, name it with --out", file=sys.stderr)
    state = RecipeState(only(runs, options.only), runs, Path(out), path.stem)
    state.update()
    if options.watch:
        watch(state)
    else:
        print("\n".join(page(state)))
    return int(any(one.state not in ("finished", "unavailable") for one in state.states))


def watch(state: RecipeState):
    """Print the state of a recipe's runs again and again, until all have ended or until Ctrl-C. On a terminal it is the whole
    table, otherwise one line each time the numbers change.
    """
    shown = ""
    try:
        while True:
            if sys.stdout.isatty():
                print(CLEAR + "\n".join(page(state, get_terminal_size().lines - 1)), flush=True)
            elif (line := numbers(state)) != shown:
                shown = line
                print(f"{time.strftime('%H:%M:%S')} {line}{time_left(state)}", flush=True)
            if state.ended:
                return
            time.sleep(SECONDS)
            state.update()
    except KeyboardInterrupt:
        print()


def page(state: RecipeState, height: int | None = None) -> list[str]:
    """Return the lines that show the states of a recipe's runs: a table, the runs in training, and the time left. `height` is
    the largest number of lines, or None. If there are more, some of the runs in training are left out.
    """
    lines = table(state)
    end = [numbers(state) + time_left(state)]
    if problems := [one.problem for one in state.states if one.problem]:
        first = printable(problems[0])[:200]
        end.append(f"{how_many(len(problems), 'record')} cannot be used, such as: {first}")
    running = [describe(entry, progress) for entry, progress in state.running]
    most = len(running) if height is None else max(height - len(lines) - len(end) - 3, 1)
    if len(running) > most:
        running[most:] = [f"  and {len(running) - most} more"]
    return [*lines, "", *running, *[""] * bool(running), *end]


def table(state: RecipeState) -> list[str]:
    """Return a table with one line for each arm (variant) in each condition, such as a number of labels. The columns are the
    numbers of its runs in each state.
    """
    counts: dict[tuple[str, str], Counter[str]] = {}
    for entry, one in zip(state.entries, state.states):
        counts.setdefault((entry.arm, entry.condition), Counter())[one.state] += 1
    others = sorted({one.state for one in state.states} - {*COLUMNS})
    columns = [*COLUMNS, *others]
    rows = [("arm", "condition", *columns)]
    rows += [(*cell, *(str(count[column] or "-") for column in columns)) for cell, count in counts.items()]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(f"{text:{'<' if place < 2 else '>'}{width}}" for place, (text, width) in enumerate(zip(row, widths)))
        for row in rows
    ]


def describe(entry: ArmRun, progress: Progress) -> str:
    """Return a line about a run in training: its arm (variant), condition and seed, its steps, the time left, and the machine
    that trains it. `progress` is what its worker process (a process that trains runs) has written.
    """
    name = f"{entry.arm}, {entry.condition}, {entry.seed_text}"
    place = f"{printable(progress.host)[:200]}, process {progress.pid}"
    step = f"step {progress.step:,} of {progress.steps:,}"
    if progress.silent:
        return f"  {name}: stopped (no sign of life for {clock(progress.age)}) at {step}, {place}"
    if progress.step >= progress.steps:
        step += ", being evaluated"
    left = "" if not progress.left else f", about {clock(progress.left)} left"
    stacked = f", {progress.runs} runs as one model" * (progress.runs > 1)
    return f"  {name}: {step}{left}{stacked}, {place}"


def numbers(state: RecipeState) -> str:
    """Return a text with the number of a recipe's runs in each state, such as `12 of 20 runs have finished, 2 running`."""
    return count_text(Counter(one.state for one in state.states), len(state.states))


def time_left(state: RecipeState) -> str:
    """Return a text with the estimated time until all runs of a recipe have been trained. It is empty if it is not known."""
    left = state.seconds_left()
    return "" if left is None else f"; about {clock(left)} left"
