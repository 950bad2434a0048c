"""Verdicts: from the records of a recipe to differences, intervals, tests and verdicts, as numbers. `report` shows them.

statistics.py     intervals of a mean difference over seeds and images, Holm's correction, planning
single_folds.py   the test over the single folds of a cross-validation
sequential.py     tests at several numbers of seeds
comparison.py     Comparison, Row, Difference, Condition: the results
compare.py        compare: all records -> Comparison; next_looks: which arms need more seeds
folds.py          cross-validation: the runs of one pass over all folds become one record
differences.py    which runs form pairs, and how sure their mean difference is
judge.py          Holm's correction, verdicts and their reasons
costs.py          medians of the costs
score.py          the name and the unit of the score by which arms are judged
contrasts.py      verdicts at several training lengths, and at tuned and common settings
disagreements.py  the test images on which two arms disagree
"""

from .compare import compare, next_looks
from .comparison import Comparison, Condition, Difference, Row
from .disagreements import disagreement_text, disagreements
from .folds import pooled
from .sequential import ADDED_LOOKS, LOOKS
from .statistics import holm, pairs_needed

__all__ = [
    "ADDED_LOOKS", "LOOKS", "Comparison", "Condition", "Difference", "Row", "compare", "disagreement_text", "disagreements",
    "holm", "next_looks", "pairs_needed", "pooled",
]  # fmt: skip
