"""Markdown as the report needs it: prose, tables, figures."""

from collections.abc import Iterable, Sequence


def prose(text: str) -> str:
    """One paragraph, whatever lines `text` was written on."""
    return " ".join(text.split())


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, its first column flush left and the others right; any text may stand in a cell."""
    rule = ["---", *["--:"] * (len(header) - 1)]
    lines = [[escape(cell) for cell in header], rule, *([escape(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def figure(name: str, description: str) -> str:
    """A figure of the report's folder; `description` is for those who cannot see it."""
    return f"![{description}](figures/{name}.svg)"


def escape(text: str) -> str:
    """`text` on one line, to be shown as it is."""
    text = prose("".join(letter if letter.isprintable() else " " for letter in text))
    return "".join(f"\\{letter}" if letter in "\\|<>`*_[]#&$~" else letter for letter in text)
