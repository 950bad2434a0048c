"""Training: from a run to its record.

fit.py            fit: trains and evaluates a run and writes its record; start reading here
loop.py           train, Training.train_step, next_batch, validate: the training loop
batches.py        which images a step sees; the batches of several runs are drawn together
flat_adamw.py     FlatAdamW: the steps of AdamW with a few large tensors, for runs with the native kernel
cuda_graph.py     GradientStep: the forward and backward pass of a step, on a GPU recorded once and repeated
evaluation.py     the scores of a finished training, for its record
checkpoint.py     saving an unfinished training and resuming it
read_log.py       the file that counts the reads of the test images
trace.py          hashes of the first steps, by which two trainings are compared
initialize.py     the objective before its first step, with new, earlier or external weights
stack.py          Stack: runs that differ only in seed, learning rate and number of labels, trained together as one model
parallel.py       fit_parallel: one run trained by several processes or GPUs
failures.py       what an error says about the machine: too little memory, or a lost GPU
publish.py        writing the weights and the record of a finished run; the first process that finishes it wins
trained_model.py  load, TrainedModel: predictions of a finished run
"""

from .fit import fit, fit_stacked
from .trained_model import TrainedModel, load

__all__ = ["TrainedModel", "fit", "fit_stacked", "load"]
