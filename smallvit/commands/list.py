"""smallvit list: the available recipes and their questions."""

import argparse
import ast

from smallvit.recipe import recipe_files


def main(options: argparse.Namespace) -> int:
    """Print one line for each available recipe file (a Python file that lists the runs of a comparison): its name, and the
    question that the comparison answers. Return the exit status 0. `options` are the arguments of the command line, which are
    not used.
    """
    for path in recipe_files():
        try:
            doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8-sig"))) or "it has no docstring with a question"
        except (OSError, SyntaxError, ValueError) as error:
            doc = f"cannot be read: {error}"
        print(f"{path.stem:16} {doc.splitlines()[0]}")
    return 0
