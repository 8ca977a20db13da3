from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from lampq import registry
from lampq.errors import ConfigError
from lampq.registry import Registry


@pytest.fixture
def colours() -> Registry[str]:
    table: Registry[str] = Registry("colour", "lampq.colours")
    table.add("red", lambda: "#f00")
    table.add("blue", lambda: "#00f")
    return table


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """Entry points as if other packages were installed; append to add one."""
    found: list[EntryPoint] = []
    monkeypatch.setattr(
        registry, "entry_points", lambda group: [e for e in found if e.group == group]
    )
    return found


def test_a_factory_is_found_by_its_name(colours: Registry[str]) -> None:
    assert colours.get("blue")() == "#00f"


def test_names_are_listed_in_alphabetical_order(colours: Registry[str]) -> None:
    assert list(colours) == ["blue", "red"]


def test_an_unknown_name_is_refused_with_the_known_ones(colours: Registry[str]) -> None:
    with pytest.raises(ConfigError, match="unknown colour 'bleu'; known: blue, red"):
        colours.get("bleu")


def test_a_name_is_registered_once(colours: Registry[str]) -> None:
    with pytest.raises(ConfigError, match="colour 'red' is registered twice"):
        colours.add("red", lambda: "#e00")


def test_an_entry_point_of_the_group_is_found(
    colours: Registry[str], installed: list[EntryPoint]
) -> None:
    installed.append(EntryPoint("upper", "string:capwords", "lampq.colours"))
    assert list(colours) == ["blue", "red", "upper"]
    assert colours.get("upper")("dark green") == "Dark Green"


def test_an_entry_point_of_another_group_is_not_seen(
    colours: Registry[str], installed: list[EntryPoint]
) -> None:
    installed.append(EntryPoint("upper", "string:capwords", "lampq.shapes"))
    assert "upper" not in list(colours)


def test_an_entry_point_that_cannot_be_imported_is_named(
    colours: Registry[str], installed: list[EntryPoint]
) -> None:
    installed.append(EntryPoint("broken", "no_such_package.colours:make", "lampq.colours"))
    with pytest.raises(ConfigError, match=r"'broken' from 'no_such_package\.colours:make'"):
        colours.get("broken")


def test_a_broken_entry_point_does_not_hide_the_others(
    colours: Registry[str], installed: list[EntryPoint]
) -> None:
    installed.append(EntryPoint("broken", "no_such_package.colours:make", "lampq.colours"))
    assert colours.get("red")() == "#f00"


def test_an_entry_point_without_its_attribute_is_named(
    colours: Registry[str], installed: list[EntryPoint]
) -> None:
    installed.append(EntryPoint("broken", "string:no_such_function", "lampq.colours"))
    with pytest.raises(ConfigError, match="'broken'"):
        colours.get("broken")
