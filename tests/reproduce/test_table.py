from __future__ import annotations

import csv
import io
import re

import pytest

from lampq.reproduce.part import Found
from lampq.reproduce.published import CLASSIFICATION
from lampq.reproduce.scores import Measure, score_table
from lampq.reproduce.table import Column, Table, escaped

TABLE = Table(
    "example",
    "A caption of 100 % & more.",
    (
        Column("method"),
        Column("top_1", "model #1"),
        Column("95 %", "model #1"),
        Column("size", "", ".3g"),
    ),
    (("a_b", 12.345, "±1.20", 1234.5), ("c", None, None, 0.5), ("d", "failed", "", 2.0)),
    rules=(0, 2),
    notes=("Made with `--bits`.",),
)


def balanced(text: str) -> bool:
    """Whether braces and environments of LaTeX are closed in the order they were opened."""
    opened: list[str] = []
    for sign in re.findall(r"\\[{}]|[{}]|\\begin\{\w+\}|\\end\{\w+\}", text):
        if sign.startswith(r"\begin"):
            opened.append(sign[6:])
        elif sign.startswith(r"\end"):
            if not opened or opened.pop() != sign[4:]:
                return False
        elif sign == "{":
            opened.append(sign)
        elif sign == "}" and (not opened or opened.pop() != "{"):
            return False
    return not opened


def widths(text: str) -> set[int]:
    """How many columns the rows of a tabular have."""
    found = set()
    for line in text.splitlines():
        if line.endswith(r"\\"):
            cells = re.split(r"(?<!\\)&", line)
            spans = (re.match(r"\s*\\multicolumn\{(\d+)\}", cell) for cell in cells)
            found.add(sum(int(span[1]) if span else 1 for span in spans))
    return found


def rows_of_markdown(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]


def test_numbers_are_written_in_the_form_of_their_column() -> None:
    assert TABLE.cells() == [
        ["a_b", "12.35" if f"{12.345:.2f}" == "12.35" else "12.34", "±1.20", "1.23e+03"],
        ["c", "", "", "0.5"],
        ["d", "failed", "", "2"],
    ]


def test_markdown_and_csv_have_the_same_cells() -> None:
    assert rows_of_markdown(TABLE.markdown()) == list(csv.reader(io.StringIO(TABLE.csv())))


def test_latex_is_balanced_and_every_row_has_all_columns() -> None:
    text = TABLE.latex()
    assert balanced(text)
    assert widths(text) == {4}
    assert text.count(r"\midrule") == 2  # below the titles, and above the third row
    assert r"\cmidrule(lr){2-3}" in text


@pytest.mark.parametrize("wrong", [r"\begin{a}", "{", "}", r"\begin{a}\end{b}", r"{\begin{a}}"])
def test_the_check_of_balance_finds_what_is_open(wrong: str) -> None:
    assert not balanced(wrong)


@pytest.mark.parametrize(
    ("text", "latex"),
    [
        ("50 % & a_b #1", r"50 \% \& a\_b \#1"),
        ("x ± y", r"x $\pm$ y"),
        ("d²", "d$^2$"),
        ("`--bits` {1, 2}", r"--bits \{1, 2\}"),
        ("a\\b~c^d", r"a\textbackslash{}b\textasciitilde{}c\textasciicircum{}d"),
    ],
)
def test_signs_of_latex_are_escaped(text: str, latex: str) -> None:
    assert escaped(text) == latex


def _found(label: str, **scores: tuple[float, ...]) -> Found:
    rows = [
        {"key": key, "method": key.upper(), "at": "4/4", "box": values[0], "mask": values[1]}
        for key, values in scores.items()
    ]
    return {"label": label, "result": {"rows": rows}}


def test_several_models_and_measures_make_one_table_with_means() -> None:
    found = [_found("A", x=(1.0, 2.0), y=(3.0, 4.0)), _found("B", x=(5.0, 6.0))]
    measures = (Measure("box", "AP box", form=".1f"), Measure("mask", "AP mask", form=".1f"))
    published = {("x", "4/4"): {"B": (7.0, 8.0)}}
    table = score_table("t", "c", found, published, measures=measures)
    assert [column.full for column in table.columns] == [
        *("method", "W/A", "A, AP box", "A, AP mask", "B, AP box", "B, AP mask"),
        *("mean AP box", "mean AP mask", "B, published, AP box", "B, published, AP mask"),
    ]
    assert table.cells() == [
        ["X", "4/4", "1.0", "2.0", "5.0", "6.0", "3.0", "4.0", "7.0", "8.0"],
        # no mean where a model has no such row
        ["Y", "4/4", "3.0", "4.0", "", "", "", "", "", ""],
    ]


def test_the_published_means_are_those_of_the_paper() -> None:
    # the last column of the paper's table of accuracies
    printed = {("adalog", "3/3"): 42.78, ("vtptq", "3/3"): 45.94, ("lampq", "3/3"): 51.81}
    printed |= {("float", "32/32"): 81.17, ("repq", "4/4"): 70.48, ("lampq", "4/4"): 77.42}
    for key, mean in printed.items():
        values = [scores[0] for scores in CLASSIFICATION[key].values()]
        assert sum(values) / len(values) == pytest.approx(mean, abs=0.0101)
