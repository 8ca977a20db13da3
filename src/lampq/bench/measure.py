"""Times of contenders that take turns, so that all of them meet the same load of the machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lampq.progress import Progress

Clock = Literal["wall", "cpu"]
CLOCKS: dict[Clock, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
WARM_UP = 3
# a turn is long enough to be timed: about so many seconds, but at least and at most so many runs
TURN, LEAST, MOST = 0.05, 2, 20


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times faster, over the rounds: the median, and the least and the most."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, slow: Sequence[float], fast: Sequence[float]) -> Ratio:
        """The ratio of two lists of times, round by round."""
        ratios = [a / b for a, b in zip(slow, fast, strict=True)]
        return cls(statistics.median(ratios), min(ratios), max(ratios))


def in_turns(
    contenders: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    clock: Clock = "wall",
    progress: Progress | None = None,
    label: str = "timing",
) -> dict[str, list[float]]:
    """Seconds of one run of each contender in every round: the shortest run of its turn.

    Every round starts with another contender.
    """
    now = CLOCKS[clock]
    runs = {}
    for name, run in contenders.items():
        runs[name] = max(LEAST, min(MOST, round(TURN / _shortest(run, WARM_UP, now))))
    names = list(contenders)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in (progress or Progress()).track(range(rounds), label, rounds):
        place = number % len(names)
        for name in (*names[place:], *names[:place]):
            times[name].append(_shortest(contenders[name], runs[name], now))
    return times


def _shortest(run: Callable[[], object], count: int, now: Callable[[], float]) -> float:
    """Seconds of the shortest of some runs."""
    taken = []
    for _ in range(count):
        start = now()
        run()
        taken.append(now() - start)
    return max(min(taken), 1e-9)
