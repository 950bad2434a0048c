"""Launching: the runs of a recipe over the cores of this machine.

pool.py        launch: worker processes, one thread each, and what to do when one dies
schedule.py    Scheduler: what is still to be trained, in which order, and what came of it
worker.py      work: what a worker does with the runs it is handed
progress.py    Bar: how far all of it is
plan.py        plan: what would be run, how the arms differ, how long it takes
trial.py       autotune: in which way steps are computed autotune here
"""

from .local import cores, launch

__all__ = ["cores", "launch"]
