"""Notes about data: warnings that point to the user's own line, given once and not again by each worker process."""

import multiprocessing
import sys
import warnings


def note(text: str):
    """Warn with `text`, a sentence about the data. The warning points to the first line outside of smallvit. Processes that
    were started by another Python process do not warn, because that process has loaded the same data before.
    """
    if multiprocessing.parent_process() is not None:
        return
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "smallvit":
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
