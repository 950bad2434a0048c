"""smallvit advise: find the techniques that help on a folder of images, and train a model.

command.py          the command
options.py          the options that are tried, in groups, and their gains in earlier recipes
plan.py             Plan: how the images are split, and how the time is spent
recipes.py          the recipe files that the command writes
screening.py        the trials of one group of options
advisor.py          Advisor: all phases of the command
answer.py           the answer in a few sentences
learning_curve.py   the expected gain from twice as many labelled images, estimated from runs with fewer images
doubts.py           which labels are probably wrong, and which class has the most errors
page.py             the HTML page with the answer
"""

from .command import main

__all__ = ["main"]
