"""A table of results as Markdown, LaTeX and CSV; all three have the same cells."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

Cell = str | float | None
# what LaTeX takes for a command, and signs that its fonts do not have
ESCAPES = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "✓": r"$\surd$",
    "²": r"$^2$",
}


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its title, a heading it shares with its neighbours, the form of its numbers."""

    title: str
    group: str = ""
    form: str = ".2f"

    @property
    def full(self) -> str:
        """The title where there is no heading above it."""
        return f"{self.group}, {self.title}" if self.group else self.title


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text and numbers, with a caption and notes.

    Attributes:
        name: The stem of its files.
        caption: What it shows, in one sentence.
        columns: One for each cell of a row; the first holds text.
        rows: Numbers are written in the form of their column, None is an empty cell.
        rules: Numbers of the rows that have a line above them.
        notes: What a reader must know, in sentences.
    """

    name: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    rules: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    def cells(self) -> list[list[str]]:
        """The rows as they are shown."""
        return [
            [shown(cell, column.form) for cell, column in zip(row, self.columns, strict=True)]
            for row in self.rows
        ]

    def markdown(self) -> str:
        """The table with its caption and notes."""
        head = [f"| {' | '.join(column.full for column in self.columns)} |"]
        line = "|" + "".join("---|" if i == 0 else "---:|" for i in range(len(self.columns)))
        body = [f"| {' | '.join(row)} |" for row in self.cells()]
        notes = [f"- {note}" for note in self.notes]
        return "\n".join(
            [self.caption, "", *head, line, *body, *([""] if notes else []), *notes, ""]
        )

    def csv(self) -> str:
        """The cells with one line of titles."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([column.full for column in self.columns])
        writer.writerows(self.cells())
        return text.getvalue()

    def latex(self) -> str:
        """A table environment; it needs the package booktabs."""
        lines = [
            r"\begin{table}",
            r"  \centering",
            f"  \\caption{{{escaped(self.caption)}}}",
            f"  \\label{{tab:{self.name}}}",
            f"  \\begin{{tabular}}{{l{'r' * (len(self.columns) - 1)}}}",
            r"    \toprule",
            *_heads(self.columns),
            f"    {_latex_row([column.title for column in self.columns])}",
            r"    \midrule",
        ]
        for number, row in enumerate(self.cells()):
            if number in self.rules and number:
                lines.append(r"    \midrule")
            lines.append(f"    {_latex_row(row)}")
        lines += [r"    \bottomrule", r"  \end{tabular}"]
        if self.notes:
            lines += [r"  \par\smallskip\footnotesize\raggedright"]
            lines += [f"  {escaped(note)}\\par" for note in self.notes]
        return "\n".join([*lines, r"\end{table}", ""])


def shown(cell: Cell, form: str) -> str:
    """A cell as text."""
    if cell is None:
        return ""
    return cell if isinstance(cell, str) else format(cell, form)


def escaped(text: str) -> str:
    """Text as LaTeX writes it."""
    return "".join(ESCAPES.get(sign, sign) for sign in text.replace("`", ""))


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(escaped(cell) for cell in cells) + r" \\"


def _heads(columns: Sequence[Column]) -> list[str]:
    """The headings over several columns, with a line under each."""
    spans: list[tuple[str, int, int]] = []
    for number, column in enumerate(columns, 1):
        if spans and spans[-1][0] == column.group:
            spans[-1] = (column.group, spans[-1][1], number)
        else:
            spans.append((column.group, number, number))
    if not any(group for group, _, _ in spans):
        return []
    cells = [
        f"\\multicolumn{{{last - first + 1}}}{{c}}{{{escaped(group)}}}"
        for group, first, last in spans
    ]
    rules = [f"\\cmidrule(lr){{{first}-{last}}}" for group, first, last in spans if group]
    return [f"    {' & '.join(cells)} \\\\", f"    {' '.join(rules)}"]
