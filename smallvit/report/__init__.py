"""Reports of a recipe's records: verdicts, tables and figures."""

from .compare import Comparison, Condition, Difference, Row, compare, next_looks
from .disagreements import disagreement_text, disagreements
from .page import html, markdown, text
from .reproduce import compare_with_committed
from .sequential import ADDED_LOOKS, LOOKS
from .statistics import holm, pairs_needed

__all__ = [
    "ADDED_LOOKS", "LOOKS", "Comparison", "Condition", "Difference", "Row", "compare", "compare_with_committed",
    "disagreement_text", "disagreements", "holm", "html", "markdown", "next_looks", "pairs_needed", "text",
]  # fmt: skip
