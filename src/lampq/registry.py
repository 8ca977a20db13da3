"""Names of plug-ins and how to build them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from lampq.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """A table from name to factory; third parties add to it by entry point."""

    def __init__(self, kind: str, group: str) -> None:
        self.kind = kind
        self.group = group
        self._factories: dict[str, Callable[..., T]] = {}

    def add(self, name: str, factory: Callable[..., T]) -> None:
        """Register a factory under a new name."""
        if name in self._factories:
            raise ConfigError(f"{self.kind} {name!r} is registered twice")
        self._factories[name] = factory

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._factories, *(e.name for e in entry_points(group=self.group))}))

    def get(self, name: str) -> Callable[..., T]:
        """The factory of that name, or a ConfigError that lists the known names."""
        if name not in self._factories:
            for entry in entry_points(group=self.group):
                if entry.name == name:
                    try:
                        self._factories[name] = entry.load()
                    except (ImportError, AttributeError) as error:
                        raise ConfigError(
                            f"{self.kind} {name!r} from {entry.value!r} cannot be imported: {error}"
                        ) from error
        if name not in self._factories:
            raise ConfigError(f"unknown {self.kind} {name!r}; known: {', '.join(self)}")
        return self._factories[name]
