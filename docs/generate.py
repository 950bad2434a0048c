"""Pages of the site that are made from the code and the records: API reference, reports, notebooks and technique tables.

    python docs/generate.py

`conf.py` calls `write_pages` at every build. The generated files are not committed.
"""

import re
import shutil
from pathlib import Path

import smallvit

DOCS = Path(__file__).parent
ROOT = DOCS.parent

MODULES = {  # module -> title of its page in the API reference
    "vit": "The model",
    "tokenizers": "Tokenizers",
    "positions": "Positions",
    "attention": "Attention",
    "reduction": "Token reduction",
    "pooling": "Pooling",
    "references": "Reference models",
    "augment": "Augmentation",
    "data": "Data sets",
    "objectives": "Objectives",
    "pseudo_labels": "Pseudo-labels",
    "evaluate": "Evaluators",
    "run": "Runs",
    "ablation": "Comparisons",
    "train": "Training and loading",
    "report": "Reports",
    "explain": "Looking inside",
    "pretrained": "Pretrained weights and timm",
    "flops": "Multiply-adds and speed",
}
MORE = {  # documented names that are not public at the top level
    "report": ("Comparison", "Difference", "Row"),
    "flops": ("closed_form", "counted", "match_budget", "speedup", "tokens_per_layer"),
}


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


WITH_MEMBERS = ("run", "train", "data", "objectives", "evaluate")


def reports() -> dict[str, str]:
    """The committed reports, by the name of their recipe."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "recipes").glob("*.md"))}


def write_pages():
    """Write all generated pages below `docs/`."""
    reference = DOCS / "reference"
    reference.mkdir(exist_ok=True)
    for module, title in MODULES.items():
        write(reference / f"{module}.md", reference_page(module, title))
    names = "\n".join(MODULES)
    write(reference / "index.md", f"# API reference\n\n```{{toctree}}\n:maxdepth: 1\n\n{names}\n```\n")
    for name, text in reports().items():
        write(DOCS / "recipes" / f"{name}.md", text)
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        shutil.copyfile(path, DOCS / "notebooks" / path.name)


def write(path: Path, text: str):
    """Write a file unless it already has this text, so that Sphinx reads again only what has changed."""
    path.parent.mkdir(exist_ok=True, parents=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


LABEL = re.compile(r"^(?P<label>[A-Za-z_`][\w`, .*/()=-]{0,30}?)(?: {2,}|:\s+)(?P<text>\S.*)$")


def process_docstring(app, what, name, thing, options, lines: list[str]):
    """Convert one of our docstrings to reStructuredText, in place (the event handler of autodoc)."""
    lines[:] = to_rst(lines)


def to_rst(lines: list[str]) -> list[str]:
    """A docstring as reStructuredText: labelled paragraphs become a definition list, indented blocks become code."""
    out: list[str] = []
    paragraph: list[str] = []

    def flush():
        nonlocal paragraph
        if paragraph:
            out.extend([inline(" ".join(part.strip() for part in paragraph)), ""])
        paragraph = []

    index = 0
    while index < len(lines):
        line = lines[index]
        indent = len(line) - len(line.lstrip())
        match = LABEL.match(line) if indent == 0 else None
        if not line.strip():
            flush()
        elif match and "  " in line.strip():
            flush()
            start = match.start("text")
            text = [match["text"]]
            while index + 1 < len(lines) and lines[index + 1].startswith(" " * min(start, 4)) and lines[index + 1].strip():
                index += 1
                text.append(lines[index].strip())
            out.extend([inline(match["label"].strip()), f"   {inline(' '.join(text))}", ""])
        elif indent >= 4 and not paragraph:
            block = [line]
            while index + 1 < len(lines) and (not lines[index + 1].strip() or lines[index + 1].startswith("    ")):
                index += 1
                block.append(lines[index])
            out.extend(["::", "", *block, ""])
        elif re.match(r"^(\s*)[-*] ", line):
            flush()
            item = [line.strip()[2:]]
            while index + 1 < len(lines) and lines[index + 1].startswith("  ") and not re.match(r"^\s*[-*] ", lines[index + 1]):
                index += 1
                item.append(lines[index].strip())
            out.extend([f"- {inline(' '.join(item))}", ""])
        else:
            paragraph.append(line)
        index += 1
    flush()
    return out


def inline(text: str) -> str:
    """Escape text for reStructuredText; `code` becomes ``code``."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(f"`{part}`" if re.fullmatch("`[^`]+`", part) else escape(part) for part in parts)


def escape(text: str) -> str:
    """Escape the characters that mean markup in reStructuredText."""
    return re.sub(r"([\\*_|])", r"\\\1", text)


if __name__ == "__main__":
    write_pages()
