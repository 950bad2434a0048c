"""Records -> verdicts, tables and pictures: what the runs of a recipe say, and how sure one may be of it."""

from .page import html, markdown
from .reproduce import band
from .statistics import holm, pairs_needed
from .text import text
from .verdicts import Comparison, Difference, Row, compare

__all__ = ["Comparison", "Difference", "Row", "band", "compare", "holm", "html", "markdown", "pairs_needed", "text"]
