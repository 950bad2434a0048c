"""Notes about data: warnings that point to the user's own line, given once and not again by each worker process."""

import functools
import multiprocessing
import os
import sys
import warnings


def note(text: str):
    """Warn with `text`, a sentence about the data. The warning points to the first line outside of smallvit. If a command such
    as `smallvit new` reads the data itself, there is no such line, and the text is printed as a note, once, with relative
    paths. Processes that were started by another Python process do not warn, because that process has loaded the same data
    before.
    """
    if multiprocessing.parent_process() is not None:
        return
    level, frame, of_command = 2, sys._getframe(1), False
    while frame.f_back is not None:
        package, *rest = str(frame.f_globals.get("__name__")).split(".")
        if package not in ("smallvit", "contextlib"):
            break
        level, frame, of_command = level + 1, frame.f_back, of_command or rest[:1] == ["commands"]
    if of_command:
        print_once(text.replace(f"{os.getcwd()}{os.sep}", ""))
    else:
        warnings.warn(text, stacklevel=level)


@functools.cache
def print_once(text: str):
    """Print a note on the error stream, once in a process."""
    print(f"note: {text}", file=sys.stderr, flush=True)
