"""Pages of the site that are made from the code and the records: API reference, reports, notebooks and technique tables.

    python docs/generate.py

`conf.py` calls `write_pages` at every build. The generated files are not committed. So the links of the pages in `docs/` lead
to the committed files from which they are made, and `with_generated_links` changes these links in the site.
"""

import ast
import dataclasses
import os
import re
import textwrap
from functools import cache
from pathlib import Path

import smallvit

DOCS = Path(__file__).parent
ROOT = DOCS.parent

MODULES = {  # module -> title of its page in the API reference
    "vit": "The model",
    "random_weights": "Random initial weights",
    "tokenizers": "Tokenizers",
    "positions": "Positions",
    "attention": "Attention",
    "attention_positions": "Positions inside attention",
    "attention_variants": "Other kinds of attention",
    "attention_starts": "Initialization of attention",
    "block_variants": "Other blocks",
    "reduction": "Token reduction",
    "pooling": "Pooling",
    "ensemble": "Deep ensembles",
    "references": "Reference models",
    "baselines": "Baselines",
    "augment": "Augmentation",
    "data": "Data sets",
    "objectives": "Objectives",
    "optimizers": "Optimizers",
    "pseudo_labels": "Pseudo-labels",
    "evaluate": "Evaluators",
    "run": "Runs",
    "ablation": "Comparisons",
    "recipe": "Recipes",
    "ranges": "Tuning",
    "train": "Training and loading",
    "deploy": "Models in other programs",
    "record": "Records",
    "verdicts": "Verdicts",
    "report": "Reports",
    "explain": "Looking inside",
    "pretrained": "Pretrained weights and timm",
    "flops": "Multiply-adds and speed",
    "numerics": "The native kernel in your own code",
}
MORE = {  # documented names that are not public at the top level
    "verdicts": ("Comparison", "Condition", "Difference", "Row", "disagreements"),
    "flops": ("closed_form", "counted", "match_budget", "speedup", "tokens_per_layer"),
}


# modules whose classes are shown with their methods
WITH_MEMBERS = ("run", "train", "data", "objectives", "evaluate", "deploy")


def names_of(module: str) -> tuple[str, ...]:
    """The documented names of a module."""
    if module == "augment":
        from smallvit import augment

        return tuple(augment.__all__)
    return (*smallvit.NAMES.get(module, ()), *MORE.get(module, ()))


def reference_page(module: str, title: str) -> str:
    """The API page of a module: its docstring, then every documented name."""
    lines = [f"# {title}", "", f"`smallvit.{module}`", "", "```{eval-rst}"]
    lines += [f".. automodule:: smallvit.{module}", "   :no-members:", ""]
    for name in names_of(module):
        member = getattr(__import__(f"smallvit.{module}", fromlist=[name]), name)
        kind = "autoclass" if isinstance(member, type) else "autofunction" if callable(member) else "autodata"
        members = ["   :members:"] if kind == "autoclass" and module in WITH_MEMBERS else []
        lines += [f".. {kind}:: smallvit.{module}.{name}", *members, ""]
    return "\n".join([*lines, "```", ""])


def reports() -> dict[str, str]:
    """The committed reports, by the name of their recipe."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "recipes").glob("*.md"))}


def notebooks() -> list[Path]:
    """The executed notebooks."""
    return sorted((ROOT / "notebooks").glob("*.ipynb"))


@cache
def generated_pages() -> dict[str, str]:
    """The paths of all generated pages, relative to `docs/`, each with the committed file from which it is made."""
    code = {"index": "__init__.py"}
    for module in MODULES:
        code[module] = f"{module}.py" if (ROOT / "smallvit" / f"{module}.py").exists() else f"{module}/__init__.py"
    return (
        {f"reference/{name}.md": f"smallvit/{file}" for name, file in code.items()}
        | {f"recipes/{name}.md": f"recipes/{name}.md" for name in reports()}
        | {f"notebooks/{path.name}": f"notebooks/{path.name}" for path in notebooks()}
    )


LINK = re.compile(r"(?<=\]\()(?P<path>[^)#\s:]+)(?=#[^)]*\)|\))")


def with_generated_links(text: str, page: str) -> str:
    """The text of a page of `docs/` in which links to committed files lead to the pages of the site that are made of them.
    `page` is its path, relative to `docs/`.
    """
    pages, folder = {ROOT / file: DOCS / name for name, file in generated_pages().items()}, (DOCS / page).parent

    def lead(match: re.Match) -> str:
        target = Path(os.path.normpath(folder / match["path"]))
        return os.path.relpath(pages[target], folder) if target in pages else match["path"]

    return LINK.sub(lead, text)


def change_links(app, page: str, source: list[str]):
    """Change the links of a page before Sphinx reads it, in place (an event handler)."""
    source[0] = with_generated_links(source[0], page)


def write_pages():
    """Write all generated pages below `docs/`."""
    for module, title in MODULES.items():
        write(DOCS / "reference" / f"{module}.md", reference_page(module, title))
    names = "\n".join(MODULES)
    write(DOCS / "reference" / "index.md", f"# API reference\n\n```{{toctree}}\n:maxdepth: 1\n\n{names}\n```\n")
    for name, text in reports().items():
        write(DOCS / "recipes" / f"{name}.md", re.sub("<details>.*?</details>", plain_headings, text, flags=re.DOTALL))
    for path in notebooks():
        write(DOCS / "notebooks" / path.name, path.read_text(encoding="utf-8"))


def plain_headings(part: re.Match) -> str:
    """A part of a Markdown page with bold lines for headings, because Sphinx would end a folded part at a heading."""
    return re.sub(r"^#+ (.+)$", r"**\1**", part[0], flags=re.MULTILINE)


def write(path: Path, text: str):
    """Write a file unless it already has this text, so that Sphinx reads again only what has changed."""
    path.parent.mkdir(exist_ok=True, parents=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


# "Paper    Vaswani et al. 2017" or "of, layers   which features": a label, at least two spaces, text
COLUMNS = re.compile(r"(?P<label>\S.{0,40}?) {2,}(?P<text>\S.*)")
# "width: the width of a token" or "`macs`, `ms`: ...": lower-case names, a colon, text
COLON = re.compile(r"(?P<label>`?[a-z_][\w.]*`?(?:, `?[a-z_]\w*`?)*): (?P<text>\S.*)")


def process_docstring(app, what, name, thing, options, lines: list[str]):
    """Convert one of our docstrings to reStructuredText, in place (an event handler of autodoc)."""
    lines[:] = to_rst(lines)


def process_signature(app, what, name, thing, options, signature, returns):
    """The signature of a dataclass: its fields with their defaults (an event handler of autodoc)."""
    if what != "class" or not dataclasses.is_dataclass(thing):
        return None
    texts = []
    for field in dataclasses.fields(thing):
        texts += ["*"] if field.kw_only and "*" not in texts else []
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        shown = getattr(default, "__name__", None) or repr(default)
        texts.append(field.name if default is dataclasses.MISSING else f"{field.name}={shown}")
    return f"({', '.join(texts)})", None


def skip_member(app, what, name, thing, skip: bool, options) -> bool | None:
    """Leave out fields of named tuples, functions and classes that are defaults of fields, and methods that scikit-learn adds
    (an event handler of autodoc).
    """
    default = "." not in getattr(thing, "__qualname__", ".")  # a name outside of the class
    added = name.startswith("set_") and name.endswith("_request")
    return True if default or added or type(thing).__name__ == "_tuplegetter" else None


def to_rst(lines: list[str]) -> list[str]:
    """A docstring as reStructuredText.

    Labelled lines such as `Paper    ...` and `width: ...` become definition lists, indented blocks and paragraphs that are one
    function call become code, `- ` begins an item of a list, and everything else is a paragraph.
    """
    out: list[str] = []
    index = 0

    def continuation(smallest: int) -> list[str]:
        """Take the next lines as long as they are indented by at least so many spaces."""
        nonlocal index
        taken = []
        while index < len(lines) and lines[index].strip() and indentation(lines[index]) >= smallest:
            taken.append(lines[index].strip())
            index += 1
        return taken

    while index < len(lines):
        line = lines[index]
        index += 1
        if not line.strip():
            continue
        label = label_of(line, lines[index] if index < len(lines) else "") if out else None
        if indentation(line) >= 4:
            block = [line]
            while index < len(lines) and (not lines[index].strip() or indentation(lines[index]) >= 4):
                block.append(lines[index])
                index += 1
            out += code_block(textwrap.dedent("\n".join(block)).strip("\n"))
        elif label and label["label"].endswith(".py"):  # the files of a package, in its docstring
            out += [f"- ``{label['label']}``: {inline(' '.join([label['text'], *continuation(2)]))}"]
            if index == len(lines) or not lines[index].strip():
                out += [""]
        elif label:
            out += [term(label["label"]), f"   {inline(' '.join([label['text'], *continuation(2)]))}", ""]
        elif line.startswith("- "):
            out += [f"- {inline(' '.join([line[2:], *continuation(2)]))}"]
            if index == len(lines) or not lines[index].startswith("- "):
                out += [""]
        else:
            paragraph = [line.strip()]
            while index < len(lines) and lines[index].strip() and not lines[index].startswith("- "):
                if label_of(lines[index], "") and COLUMNS.fullmatch(lines[index]):
                    break
                paragraph.append(lines[index].strip())
                index += 1
            text = " ".join(paragraph)
            out += code_block(text) if out and is_call(text) else [inline(text), ""]
    return out


def indentation(line: str) -> int:
    """The number of spaces at the start of a line."""
    return len(line) - len(line.lstrip())


def label_of(line: str, following: str) -> re.Match | None:
    """The label and the text of a labelled line, or None.

    A colon makes a label only if the following line is indented, labelled or empty; otherwise the line is prose.
    """
    if match := COLUMNS.fullmatch(line):
        return match
    match = COLON.fullmatch(line)
    ends = not following.strip() or following.startswith("  ") or COLON.fullmatch(following) or COLUMNS.fullmatch(following)
    return match if match and ends else None


def is_call(text: str) -> bool:
    """Whether a text is a call of a Python function, such as an example."""
    try:
        return isinstance(ast.parse(text, mode="eval").body, ast.Call)
    except SyntaxError:
        return False


def code_block(text: str) -> list[str]:
    """A block of code, highlighted if it is Python."""
    try:
        ast.parse(text)
        language = "python"
    except SyntaxError:
        language = "text"
    return [f".. code-block:: {language}", "", *textwrap.indent(text, "   ").splitlines(), ""]


def term(label: str) -> str:
    """The term of a definition list: bold, or as code if it is written as code."""
    return inline(label) if "`" in label else f"**{inline(label)}**"


def inline(text: str) -> str:
    """A text as reStructuredText: `code` becomes ``code``, or a link if it is a public class; arXiv numbers become links."""
    parts = re.split(r"(?<!`)(`[^`]+`)(?!`)", text)
    literal = [bool(re.fullmatch("`[^`]+`", part)) for part in parts]
    for index, part in enumerate(parts):
        if not literal[index]:
            escaped = re.sub(r"([\\*_|`])", r"\\\1", part)
            parts[index] = re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"`arXiv:\1 <https://arxiv.org/abs/\1>`__", escaped)
            continue
        name = part.strip("`")
        code = f":py:obj:`~smallvit.{smallvit.HOME[name]}.{name}`" if name in CLASSES else f"`{part}`"
        before, after = "".join(parts[:index])[-1:], "".join(parts[index + 1 :])[:1]
        parts[index] = "\\ " * before.isalnum() + code + "\\ " * after.isalnum()
    return "".join(parts)


CLASSES = {name for name in smallvit.HOME if name[0].isupper()}


if __name__ == "__main__":
    write_pages()
