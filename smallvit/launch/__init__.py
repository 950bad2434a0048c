"""Training the runs of a recipe in parallel, on the cores of this machine or on a cluster.

launcher.py    launch: trains the runs of a recipe with an engine, and keeps their records
engine.py      Engine: the interface between launch and what trains runs
local.py       LocalEngine: worker processes of this machine, with one thread each
scheduler.py   Scheduler: which runs are still to be trained, in which order, and their records
worker.py      the code that a worker process executes
progress.py    Bar: the progress bar
plan.py        plan: what `--dry-run` prints, with the estimated time
autotune.py    autotune: finds the fastest numerics and stack size for this machine
"""

from .launcher import launch
from .local import cores

__all__ = ["cores", "launch"]
