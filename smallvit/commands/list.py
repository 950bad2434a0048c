"""smallvit list: the recipes at hand, and what each asks."""

import argparse
import ast

from smallvit.recipe import recipe_files


def main(chosen: argparse.Namespace) -> int:
    for path in recipe_files():
        try:
            doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "no question asked"
        except (SyntaxError, ValueError) as error:  # no Python, or no text
            doc = f"cannot be read: {error}"
        print(f"{path.stem:16} {doc.splitlines()[0]}")
    return 0
