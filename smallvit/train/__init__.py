"""Training: from a run to its record.

fitting.py     fit, load: a run that is trained and evaluated, and what it leaves in its folder
training.py    Training: a run in progress, its steps, its checkpoint
stack.py       Stack: runs that differ only in their seed, trained as one model
starts.py      begin: the objective before its first step, with its own weights or those that another run left
"""

from .fit import fit, fit_stacked, load

__all__ = ["fit", "fit_stacked", "load"]
