"""Exchanges of one bit between layers, and the expected error ratios that propose them.

LampQ, section "Iterative Bit Update" and Algorithm 1, lines 13-26.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lampq.types import BitPlan, Budget, LayerBits, Step

Ratios = Literal["paper", "exact", "optimal", "measured"]
SCORE_TOLERANCE = 1e-9

# error at B - 1 bits over error at B bits, B = 2..8
PAPER_RATIOS = (82.74, 6.59, 4.70, 4.29, 4.13, 4.12, 4.03)
# mean squared error of the best uniform grid for a normal variable, 1..8 bits (Max, 1960, and
# own computation for 6..8)
OPTIMAL_ERRORS = (0.3634, 0.1188, 0.03744, 0.01154, 0.003495, 0.00104, 0.000304, 0.0000876)


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


def expected_error(bits: int) -> float:
    """Lemma 3 for normal weights and inputs of unit variance, up to a constant factor."""
    cross, square = gaussian_moments(bits)
    return 2 * square + square**2 + 2 * cross**2 + 4 * cross * square


def expected_ratio(bits: int, table: Ratios) -> float:
    """Error at ``bits`` - 1 over error at ``bits``."""
    if table == "paper":
        return PAPER_RATIOS[bits - 2]
    if table == "exact":
        return expected_error(bits - 1) / expected_error(bits)
    return OPTIMAL_ERRORS[bits - 2] / OPTIMAL_ERRORS[bits - 1]


@dataclass(frozen=True, slots=True)
class Exchange:
    """One layer to widen and those to narrow for it, with the expected net gain."""

    widened: str
    narrowed: tuple[str, ...]
    gain: float


@dataclass(frozen=True, slots=True)
class RefineOptions:
    """How exchanges are proposed and when the search ends.

    ``gain_formula``: "verbal" is the definition in words, "printed" the formulas as printed, which
    have gain and degradation interchanged. ``swap_budget``: "weighted" keeps the parameter-weighted
    mean within the budget, "unweighted" only the number of bits, as the paper argues.
    ``patience``: rejected exchanges before the search ends (0: the first ends it, as in the paper).
    """

    ratios: Ratios = "paper"
    gain_formula: Literal["verbal", "printed"] = "verbal"
    swap_budget: Literal["weighted", "unweighted"] = "weighted"
    patience: int = 0
    max_exchanges: int = 200


Errors = Callable[[BitPlan], Mapping[str, float]]
ErrorAt = Callable[[str, LayerBits], float]


def neighbours(
    bits: LayerBits, choices: tuple[LayerBits, ...]
) -> tuple[LayerBits | None, LayerBits | None]:
    """The next narrower and the next wider choice, where there is one."""
    place = choices.index(bits)
    narrower = choices[place - 1] if place > 0 else None
    wider = choices[place + 1] if place + 1 < len(choices) else None
    return narrower, wider


def gains_and_harms(
    plan: BitPlan,
    choices: tuple[LayerBits, ...],
    errors: Mapping[str, float],
    error_at: ErrorAt,
    options: RefineOptions,
) -> tuple[dict[str, float], dict[str, float]]:
    """Expected fall of error of one step up, and rise of one step down, where possible."""
    gains: dict[str, float] = {}
    harms: dict[str, float] = {}
    for name, bits in plan.items():
        narrower, wider = neighbours(bits, choices)
        error = errors[name]
        if options.ratios == "measured":
            here = error_at(name, bits)
            up = max(0.0, here - error_at(name, wider)) if wider else None
            down = max(0.0, error_at(name, narrower) - here) if narrower else None
        else:
            up = _scaled_fall(error, bits.weight, wider.weight, options.ratios) if wider else None
            down = (
                _scaled_rise(error, narrower.weight, bits.weight, options.ratios)
                if narrower
                else None
            )
            if options.gain_formula == "printed" and up is not None and down is not None:
                up, down = down, up
        if up is not None:
            gains[name] = up
        if down is not None:
            harms[name] = down
    return gains, harms


def _scaled_fall(error: float, bits: int, wider: int, table: Ratios) -> float:
    factor = math.prod(expected_ratio(b, table) for b in range(bits + 1, wider + 1))
    return error * (1 - 1 / factor)


def _scaled_rise(error: float, narrower: int, bits: int, table: Ratios) -> float:
    factor = math.prod(expected_ratio(b, table) for b in range(narrower + 1, bits + 1))
    return error * (factor - 1)


def propose(
    plan: BitPlan,
    budget: Budget,
    gains: Mapping[str, float],
    harms: Mapping[str, float],
    choices: tuple[LayerBits, ...],
    options: RefineOptions,
) -> list[tuple[Exchange, BitPlan]]:
    """Exchanges by falling expected net gain, each with the plan it leads to.

    Weighted: the budget is kept by narrowing as many layers as the widened one needs, the least
    harm per freed bit first.
    """
    found = []
    for widened, gain in gains.items():
        wider = neighbours(plan[widened], choices)[1]
        assert wider is not None, "only layers with a wider choice have a gain"
        raised = plan.with_bits(widened, wider)
        if options.swap_budget == "unweighted":
            bundles: list[tuple[str, ...]] = [(name,) for name in harms if name != widened]
        else:
            bundles = _bundles(raised, widened, budget, harms, choices)
        for bundle in bundles:
            after = raised
            for name in bundle:
                narrower = neighbours(plan[name], choices)[0]
                assert narrower is not None, "only layers with a narrower choice have a harm"
                after = after.with_bits(name, narrower)
            net = gain - sum(harms[name] for name in bundle)
            found.append((Exchange(widened, bundle, net), after))
    return sorted(found, key=lambda pair: -pair[0].gain)


def _bundles(
    raised: BitPlan,
    widened: str,
    budget: Budget,
    harms: Mapping[str, float],
    choices: tuple[LayerBits, ...],
) -> list[tuple[str, ...]]:
    """Every single layer that pays for the widening, and the cheapest bundle of several."""
    if budget.allows(raised):
        return [()]
    excess = raised.total_weight_bits - budget.limit(raised.layers)
    freed = {}
    for layer in raised.layers:
        narrower = neighbours(raised[layer.name], choices)[0]
        if layer.name in harms and layer.name != widened and narrower is not None:
            saved = raised[layer.name].weight - narrower.weight
            freed[layer.name] = layer.n_params * saved
    singles: list[tuple[str, ...]] = [(name,) for name, bits in freed.items() if bits >= excess]
    bundle: list[str] = []
    for name in sorted(freed, key=lambda n: harms[n] / freed[n]):
        if freed[name] >= excess and bundle:
            continue
        bundle.append(name)
        if sum(freed[n] for n in bundle) >= excess:
            break
    if len(bundle) > 1 and sum(freed[n] for n in bundle) >= excess:
        singles.append(tuple(bundle))
    return singles


def refine(
    plan: BitPlan,
    budget: Budget,
    *,
    choices: tuple[LayerBits, ...],
    errors: Errors,
    error_at: ErrorAt,
    score: Callable[[BitPlan], float],
    options: RefineOptions,
) -> Iterator[Step]:
    """Attempted exchanges, in order; the last accepted one carries the best plan.

    Scores of accepted steps rise strictly. No plan is scored twice, so the search cannot cycle.
    """
    best = score(plan)
    tried = {plan.widths}
    rejected = 0
    attempts = 0
    while rejected <= options.patience:
        gains, harms = gains_and_harms(plan, choices, errors(plan), error_at, options)
        progressed = False
        for exchange, after in propose(plan, budget, gains, harms, choices, options):
            if after.widths in tried:
                continue
            if attempts >= options.max_exchanges or rejected > options.patience:
                return
            tried.add(after.widths)
            attempts += 1
            reached = score(after)
            accepted = reached > best + SCORE_TOLERANCE
            yield Step((exchange.widened,), exchange.narrowed, after, reached, accepted)
            if accepted:
                plan, best, rejected, progressed = after, reached, 0, True
                break
            rejected += 1
            if rejected > options.patience:
                return
        if not progressed:
            return
