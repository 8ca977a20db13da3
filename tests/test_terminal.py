from __future__ import annotations

import io

from rich.console import Console

from lampq.terminal import LOG_EVERY, TerminalProgress


def logged(total: int | None, *, quiet: bool = False) -> list[str]:
    """Lines of ten pieces of work of 25 seconds each, where no terminal is."""
    text, seconds = io.StringIO(), [0.0]
    progress = TerminalProgress(Console(file=text), quiet=quiet, clock=lambda: seconds[0])
    for _ in progress.track(range(10), "fitting", total):
        seconds[0] += 25.0
    return text.getvalue().splitlines()


def test_a_log_gets_a_line_now_and_then_with_the_time_left() -> None:
    assert LOG_EVERY == 60
    assert logged(10) == [
        "fitting: 3 of 10, about 2:55 left",
        "fitting: 6 of 10, about 1:40 left",
        "fitting: 9 of 10, about 0:25 left",
    ]


def test_work_of_unknown_length_is_counted() -> None:
    assert logged(None)[0] == "fitting: 3 done in 1:15"


def test_quiet_is_quiet() -> None:
    assert logged(10, quiet=True) == []
