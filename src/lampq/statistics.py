"""What every site sees: made when it is first asked for, and kept for runs that share it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from lampq.calibrate import LayerStats, MatmulStats, Stats
from lampq.reconstruct import StateStore
from lampq.types import ModelGraph, SumSpec


class Deferred(Mapping[str, Stats]):
    """Statistics that are made when they are first looked at."""

    def __init__(self, make: Callable[[], Mapping[str, Stats]]) -> None:
        self._make = make
        self._made: Mapping[str, Stats] | None = None

    def _all(self) -> Mapping[str, Stats]:
        if self._made is None:
            self._made = self._make()
        return self._made

    def __getitem__(self, name: str) -> Stats:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


def through(
    store: StateStore,
    graph: ModelGraph,
    sums: tuple[SumSpec, ...],
    make: Callable[[], Mapping[str, Stats]],
) -> Mapping[str, Stats]:
    """The statistics of all sites in the store; where one is missing they are made and stored.

    Those with views of blocks are not stored: a view holds a module of the model.
    """
    layers = [*(layer.name for layer in graph.layers), *(site.name for site in sums)]
    found = {name: store.load(_key(name)) for name in layers}
    products = {site.name: store.load(_key(site.name)) for site in graph.matmuls}
    if all(found.values()) and all(products.values()):
        return {
            **{name: _layer(tensors) for name, tensors in found.items() if tensors},
            **{name: _matmul(tensors) for name, tensors in products.items() if tensors},
        }
    made = make()
    if all(stats.block is None for stats in made.values()):
        for name, stats in made.items():
            store.save(_key(name), _tensors(stats))
    return made


def _key(name: str) -> str:
    return f"statistics {name}"


def _tensors(stats: Stats) -> dict[str, Tensor]:
    if isinstance(stats, LayerStats):
        tensors = {"inputs": stats.inputs}
        if stats.first is not None:
            tensors["first"] = stats.first
    else:
        tensors = {"left": stats.left, "right": stats.right}
    return tensors if stats.gradients is None else {**tensors, "gradients": stats.gradients}


def _layer(tensors: Mapping[str, Tensor]) -> LayerStats:
    return LayerStats(tensors["inputs"], tensors.get("gradients"), first=tensors.get("first"))


def _matmul(tensors: Mapping[str, Tensor]) -> MatmulStats:
    return MatmulStats(tensors["left"], tensors["right"], tensors.get("gradients"))
