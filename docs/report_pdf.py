"""Make a PDF of docs/report.md.

    pip install -e ".[docs]"
    python docs/report_pdf.py [FILE]

writes FILE, by default `docs/_build/smallvit-report.pdf`, with pandoc and Typst. Both come as Python packages.
"""

import re
import sys
from pathlib import Path

import smallvit

DOCS = Path(__file__).parent
FONTS = ("Libertinus Serif", "DejaVu Sans Mono")  # both are part of Typst
STYLE = """
#set document(title: "TITLE")
#set page(paper: "a4", margin: (x: 2.4cm, y: 2.4cm), numbering: "1", footer-descent: 40%)
#set text(font: "SERIF", size: 10.5pt, lang: "en")
#set par(justify: true, leading: 0.62em, spacing: 1.1em)
#show heading: set block(above: 1.6em, below: 0.8em)
#show heading.where(level: 1): set text(size: 17pt)
#show heading.where(level: 2): set text(size: 13pt)
#show raw: set text(font: "MONO", size: 9pt)
#show link: set text(fill: rgb("#0e4f6e"))
#show table: set text(size: 8.8pt)
#show table: set par(justify: false)
#show figure: set block(breakable: false, above: 1.2em, below: 0.9em)
#set table(align: (x, y) => if x == 0 { left } else { center })
#set table(stroke: (x, y) => (top: if y <= 1 { 0.6pt } else { 0.2pt + gray }, bottom: 0.6pt), inset: (x: 5pt, y: 3.5pt))
#let horizontalrule = line(length: 100%, stroke: 0.4pt)
"""


def plain_markdown(text: str) -> str:
    """The report as Markdown for pandoc: without comments, links to other pages of the site, and pictures for a dark screen."""
    text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.DOTALL)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)\{\.only-dark\}\n?|\{\.only-light\}", "", text)
    text = re.sub(r"\[(\w+)\]\(\.\./recipes/\w+\.md\)", r"`\1`", text)  # the name of a recipe
    return re.sub(r"(?<!!)\[([^\]]+)\]\((?!https?:)[^)]*\)", r"\1", text)


def typst_source(text: str) -> str:
    """The report as Typst, with its style. Tables get as much room for a column as its content needs."""
    import pypandoc

    reader = "markdown-implicit_figures-smart"
    body = pypandoc.convert_text(plain_markdown(text), "typst", format=reader, extra_args=["--wrap=none"])
    body = re.sub(r"columns: \([\d.%, ]+\)", lambda m: f"columns: {m[0].count('%')}", body)
    body = re.sub(r"\n *align: \([a-z,]+\),", "", body)  # the style aligns all tables
    title = re.search(r"^# (.+)$", text, re.MULTILINE)[1]
    style = STYLE.replace("TITLE", title).replace("SERIF", FONTS[0]).replace("MONO", FONTS[1])
    version = f"#text(size: 9pt, fill: gray)[smallvit {smallvit.__version__}]\n\n"
    return style + version + body


def main(file: Path):
    """Write the PDF."""
    import typst

    source = DOCS / "_report.typ"  # pictures are found relative to it
    file.parent.mkdir(parents=True, exist_ok=True)
    source.write_text(typst_source((DOCS / "report.md").read_text(encoding="utf-8")), encoding="utf-8")
    try:
        typst.compile(str(source), output=str(file))
    finally:
        source.unlink()
    print(file)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "_build" / "smallvit-report.pdf")
