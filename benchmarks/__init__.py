"""How fast smallvit is beside its peers, on this machine: `pip install -e ".[bench]"`, then `python -m benchmarks`.

work.py       what is timed: each benchmark says what is to be done, and puts everybody who does it side by side
ours.py       how smallvit does it
peers.py      how the peers do it, as shipped and with their best flags
digits.py     the images that all are given
memory.py     how much memory a step takes, in a fresh process
table.py      record -> the README's table: `python -m benchmarks.table FILE.json README.md`
__main__.py   the command

All who do the same work take turns in one process, on one torch thread; the first turn is thrown away, the median of the others
counts. That it is the same work is checked before the clock starts. It is run from a checkout and is no part of the package.
"""
