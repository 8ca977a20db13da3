from __future__ import annotations

import json
from pathlib import Path

import pytest

from lampq.errors import FormatError
from lampq.progress import Journal, Progress


@pytest.fixture
def clock() -> list[float]:
    """The time that the progress reads, in one element."""
    return [100.0]


def test_the_seconds_of_a_stage_are_counted(clock: list[float]) -> None:
    progress = Progress(lambda: clock[0])
    clock[0] += 5
    with progress.stage("fit"):
        clock[0] += 2
    clock[0] += 9
    assert progress.seconds == {"fit": 2.0}


def test_a_stage_that_comes_again_adds_up(clock: list[float]) -> None:
    progress = Progress(lambda: clock[0])
    for seconds in (1, 2, 4):
        with progress.stage("fit"):
            clock[0] += seconds
    assert progress.seconds == {"fit": 7.0}


def test_a_stage_inside_another_counts_for_itself_only(clock: list[float]) -> None:
    progress = Progress(lambda: clock[0])
    with progress.stage("metric"):
        clock[0] += 1
        with progress.stage("fit"):
            clock[0] += 10
        clock[0] += 2
    assert progress.seconds == {"metric": 3.0, "fit": 10.0}


def test_a_stage_that_fails_is_counted_and_left(clock: list[float]) -> None:
    progress = Progress(lambda: clock[0])

    def work() -> None:
        with progress.stage("fit"):
            clock[0] += 3
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        work()
    clock[0] += 50
    with progress.stage("metric"):
        clock[0] += 1
    assert progress.seconds == {"fit": 3.0, "metric": 1.0}


def test_track_gives_the_items_as_they_are_asked_for() -> None:
    made = []

    def items() -> object:
        for i in range(3):
            made.append(i)
            yield i

    tracked = Progress().track(items(), "numbers", 3)  # type: ignore[arg-type]
    assert next(tracked) == 0
    assert made == [0]
    assert list(tracked) == [1, 2]


VALUES = [1.0, 0.1 + 0.2, -1e-300, 5, "text", None, [1, [2.5]], {"a": [1e22], "b": {"c": 3}}]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_a_journal_gives_back_exactly_what_was_written(tmp_path: Path, value: object) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path).once("key", lambda: value)
    assert Journal(path).once("key", pytest.fail) == value


def test_a_key_is_computed_once() -> None:
    calls = []
    journal = Journal()
    for _ in range(3):
        assert journal.once("key", lambda: calls.append(1) or len(calls)) == 1
    assert len(calls) == 1


def test_keys_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.once("a", lambda: 1)
    journal.once("b", lambda: 2)
    again = Journal(path)
    assert again.once("b", pytest.fail) == 2
    assert again.once("a", pytest.fail) == 1
    assert again.once("c", lambda: 3) == 3


def test_a_piece_that_fails_is_not_written_down(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"

    def fail() -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Journal(path).once("key", fail)
    assert Journal(path).once("key", lambda: 7) == 7


@pytest.mark.parametrize("cut", range(1, 26))
def test_a_last_line_cut_short_is_computed_again(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.once("first", lambda: 1)
    complete = len(path.read_bytes())
    journal.once("second", lambda: [1.5, 2])
    content = path.read_bytes()
    assert len(content) > complete + cut
    path.write_bytes(content[: complete + cut])
    again = Journal(path)
    assert again.once("first", pytest.fail) == 1
    assert again.once("second", lambda: "again") == "again"
    assert again.once("third", lambda: 3) == 3
    last = Journal(path)
    assert [last.once(key, pytest.fail) for key in ("first", "second", "third")] == [1, "again", 3]


def test_a_last_line_without_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path).once("key", lambda: 1)
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    again = Journal(path)
    assert again.once("key", pytest.fail) == 1
    again.once("other", lambda: 2)
    assert Journal(path).once("other", pytest.fail) == 2


def test_damage_in_the_middle_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    lines = [json.dumps({"key": str(i), "value": i}) for i in range(5)]
    lines[1] = lines[1][:-4]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(FormatError, match=r"journal\.jsonl' line 2 is damaged"):
        Journal(path)


def test_a_journal_without_a_file_writes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Journal().once("key", lambda: 1)
    assert list(tmp_path.iterdir()) == []
