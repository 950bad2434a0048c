"""Time smallvit and other libraries on this machine: `pip install -e ".[bench]"`, then `python -m benchmarks`.

tasks.py      the benchmarks: what is timed, and the check that all libraries do equal work
ours.py       how smallvit does each task
peers.py      how the other libraries do it, with default settings and with their best flags
digits.py     the images that all libraries get
memory.py     the peak memory of a training step, in a new process
verdict.py    a whole recipe from the command to the report, and its runs in a training loop
table.py      the table of the documentation: `python -m benchmarks.table FILE.json docs/explanation/speed.md`
__main__.py   the command line

All libraries run in one process on one torch thread and take turns, to share changes in the speed of the machine. In each turn
a library repeats its task for 20 ms, at least once, and is then timed: a training repeats one step, too, and finds no data of
other libraries in the caches of the processor. The result is the median over the turns. Benchmarks need a clone, and are not
part of the package.
"""
