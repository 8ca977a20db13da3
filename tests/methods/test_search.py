from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lampq.methods.search import (
    EXHAUSTIVE,
    Grid,
    SearchDepth,
    progressive_search,
    quantiles,
    uniform_grid,
)
from lampq.quant.uniform import UniformQuantizer


def _rows(seed: int = 0) -> Tensor:
    """Six groups of values with tails of different weight."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(6, 200, generator=generator)
    return normal.sign() * normal.abs() ** torch.linspace(0.5, 3, 6)[:, None]


def _error_of(rows: Tensor, bits: int) -> Callable[[Tensor, Tensor], Tensor]:
    def error(scale: Tensor, zero: Tensor) -> Tensor:  # (candidates, groups)
        grid = UniformQuantizer(bits, scale[..., None], zero[..., None])
        return (grid(rows) - rows).square().sum(dim=-1)

    return error


def _search(
    rows: Tensor,
    bits: int,
    depth: SearchDepth | None = None,
    *,
    affine: bool = False,
    cheap: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    return progressive_search(
        _grid(rows, bits, affine=affine),
        _error_of(rows, bits),
        depth or SearchDepth(),
        elements=rows.numel(),
        cheap=cheap,
    )


def _grid(rows: Tensor, bits: int, *, affine: bool = False) -> Grid:
    return uniform_grid(rows, bits, candidates=128, max_zeros=2**bits, affine=affine)


def test_quantiles_by_hand() -> None:
    # of ten values one is below the lower and one above the upper quantile
    low, high = quantiles(torch.arange(10.0)[None].flip(1), 0.9)
    assert (low.tolist(), high.tolist()) == ([1.0], [8.0])


def test_the_outermost_quantiles_are_the_extremes() -> None:
    rows = _rows()
    low, high = quantiles(rows, 1.0)
    assert torch.equal(low, rows.amin(1))
    assert torch.equal(high, rows.amax(1))


@pytest.mark.parametrize("affine", [False, True], ids=["whole", "affine"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_the_full_range_is_among_the_candidates(bits: int, affine: bool) -> None:
    rows = _rows()
    whole = not (affine and bits == 1)
    full = UniformQuantizer.between(bits, rows.amin(1), rows.amax(1), whole=whole)
    grid = _grid(rows, bits, affine=affine)
    same = torch.isclose(grid.scale, full.scale) & torch.isclose(grid.zero, full.zero)
    assert bool(same.any(dim=0).all())


@pytest.mark.parametrize("bits", range(1, 9))
def test_no_candidate_is_wider_than_the_full_range(bits: int) -> None:
    rows = _rows()
    widest = (rows.amax(1) - rows.amin(1)) / (2**bits - 1)
    grid = _grid(rows, bits)
    assert bool((grid.scale <= widest * (1 + 1e-6)).all())
    assert bool((grid.scale > 0).all())


@pytest.mark.parametrize("bits", range(1, 9))
def test_zero_points_of_candidates_are_codes(bits: int) -> None:
    zeros = _grid(_rows(), bits).zero
    assert torch.equal(zeros, zeros.round())
    assert int(zeros.min()) >= 0
    assert int(zeros.max()) < 2**bits


@pytest.mark.parametrize(
    "depth", [SearchDepth(), EXHAUSTIVE, SearchDepth(steps=1)], ids=["default", "full", "one-step"]
)
@pytest.mark.parametrize("bits", range(1, 9))
def test_the_search_is_never_worse_than_the_best_candidate(bits: int, depth: SearchDepth) -> None:
    rows = _rows()
    grid, error = _grid(rows, bits), _error_of(rows, bits)
    best = error(grid.scale, grid.zero).amin(0)
    found = error(*_search(rows, bits, depth))
    assert bool((found <= best * (1 + 1e-6)).all())


@pytest.mark.parametrize("bits", [2, 4, 6])
def test_the_search_is_never_worse_than_the_best_screened_candidate(bits: int) -> None:
    rows = _rows()
    depth = SearchDepth(screen=10)
    grid, error = _grid(rows, bits), _error_of(rows, bits)

    def cheap(scale: Tensor, zero: Tensor) -> Tensor:
        return (scale - 0.6 * grid.scale.amax(0)).abs() * (zero + 1.1)

    screened = cheap(grid.scale, grid.zero).topk(10, dim=0, largest=False).indices
    best = error(grid.scale, grid.zero).gather(0, screened).amin(0)
    found = error(*_search(rows, bits, depth, cheap=cheap))
    assert bool((found <= best * (1 + 1e-6)).all())


def test_a_search_without_screening_does_not_ask_for_the_cheap_error() -> None:
    def cheap(scale: Tensor, zero: Tensor) -> Tensor:
        raise AssertionError

    rows = _rows()
    scale, zero = _search(rows, 3, SearchDepth(screen=0), cheap=cheap)
    assert (scale.tolist(), zero.tolist()) == tuple(
        found.tolist() for found in _search(rows, 3, SearchDepth(screen=0))
    )


@pytest.mark.parametrize("elements", [1, 10**4, 10**9], ids=["whole", "chunks", "single"])
def test_the_result_does_not_depend_on_how_many_candidates_are_scored_at_once(
    elements: int,
) -> None:
    rows = _rows()
    grid, error = _grid(rows, 4), _error_of(rows, 4)
    scale, zero = progressive_search(grid, error, SearchDepth(), elements=elements)
    expected = _search(rows, 4)
    assert torch.equal(scale, expected[0])
    assert torch.equal(zero, expected[1])


@pytest.mark.parametrize("bits", [1, 3, 6])
def test_finer_steps_never_lose_ground(bits: int) -> None:
    rows = _rows()
    error = _error_of(rows, bits)
    errors = [
        error(*_search(rows, bits, SearchDepth(screen=0, steps=steps))) for steps in (1, 2, 4)
    ]
    assert bool((errors[1] <= errors[0]).all())
    assert bool((errors[2] <= errors[1]).all())
    assert float(errors[2].sum()) < float(errors[0].sum())


@pytest.mark.parametrize("bits", [1, 4])
def test_groups_are_searched_independently(bits: int) -> None:
    rows = _rows()
    together = _search(rows, bits)
    for number, row in enumerate(rows):
        scale, zero = _search(row[None], bits)
        torch.testing.assert_close(scale[0], together[0][number])
        torch.testing.assert_close(zero[0], together[1][number])


def test_two_free_levels_are_nearer_than_zero_and_one_level() -> None:
    rows = 5 + torch.rand(3, 100, generator=torch.Generator().manual_seed(0))
    error = _error_of(rows, 1)
    free, tied = (error(*_search(rows, 1, affine=affine)) for affine in (True, False))
    assert bool((free < tied).all())


@pytest.mark.parametrize("bits", range(1, 9))
def test_a_group_of_equal_values_gives_a_usable_grid(bits: int) -> None:
    rows = torch.tensor([[0.3] * 8, [0.0] * 8, [-2.0] * 8])
    scale, zero = _search(rows, bits)
    assert bool((scale > 0).all())
    assert bool(torch.isfinite(scale).all())
    assert bool(torch.isfinite(zero).all())
