"""Reports of a recipe's records: tables and figures of the verdicts, warnings, CSV and LaTeX tables, all records as a pandas
DataFrame, and the comparison with committed records.
"""

from .export import csv_table, latex_table
from .frame import records
from .page import html, markdown, text, text_against
from .reproduce import compare_with_committed

__all__ = ["compare_with_committed", "csv_table", "html", "latex_table", "markdown", "records", "text", "text_against"]
