"""Exchanges of one bit between layers, and the expected error ratios that propose them.

LampQ, section "Iterative Bit Update" and Algorithm 1, lines 13-26.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from lampq.types import BitPlan, Budget, LayerBits, Step, narrower, separate, wider

Ratios = Literal["paper", "exact", "optimal", "measured"]
SCORE_TOLERANCE = 1e-9

# error at B - 1 bits over error at B bits, B = 2..8; the paper's table ends there, and 9 and 10 are
# the limit of its formula
PAPER_RATIOS = (82.74, 6.59, 4.70, 4.29, 4.13, 4.12, 4.03, 4.0, 4.0)
# mean squared error of the best uniform grid for a normal variable, 1..10 bits (Max, 1960, and own
# computation from 6 on)
OPTIMAL_ERRORS = (
    *(0.3634, 0.1188, 0.03744, 0.01154, 0.003495, 0.00104, 0.000304, 0.0000876),
    *(0.00002492, 0.000006997),
)


def gaussian_moments(bits: int, clip: float = 3.0) -> tuple[float, float]:
    """E[X d] and E[d**2] of a normal X and its error d on the grid between -clip and clip.

    Integrals run over the clipping range without renormalisation, as in the paper's table.
    """
    levels = np.linspace(-clip, clip, 2**bits)
    edges = np.concatenate([[-clip], (levels[1:] + levels[:-1]) / 2, [clip]])
    density = np.exp(-(edges**2) / 2) / math.sqrt(2 * math.pi)
    cumulative = np.array([0.5 * (1 + math.erf(x / math.sqrt(2))) for x in edges])
    mass = np.diff(cumulative)
    first = -np.diff(density)
    second = mass - np.diff(edges * density)
    cross = float(np.sum(levels * first - second))
    square = float(np.sum(levels**2 * mass - 2 * levels * first + second))
    return cross, square


def expected_error(bits: int, activation_bits: int | None = None) -> float:
    """Lemma 3 for normal weights and inputs of unit variance, up to a constant factor.

    The lemma is printed for one width; the same expectation is taken for two different ones.
    """
    cross, square = gaussian_moments(bits)
    other_cross, other_square = gaussian_moments(activation_bits or bits)
    return (
        square
        + other_square
        + square * other_square
        + 2 * cross * other_cross
        + 2 * (cross * other_square + other_cross * square)
    )


def expected_ratio(bits: int, table: Ratios) -> float:
    """Error at ``bits`` - 1 over error at ``bits``."""
    if table == "paper":
        return PAPER_RATIOS[bits - 2]
    if table == "exact":
        return expected_error(bits - 1) / expected_error(bits)
    return OPTIMAL_ERRORS[bits - 2] / OPTIMAL_ERRORS[bits - 1]


def step_ratio(narrow: LayerBits, wide: LayerBits, table: Ratios, *, apart: bool) -> float:
    """Error at the narrower choice over error at the wider one.

    ``apart``: weight and activation widths are chosen separately. The paper's tables are for one
    width; there, the error is the mean of what they give for the weight and for the activation,
    which is the first order of Lemma 3. "exact" takes the lemma itself. Otherwise the weight width
    stands for both.
    """
    if not apart:
        return math.prod(
            expected_ratio(b, table) for b in range(narrow.weight + 1, wide.weight + 1)
        )
    if table == "exact":
        return expected_error(narrow.weight, narrow.activation) / expected_error(
            wide.weight, wide.activation
        )

    def error(bits: int) -> float:
        return 1 / math.prod(expected_ratio(b, table) for b in range(2, bits + 1))

    return (error(narrow.weight) + error(narrow.activation)) / (
        error(wide.weight) + error(wide.activation)
    )


@dataclass(frozen=True, slots=True)
class Move:
    """Layers of one width taken to a neighbouring choice."""

    layers: tuple[str, ...]
    bits: LayerBits


@dataclass(frozen=True, slots=True)
class Exchange:
    """The layers to widen and those to narrow for them, with the expected net gain."""

    widened: tuple[str, ...]
    narrowed: tuple[str, ...]
    gain: float


@dataclass(frozen=True, slots=True)
class RefineOptions:
    """How exchanges are proposed and when the search ends.

    ``gain_formula``: "verbal" is the definition in words, "printed" the formulas as printed, which
    have gain and degradation interchanged. ``swap_budget``: "weighted" keeps the parameter-weighted
    mean within the budget, "unweighted" only the number of bits, as the paper argues; a budget of
    activation bits is kept by both.
    ``patience``: rejected exchanges before the search ends (0: the first ends it, as in the paper).
    """

    ratios: Ratios = "paper"
    gain_formula: Literal["verbal", "printed"] = "verbal"
    swap_budget: Literal["weighted", "unweighted"] = "weighted"
    patience: int = 0
    max_exchanges: int = 200


Errors = Callable[[BitPlan], Mapping[str, float]]
ErrorAt = Callable[[str, LayerBits], float]


def gains_and_harms(
    plan: BitPlan,
    choices: tuple[LayerBits, ...],
    errors: Mapping[str, float],
    error_at: ErrorAt,
    options: RefineOptions,
    units: tuple[tuple[str, ...], ...] | None = None,
) -> tuple[dict[Move, float], dict[Move, float]]:
    """Expected fall of error of every step up, and rise of every step down.

    ``units``: the layers that share a width, all layers named; by default each is on its own.
    """
    gains: dict[Move, float] = {}
    harms: dict[Move, float] = {}
    apart = separate(choices)
    for unit in units or tuple((name,) for name in plan):
        bits = plan[unit[0]]
        error = sum(errors[name] for name in unit)

        def measured(at: LayerBits, unit: tuple[str, ...] = unit) -> float:
            return sum(error_at(name, at) for name in unit)

        ups, downs = wider(bits, choices), narrower(bits, choices)
        if options.ratios == "measured":
            here = measured(bits)
            up = {to: max(0.0, here - measured(to)) for to in ups}
            down = {to: max(0.0, measured(to) - here) for to in downs}
        else:
            ratio = partial(step_ratio, table=options.ratios, apart=apart)
            up = {to: error * (1 - 1 / ratio(bits, to)) for to in ups}
            down = {to: error * (ratio(to, bits) - 1) for to in downs}
            if options.gain_formula == "printed":
                up, down = _interchanged(bits, up, down)
        gains.update({Move(unit, to): value for to, value in up.items()})
        harms.update({Move(unit, to): value for to, value in down.items()})
    return gains, harms


def _interchanged(
    bits: LayerBits, up: dict[LayerBits, float], down: dict[LayerBits, float]
) -> tuple[dict[LayerBits, float], dict[LayerBits, float]]:
    """Gain and harm interchanged where the same width can go both ways."""
    swapped = dict(up), dict(down)
    for above in up:
        for below in down:
            if _moved(bits, above) == _moved(below, bits):
                swapped[0][above], swapped[1][below] = down[below], up[above]
    return swapped


def _moved(narrow: LayerBits, wide: LayerBits) -> Literal["weight", "activation"]:
    """The width that a step is about; the weight where both change."""
    return "weight" if narrow.weight != wide.weight else "activation"


def _applied(plan: BitPlan, move: Move) -> BitPlan:
    for name in move.layers:
        plan = plan.with_bits(name, move.bits)
    return plan


def propose(
    plan: BitPlan,
    budget: Budget,
    gains: Mapping[Move, float],
    harms: Mapping[Move, float],
    options: RefineOptions,
) -> list[tuple[Exchange, BitPlan]]:
    """Exchanges by falling expected net gain, each with the plan it leads to.

    Weighted: the budget is kept by narrowing as many layers as the widened one needs, the least
    harm per freed bit first. Where widths are separate, weight bits pay for weight bits and
    activation bits for activation bits; so do bytes and bit operations where these are limited.
    """
    found = []
    before = budget.taken(plan)
    freed = {
        move: tuple(a - b for a, b in zip(before, budget.taken(_applied(plan, move)), strict=True))
        for move in harms
    }
    for move, gain in gains.items():
        raised = _applied(plan, move)
        others = {other: harm for other, harm in harms.items() if other.layers != move.layers}
        if options.swap_budget == "unweighted":
            kind = _moved(plan[move.layers[0]], move.bits)
            bundles: list[tuple[Move, ...]] = [
                (other,) for other in others if _moved(other.bits, plan[other.layers[0]]) == kind
            ]
        else:
            bundles = _bundles(budget.excess(raised), others, freed)
        for bundle in bundles:
            after = raised
            for other in bundle:
                after = _applied(after, other)
            if options.swap_budget == "unweighted" and any(budget.excess(after)[1:]):
                continue
            narrowed = tuple(name for other in bundle for name in other.layers)
            net = gain - sum(others[other] for other in bundle)
            found.append((Exchange(move.layers, narrowed, net), after))
    return sorted(found, key=lambda pair: -pair[0].gain)


def _bundles(
    excess: tuple[int, ...],
    harms: Mapping[Move, float],
    saved: Mapping[Move, tuple[int, ...]],
) -> list[tuple[Move, ...]]:
    """Every single move that pays for the excess, and the cheapest bundle of several.

    ``saved`` is what each move frees of every limit.
    """
    if not any(excess):
        return [()]
    # bundles are filled by the first of the limits exceeded
    first = next(i for i, over in enumerate(excess) if over)
    freed = {move: saved[move] for move in harms if saved[move][first] > 0}

    def pays(moves: list[Move]) -> bool:
        return all(
            sum(freed[move][i] for move in moves) >= needed for i, needed in enumerate(excess)
        )

    singles: list[tuple[Move, ...]] = [(move,) for move in freed if pays([move])]
    bundle: list[Move] = []
    for move in sorted(freed, key=lambda m: harms[m] / freed[m][first]):
        if (pays([move]) and bundle) or any(move.layers == other.layers for other in bundle):
            continue
        bundle.append(move)
        if pays(bundle):
            break
    if len(bundle) > 1 and pays(bundle):
        singles.append(tuple(bundle))
    return singles


def _label(before: LayerBits, after: LayerBits) -> Literal["weight", "activation", "both"]:
    if before.activation == after.activation:
        return "weight"
    return "activation" if before.weight == after.weight else "both"


def refine(
    plan: BitPlan,
    budget: Budget,
    *,
    choices: tuple[LayerBits, ...],
    errors: Errors,
    error_at: ErrorAt,
    score: Callable[[BitPlan], float],
    options: RefineOptions,
    units: tuple[tuple[str, ...], ...] | None = None,
) -> Iterator[Step]:
    """Attempted exchanges, in order; the last accepted one carries the best plan.

    Layers of one of the ``units`` keep one width and move together.
    Scores of accepted steps rise strictly. No plan is scored twice, so the search cannot cycle.
    """
    best = score(plan)
    tried = {plan.widths}
    rejected = 0
    attempts = 0
    while rejected <= options.patience:
        gains, harms = gains_and_harms(plan, choices, errors(plan), error_at, options, units)
        progressed = False
        for exchange, after in propose(plan, budget, gains, harms, options):
            if after.widths in tried:
                continue
            if attempts >= options.max_exchanges or rejected > options.patience:
                return
            tried.add(after.widths)
            attempts += 1
            reached = score(after)
            accepted = reached > best + SCORE_TOLERANCE
            name = exchange.widened[0]
            moved = _label(plan[name], after[name])
            yield Step(exchange.widened, exchange.narrowed, after, reached, accepted, moved)
            if accepted:
                plan, best, rejected, progressed = after, reached, 0, True
                break
            rejected += 1
            if rejected > options.patience:
                return
        if not progressed:
            return
