"""Records -> verdicts, tables and pictures: what the runs of a recipe say, and how sure one may be of it."""

from .band import band
from .page import html, markdown
from .text import text
from .verdicts import Comparison, Difference, Row, compare, holm, pairs_needed

__all__ = ["Comparison", "Difference", "Row", "band", "compare", "holm", "html", "markdown", "pairs_needed", "text"]
