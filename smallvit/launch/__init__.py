"""Training the runs of a recipe in parallel, on the cores of this machine or on a cluster.

launcher.py    launch: trains the runs of a recipe with an engine, and keeps their records
engine.py      Engine: the interface between launch and what trains runs
local.py       LocalEngine: worker processes of this machine, with one thread each
gpus.py        which GPUs of this machine are used, and which worker process gets which one
ray_engine.py  RayEngine: the machines of a Ray cluster, which need not share a disk
ray_server.py  FolderServer: the folders of the runs, for Ray workers on machines that do not see them
ray_worker.py  the code that a Ray worker executes
scheduler.py   Scheduler: which runs are still to be trained, in which order, and their records
worker.py      the code that a worker process executes; Ray workers share its training of a group of runs
results.py     in which folder the results of a run lie, how they are read, and how a failure is recorded
status.py      RecipeState: the state of every run, also while other processes or machines train them
progress.py    Bar: the progress bar
plan.py        plan: what `--dry-run` prints, with the estimated time
shards.py      the runs of a recipe in parts that need nothing from each other
slurm.py       an array of SLURM jobs, and a last job that writes the report
tune.py        the loop over the trials of all arms for `smallvit tune`
suggest.py     the settings of these trials
autotune.py    autotune: finds the fastest numerics and stack size for this machine
"""

from .launcher import launch
from .local import cores

__all__ = ["cores", "launch"]
