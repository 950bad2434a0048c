"""Reports of a recipe's records: verdicts, tables and figures."""

from .compare import Comparison, Difference, Row, compare
from .page import html, markdown, text
from .reproduce import compare_with_committed
from .statistics import holm, pairs_needed

__all__ = [
    "Comparison", "Difference", "Row", "compare", "compare_with_committed", "holm", "html", "markdown", "pairs_needed", "text",
]  # fmt: skip
