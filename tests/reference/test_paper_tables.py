"""Numbers of the LampQ paper and of calculations made apart from the code."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import minimize_scalar

from lampq.refine import expected_error, expected_ratio, gaussian_moments

# the paper's table of moments of a normal variable X and its error d: E[X d], E[d**2]
PRINTED_MOMENTS = {
    1: (1.396, 5.212),
    2: (1.655e-2, 0.3359),
    3: (7.123e-4, 6.109e-2),
    4: (1.723e-4, 1.330e-2),
    5: (4.123e-5, 3.113e-3),
    6: (1.003e-5, 7.538e-4),
    7: (2.472e-6, 1.855e-4),
    8: (6.134e-7, 4.601e-5),
}
# Lemma 3 on the printed moments, by hand: 2 s + s**2 + 2 c**2 + 4 c s
HAND_ERRORS = {
    1: 70.59,
    2: 0.8074,
    3: 0.12609,
    4: 0.026786,
    5: 0.0062362,
    6: 0.0015082,
    7: 3.7104e-4,
    8: 9.202e-5,
}
EXACT_RATIOS = {2: 87.45, 3: 6.404, 4: 4.708, 5: 4.294, 6: 4.135, 7: 4.065, 8: 4.032}
# the paper's own column, which does not follow from its moments
PRINTED_RATIOS = {2: 82.74, 3: 6.59, 4: 4.70, 5: 4.29, 6: 4.13, 7: 4.12, 8: 4.03}


def _density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _numeric_moments(bits: int) -> tuple[float, float]:
    """The moments on the grid from -3 to 3 by quadrature over each cell."""
    step = 6 / (2**bits - 1)
    cross = square = 0.0
    for code in range(2**bits):
        level = -3 + code * step
        cell = max(-3.0, level - step / 2), min(3.0, level + step / 2)
        cross += quad(lambda x, level=level: x * (level - x) * _density(x), *cell)[0]
        square += quad(lambda x, level=level: (level - x) ** 2 * _density(x), *cell)[0]
    return cross, square


def _error_of_grid(step: float, bits: int) -> float:
    """Mean squared error of a normal variable on the symmetric grid of that step."""
    levels = (np.arange(2**bits) - (2**bits - 1) / 2) * step
    edges = [-12.0, *((levels[1:] + levels[:-1]) / 2), 12.0]
    cells = zip(levels, edges[:-1], edges[1:], strict=True)
    # Gauss-Legendre points are enough for cells this smooth; the two tails take more of them
    points, weights = np.polynomial.legendre.leggauss(60)
    total = 0.0
    for level, low, high in cells:
        x = (high - low) / 2 * points + (high + low) / 2
        values = (x - level) ** 2 * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
        total += float(weights @ values) * (high - low) / 2
    return total


def _best_error(bits: int) -> float:
    found = minimize_scalar(
        _error_of_grid, bounds=(0.5 / 2**bits, 16 / 2**bits), args=(bits,), method="bounded"
    )
    return float(found.fun)


@pytest.mark.parametrize("bits", PRINTED_MOMENTS)
def test_the_moments_are_those_the_paper_prints(bits: int) -> None:
    cross, square = gaussian_moments(bits)
    printed_cross, printed_square = PRINTED_MOMENTS[bits]
    assert cross == pytest.approx(printed_cross, rel=5e-4)
    assert square == pytest.approx(printed_square, rel=5e-4)


@pytest.mark.parametrize("bits", range(1, 7))
def test_the_moments_are_those_of_numerical_integration(bits: int) -> None:
    assert gaussian_moments(bits) == pytest.approx(_numeric_moments(bits), rel=1e-7, abs=1e-12)


@pytest.mark.parametrize("bits", HAND_ERRORS)
def test_the_expected_error_is_that_of_the_lemma_on_the_printed_moments(bits: int) -> None:
    assert expected_error(bits) == pytest.approx(HAND_ERRORS[bits], rel=6e-4)


@pytest.mark.parametrize("bits", EXACT_RATIOS)
def test_exact_ratios_follow_from_the_moments(bits: int) -> None:
    assert expected_ratio(bits, "exact") == pytest.approx(EXACT_RATIOS[bits], rel=5e-4)


@pytest.mark.parametrize("bits", PRINTED_RATIOS)
def test_the_paper_ratios_are_the_printed_ones(bits: int) -> None:
    assert expected_ratio(bits, "paper") == PRINTED_RATIOS[bits]


@pytest.mark.parametrize("bits", range(2, 11))
def test_optimal_ratios_are_those_of_the_best_uniform_grid(bits: int) -> None:
    recomputed = _best_error(bits - 1) / _best_error(bits)
    assert expected_ratio(bits, "optimal") == pytest.approx(recomputed, rel=1e-2)


def test_the_best_one_bit_grid_has_the_error_known_in_closed_form() -> None:
    # levels at plus and minus sqrt(2 / pi): the error is 1 - 2 / pi
    assert _best_error(1) == pytest.approx(1 - 2 / math.pi, rel=1e-6)
