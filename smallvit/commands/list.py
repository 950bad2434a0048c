"""smallvit list: the recipes at hand, and what each asks."""

import argparse
import ast

from smallvit.recipe import recipe_files


def main(chosen: argparse.Namespace) -> int:
    for path in recipe_files():
        try:
            doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "no question asked"
        except SyntaxError as error:
            doc = f"cannot be read: {error.msg} in line {error.lineno}"
        print(f"{path.stem:16} {doc.splitlines()[0]}")
    return 0
