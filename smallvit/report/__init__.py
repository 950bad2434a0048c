"""Reports of a recipe's records: tables and figures of the verdicts, warnings, and the comparison with committed records."""

from .page import html, markdown, text
from .reproduce import compare_with_committed

__all__ = ["compare_with_committed", "html", "markdown", "text"]
