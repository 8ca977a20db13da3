"""The values that flow between the stages: layers, plans, budgets, costs, allocations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lampq.errors import BudgetError, ConfigError, GraphError

MIN_BITS = 1
MAX_BITS = 8


class LayerRole(StrEnum):
    """What a linear layer does; sensitivities are comparable within one role only."""

    QKV = "qkv"
    PROJ = "proj"
    FC1 = "fc1"
    FC2 = "fc2"
    PATCH_EMBED = "patch_embed"
    REDUCTION = "reduction"
    HEAD = "head"


SEARCHED_ROLES = (LayerRole.QKV, LayerRole.PROJ, LayerRole.FC1, LayerRole.FC2)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One linear layer of the float model, by name. Holds no tensor."""

    name: str
    role: LayerRole
    block: int
    n_params: int
    norm: str | None = None


@dataclass(frozen=True, slots=True)
class MatmulSpec:
    """One matmul of an attention: q @ k (kind "qk") or softmax @ v (kind "av")."""

    name: str
    kind: Literal["qk", "av"]
    block: int


@dataclass(frozen=True, slots=True)
class ModelGraph:
    """The quantizable sites of one model, in execution order."""

    layers: tuple[LayerSpec, ...]
    matmuls: tuple[MatmulSpec, ...]
    blocks: tuple[str, ...]

    def __post_init__(self) -> None:
        names = [layer.name for layer in self.layers] + [site.name for site in self.matmuls]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise GraphError(f"the patterns match {sorted(twice)[0]!r} more than once")

    @property
    def allocatable(self) -> tuple[LayerSpec, ...]:
        """The layers whose width is searched."""
        return tuple(layer for layer in self.layers if layer.role in SEARCHED_ROLES)

    @property
    def fixed(self) -> tuple[LayerSpec, ...]:
        """The layers quantized at a width that is not searched."""
        return tuple(layer for layer in self.layers if layer.role not in SEARCHED_ROLES)

    def layer(self, name: str) -> LayerSpec:
        """The layer of that name."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise GraphError(f"no layer named {name!r} in the model")


@dataclass(frozen=True, slots=True, order=True)
class LayerBits:
    """The widths of one layer's weight and of its input."""

    weight: int
    activation: int

    def __post_init__(self) -> None:
        for kind, bits in (("weight", self.weight), ("activation", self.activation)):
            if not MIN_BITS <= bits <= MAX_BITS:
                raise ConfigError(f"{kind} bits must be in {MIN_BITS}..{MAX_BITS}, got {bits}")

    def __str__(self) -> str:
        return f"{self.weight}/{self.activation}"


@dataclass(frozen=True, slots=True)
class BitPlan(Mapping[str, LayerBits]):
    """The widths of every searched layer, keyed by name, in graph order."""

    layers: tuple[LayerSpec, ...]
    widths: tuple[LayerBits, ...]

    def __post_init__(self) -> None:
        if len(self.layers) != len(self.widths) or not self.layers:
            raise ConfigError(
                f"a plan needs one width per layer, got {len(self.widths)} for {len(self.layers)}"
            )

    def __getitem__(self, name: str) -> LayerBits:
        for layer, bits in zip(self.layers, self.widths, strict=True):
            if layer.name == name:
                return bits
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (layer.name for layer in self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def total_weight_bits(self) -> int:
        """Bits of all weight codes of the searched layers."""
        return sum(
            layer.n_params * bits.weight
            for layer, bits in zip(self.layers, self.widths, strict=True)
        )

    @property
    def mean_weight_bits(self) -> float:
        """Mean width over parameters, not over layers."""
        return self.total_weight_bits / sum(layer.n_params for layer in self.layers)

    @property
    def mean_activation_bits(self) -> float:
        """Mean width of the layers' inputs, over layers."""
        return sum(bits.activation for bits in self.widths) / len(self.widths)

    def with_bits(self, name: str, bits: LayerBits) -> BitPlan:
        """The same plan with another width for one layer."""
        if name not in self:
            raise GraphError(f"no layer named {name!r} in the plan")
        widths = tuple(
            bits if layer.name == name else old
            for layer, old in zip(self.layers, self.widths, strict=True)
        )
        return replace(self, widths=widths)

    @classmethod
    def uniform(cls, layers: tuple[LayerSpec, ...], bits: LayerBits) -> BitPlan:
        """One width for all layers."""
        return cls(layers, (bits,) * len(layers))


@dataclass(frozen=True, slots=True)
class Budget:
    """An upper limit on the mean weight width of the searched layers, over parameters."""

    mean_bits: float

    def __post_init__(self) -> None:
        if not 0 < self.mean_bits < float("inf"):
            raise BudgetError(f"the mean width must be a positive number, got {self.mean_bits}")

    def limit(self, layers: tuple[LayerSpec, ...]) -> int:
        """The largest number of weight bits that the layers may take together."""
        # a relative 1e-9 forgives the rounding of a mean such as 3.1, never a whole weight
        return int(self.mean_bits * sum(layer.n_params for layer in layers) * (1 + 1e-9))

    def allows(self, plan: BitPlan) -> bool:
        """Whether the plan is within the limit."""
        return plan.total_weight_bits <= self.limit(plan.layers)

    def checked(self, plan: BitPlan) -> BitPlan:
        """The plan itself, or a BudgetError if it is over the limit."""
        if not self.allows(plan):
            raise BudgetError(
                f"the plan averages {plan.mean_weight_bits:.4f} bits, "
                f"the budget allows {self.mean_bits:.4f}"
            )
        return plan


@dataclass(frozen=True, slots=True)
class CostTable:
    """What each width of each layer is expected to cost; lower is better."""

    layers: tuple[LayerSpec, ...]
    choices: tuple[LayerBits, ...]
    cost: NDArray[np.float64]

    def __post_init__(self) -> None:
        if self.cost.shape != (len(self.layers), len(self.choices)):
            raise ConfigError(
                f"a cost table of {len(self.layers)} layers and {len(self.choices)} choices "
                f"cannot have shape {self.cost.shape}"
            )
        if not np.isfinite(self.cost).all():
            row = int(np.argwhere(~np.isfinite(self.cost))[0][0])
            raise ConfigError(f"the cost of {self.layers[row].name!r} is not finite")
        if list(self.choices) != sorted(set(self.choices)):
            raise ConfigError("the choices of a cost table must ascend")


@dataclass(frozen=True, slots=True)
class Allocation:
    """A plan within its budget, with what the solver said of it."""

    plan: BitPlan
    objective: float
    status: str
    proven_optimal: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One attempted exchange of bits between layers."""

    widened: tuple[str, ...]
    narrowed: tuple[str, ...]
    plan: BitPlan
    score: float
    accepted: bool
