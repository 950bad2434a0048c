"""Training the runs of a recipe in parallel, on the cores of this machine.

local.py       launch: worker processes with one thread each; restarts a run whose worker has died
scheduler.py   Scheduler: which runs are still to be trained, in which order, and their records
worker.py      the code that a worker process executes
progress.py    Bar: the progress bar
plan.py        plan: what `--dry-run` prints, with the estimated time
autotune.py    autotune: finds the fastest numerics and stack size for this machine
"""

from .local import cores, launch

__all__ = ["cores", "launch"]
