from __future__ import annotations

import csv
import io
from typing import Any

import pytest

from lampq.refine import expected_error, gaussian_moments
from lampq.reproduce.errors import WIDTHS, lemma, tables
from lampq.reproduce.published import MOMENTS

# by hand from the printed moments, see tests/reference/test_paper_tables.py
EXACT_RATIOS = {2: 87.45, 3: 6.404, 4: 4.708, 5: 4.294, 6: 4.135, 7: 4.065, 8: 4.032}
# the two columns of the paper's table
PRINTED_RATIOS = {2: 82.74, 3: 6.59, 4: 4.70, 5: 4.29, 6: 4.13, 7: 4.12, 8: 4.03}
PRINTED_ERRORS = (1.0, 1.209e-2, 1.835e-3, 3.903e-4, 9.093e-5, 2.199e-5, 5.339e-6, 1.324e-6)


@pytest.fixture(scope="module")
def shown() -> dict[str, list[dict[str, str]]]:
    """The rows of both tables as they are written."""
    result: dict[str, Any] = {
        "moments": [gaussian_moments(bits) for bits in WIDTHS],
        "errors": [expected_error(bits) for bits in WIDTHS],
        "from_printed": [lemma(*pair) for pair in MOMENTS],
        "measured": [2.0] * 7,
    }
    found = tables([{"label": "model", "result": result}])
    return {table.name: list(csv.DictReader(io.StringIO(table.csv()))) for table in found}


def test_the_moments_agree_with_the_printed_ones(shown: dict[str, list[dict[str, str]]]) -> None:
    for row in shown["errors-moments"]:
        for name in ("E[X d]", "E[d²]"):
            printed, exact = float(row[f"{name}, printed"]), float(row[f"{name}, exact"])
            assert exact == pytest.approx(printed, rel=5e-4)


def test_the_ratios_are_the_printed_and_the_exact_ones(
    shown: dict[str, list[dict[str, str]]],
) -> None:
    for row in shown["errors-ratios"][1:]:
        bits = int(row["bits"])
        assert float(row["ratio, printed"]) == PRINTED_RATIOS[bits]
        assert float(row["ratio, exact"]) == pytest.approx(EXACT_RATIOS[bits], rel=2e-3)
        assert float(row["ratio, of the printed moments"]) == pytest.approx(
            EXACT_RATIOS[bits], rel=2e-3
        )
        difference = 100 * (PRINTED_RATIOS[bits] / EXACT_RATIOS[bits] - 1)
        assert float(row["ratio, printed against exact"].rstrip(" %")) == pytest.approx(
            difference, abs=0.12
        )


def test_the_relative_errors_are_the_printed_ones_and_products_of_the_exact_ratios(
    shown: dict[str, list[dict[str, str]]],
) -> None:
    product = 1.0
    for row, printed in zip(shown["errors-ratios"], PRINTED_ERRORS, strict=True):
        product /= EXACT_RATIOS.get(int(row["bits"]), 1.0)
        assert float(row["relative error, printed"]) == printed
        assert float(row["relative error, exact"]) == pytest.approx(product, rel=3e-3)


def test_the_printed_columns_agree_with_each_other() -> None:
    for bits, ratio in PRINTED_RATIOS.items():
        assert PRINTED_ERRORS[bits - 2] / PRINTED_ERRORS[bits - 1] == pytest.approx(
            ratio, rel=1.5e-3
        )


def test_the_lemma_without_its_mixed_term_gives_what_the_notes_say() -> None:
    short = [lemma(cross, square) - 2 * cross**2 for cross, square in MOMENTS[:3]]
    assert short[0] / short[1] == pytest.approx(82.67, abs=0.02)
    assert short[1] / short[2] == pytest.approx(6.40, abs=0.01)
