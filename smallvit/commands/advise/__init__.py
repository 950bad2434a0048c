"""smallvit advise: which technique pays for a folder of images, and a trained model.

command.py          the command
options.py          the options that are tried, in groups, and what is known about them
plan.py             Plan: how the images are divided, and how the time is spent
recipes.py          the recipe files that are written
screening.py        the trials of one group of options
advisor.py          Advisor: all phases, one after another
answer.py           the answer in a few sentences
learning_curve.py   how much twice as many labelled images would bring, from runs with fewer images
doubts.py           which labels are probably wrong, and in which class the models are wrong most often
page.py             the page with the answer
"""

from .command import main

__all__ = ["main"]
