"""Optimizers: AdamW, Muon, SAM and ScheduleFree.

adamw.py          Optimizer: the base class; AdamW: the default
muon.py           Muon: orthogonal updates for the matrices inside the blocks, AdamW for the rest
sam.py            SAM: the gradient at nearby weights with a larger loss (also ASAM), with any of the others as base
schedule_free.py  ScheduleFree: AdamW with averaged weights in place of a learning-rate schedule

Contract of `optimizer = Class(groups, **options)`:

- Options are keyword-only and set by `functools.partial`.
- `groups` is what `decay_groups` returns: dicts with "params" and "weight_decay" as in torch, "decays" (True for matrices and
  kernels, False for biases, norms, tokens and positions), and "parts" (see `hidden_matrices`).
- It has these methods and attributes of `torch.optim.Optimizer`, which the training loop uses: `param_groups`, `state`,
  `zero_grad`, `step`, `state_dict`, `load_state_dict`. The loop sets the learning rate "lr" of each group before each step.
- The runs of a stack are one model whose parameters have an additional first axis, so a step must treat the slices along this
  axis independently, and the change of the weights must be proportional to "lr". An optimizer that averages weights reads
  "shares" from the group instead: the learning rates of the runs, divided by "lr".
- Everything that a step needs from earlier steps is in `state`, so that a resumed run continues with the same bits. Its
  method `initial_state` returns all entries of the state of a parameter; an optimizer that keeps others is refused.
"""

from .adamw import SCALARS, AdamW, Optimizer
from .muon import Muon
from .sam import SAM
from .schedule_free import ScheduleFree

__all__ = ["SAM", "SCALARS", "AdamW", "Muon", "Optimizer", "ScheduleFree"]
