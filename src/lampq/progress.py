"""Progress of long work, and a journal of finished pieces that lets it be resumed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

from lampq.errors import FormatError

T = TypeVar("T")


class Progress:
    """Silent progress that measures the seconds of each stage; the terminal's one derives from it.

    A stage inside another counts for itself only: the outer one does not include it. ``timer``:
    the clock of the stages.
    """

    def __init__(self, timer: Callable[[], float] = perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._running: list[str] = []
        self._timer = timer
        self._since = timer()

    def _account(self) -> None:
        now = self._timer()
        if self._running:
            name = self._running[-1]
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time until the context ends for this stage."""
        self._account()
        self._running.append(name)
        try:
            yield
        finally:
            self._account()
            self._running.pop()

    def track(self, items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
        """The items, one by one, as they are asked for."""
        del label, total
        yield from items

    def note(self, message: str) -> None:
        """Something worth telling a person who waits."""


def read_lines(path: Path, *, repair: bool = True) -> list[Any]:
    """The objects of a file with one JSON object a line.

    A last line cut short is taken off the file, or with ``repair=False`` only left out: another
    process may be writing it.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    entries, kept = [], []
    for number, line in enumerate(lines):
        try:
            entry = json.loads(line) if line else None
        except json.JSONDecodeError as error:
            if number >= len(lines) - 2:
                break
            raise FormatError(f"{str(path)!r} line {number + 1} is damaged") from error
        if entry is not None:
            entries.append(entry)
            kept.append(line)
    if repair:
        path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    return entries


def append_line(path: Path, entry: Any) -> None:
    """Add one JSON object to such a file."""
    with path.open("a", encoding="utf-8") as handle:
        handle.write(json.dumps(entry) + "\n")


class Journal:
    """Results of finished pieces of work by key, appended to a file as they come.

    The same run, started again with the same journal, finds them and does not compute them again.
    A last line cut short by an interruption is dropped.

    ``others`` are files that other processes write; they are read once. ``of_model`` is the journal
    of what is measured on the float model alone, without any fit: more runs agree on that.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        others: Iterable[Path] = (),
        of_model: Journal | None = None,
    ) -> None:
        self.path = path
        self._of_model = of_model
        self._known: dict[str, Any] = {}
        for other in others:
            self._read(read_lines(other, repair=False))
        if path is not None:
            self._read(read_lines(path))

    def _read(self, entries: list[Any]) -> None:
        self._known.update({entry["key"]: entry["value"] for entry in entries})

    @property
    def of_model(self) -> Journal:
        """Where measurements of the float model alone go."""
        return self if self._of_model is None else self._of_model

    def once(self, key: str, compute: Callable[[], T]) -> T:
        """The value of that key: remembered, or computed and written down (as JSON)."""
        if key not in self._known:
            value = compute()
            self._known[key] = value
            if self.path is not None:
                append_line(self.path, {"key": key, "value": value})
        known: T = self._known[key]
        return known
