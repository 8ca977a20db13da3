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
MAX_BITS = 10
# what integer kernels have: a wider layer is computed in float
INTEGER_BITS = 8
# what a model is quantized for: all values as the method likes them, or integer kernels only
Profile = Literal["accuracy", "speed"]


class LayerRole(StrEnum):
    """What a linear layer does; sensitivities are comparable within one role only."""

    QKV = "qkv"
    PROJ = "proj"
    FC1 = "fc1"
    FC2 = "fc2"
    PATCH_EMBED = "patch_embed"
    REDUCTION = "reduction"
    HEAD = "head"
    NECK = "neck"
    RPN = "rpn"
    ROI_HEAD = "roi_head"


SEARCHED_ROLES = (LayerRole.QKV, LayerRole.PROJ, LayerRole.FC1, LayerRole.FC2)
# what a detector has behind its backbone
DETECTOR_ROLES = (LayerRole.NECK, LayerRole.RPN, LayerRole.ROI_HEAD)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One linear layer of the float model, by name. Holds no tensor.

    Attributes:
        name: As in ``model.named_modules()``.
        role: What the layer does.
        block: The number of its block, -1 outside the blocks.
        n_params: Number of weights, its share of the budget.
        norm: The norm that feeds this layer and nothing else, or None.
        prefix: How many of its first tokens are no patches: class and register tokens.
    """

    name: str
    role: LayerRole
    block: int
    n_params: int
    norm: str | None = None
    prefix: int = 0


@dataclass(frozen=True, slots=True)
class MatmulSpec:
    """One matmul of an attention: q @ k (kind "qk") or softmax @ v (kind "av").

    ``prefix`` is how many of its first tokens are no patches.
    """

    name: str
    kind: Literal["qk", "av"]
    block: int
    prefix: int = 0


@dataclass(frozen=True, slots=True)
class SumSpec:
    """One residual sum: what the layer of that role gives, added to what its branch started from.

    Only methods that say so quantize sums.
    """

    name: str
    role: LayerRole
    block: int


@dataclass(frozen=True, slots=True)
class ModelGraph:
    """The quantizable sites of one model, in execution order.

    Attributes:
        layers: Linear layers and patch embeddings.
        matmuls: Products of the attentions.
        blocks: Names of the blocks, in their order.
        sums: Residual sums.
    """

    layers: tuple[LayerSpec, ...]
    matmuls: tuple[MatmulSpec, ...]
    blocks: tuple[str, ...]
    sums: tuple[SumSpec, ...] = ()

    def __post_init__(self) -> None:
        names = [layer.name for layer in self.layers] + [site.name for site in self.matmuls]
        names += [site.name for site in self.sums]
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

    def within(self, other: LayerBits) -> bool:
        """Whether neither width is larger than the other's."""
        return self.weight <= other.weight and self.activation <= other.activation


def wider(bits: LayerBits, choices: tuple[LayerBits, ...]) -> tuple[LayerBits, ...]:
    """The next wider choices: those with no other choice between.

    Where every weight width has one activation width, there is at most one. Where the two are
    separate, there may be two: one wider in the weight, one in the activation.
    """
    above = [c for c in choices if c != bits and bits.within(c)]
    return tuple(c for c in above if not any(d != c and d.within(c) for d in above))


def narrower(bits: LayerBits, choices: tuple[LayerBits, ...]) -> tuple[LayerBits, ...]:
    """The next narrower choices: those with no other choice between."""
    below = [c for c in choices if c != bits and c.within(bits)]
    return tuple(c for c in below if not any(d != c and c.within(d) for d in below))


def separate(choices: tuple[LayerBits, ...]) -> bool:
    """Whether one weight width comes with several activation widths."""
    return len({bits.weight for bits in choices}) < len(choices)


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
    def total_activation_bits(self) -> int:
        """Sum of the widths of the layers' inputs, each layer counted once."""
        return sum(bits.activation for bits in self.widths)

    @property
    def mean_activation_bits(self) -> float:
        """Mean width of the layers' inputs, over layers."""
        return self.total_activation_bits / len(self.widths)

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
class Limit:
    """An upper limit on a sum over the searched layers, such as bytes of the file.

    ``amounts`` has a whole number for each layer at each of its choices; ``fixed`` is what all
    else takes.
    """

    name: str
    most: int
    amounts: Mapping[tuple[str, LayerBits], int]
    fixed: int = 0

    def of(self, plan: BitPlan) -> int:
        """What the plan takes, with all else."""
        return self.fixed + sum(self.amounts[name, bits] for name, bits in plan.items())


@dataclass(frozen=True, slots=True)
class Budget:
    """An upper limit on the mean weight width of the searched layers, over parameters.

    ``mean_activation_bits`` limits the mean width of their inputs too, over layers; None sets no
    limit. ``limits`` are those on other sums.
    """

    mean_bits: float
    mean_activation_bits: float | None = None
    limits: tuple[Limit, ...] = ()

    def __post_init__(self) -> None:
        for mean in (self.mean_bits, self.mean_activation_bits):
            if mean is not None and not 0 < mean < float("inf"):
                raise BudgetError(f"the mean width must be a positive number, got {mean}")

    def limit(self, layers: tuple[LayerSpec, ...]) -> int:
        """The largest number of weight bits that the layers may take together."""
        # a relative 1e-9 forgives the rounding of a mean such as 3.1, never a whole weight
        return int(self.mean_bits * sum(layer.n_params for layer in layers) * (1 + 1e-9))

    def activation_limit(self, layers: tuple[LayerSpec, ...]) -> int | None:
        """The largest sum of the widths of the layers' inputs."""
        if self.mean_activation_bits is None:
            return None
        return int(self.mean_activation_bits * len(layers) * (1 + 1e-9))

    def taken(self, plan: BitPlan) -> tuple[int, ...]:
        """Weight bits, activation bits, and what the plan takes of every other limit."""
        others = (limit.of(plan) for limit in self.limits)
        return (plan.total_weight_bits, plan.total_activation_bits, *others)

    def excess(self, plan: BitPlan) -> tuple[int, ...]:
        """What the plan takes above each limit; zero where it is within."""
        most = (
            self.limit(plan.layers),
            self.activation_limit(plan.layers),
            *(limit.most for limit in self.limits),
        )
        return tuple(
            0 if limit is None else max(0, amount - limit)
            for amount, limit in zip(self.taken(plan), most, strict=True)
        )

    def allows(self, plan: BitPlan) -> bool:
        """Whether the plan is within the limits."""
        return not any(self.excess(plan))

    def complaints(self, plan: BitPlan) -> tuple[str, ...]:
        """What the plan takes too much of, and how much is allowed; empty if it is within."""
        weight, activation, *others = self.excess(plan)
        found = []
        if weight:
            found.append(
                f"averages {plan.mean_weight_bits:.4f} bits, the budget allows {self.mean_bits:.4f}"
            )
        if activation:
            found.append(
                f"averages {plan.mean_activation_bits:.4f} activation bits, "
                f"the budget allows {self.mean_activation_bits:.4f}"
            )
        for limit, over in zip(self.limits, others, strict=True):
            if over:
                found.append(f"takes {limit.of(plan)} {limit.name}, the budget allows {limit.most}")
        return tuple(found)

    def checked(self, plan: BitPlan) -> BitPlan:
        """The plan itself, or a BudgetError if it is over a limit."""
        for complaint in self.complaints(plan):
            raise BudgetError(f"the plan {complaint}")
        return plan


@dataclass(frozen=True, slots=True)
class CostTable:
    """What each width of each layer is expected to cost; lower is better.

    Layers named together in ``groups`` share one width, whatever picks it; all others are on their
    own.
    """

    layers: tuple[LayerSpec, ...]
    choices: tuple[LayerBits, ...]
    cost: NDArray[np.float64]
    groups: tuple[tuple[str, ...], ...] = ()

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
        names = [layer.name for layer in self.layers]
        grouped = [name for group in self.groups for name in group]
        for name in grouped:
            if name not in names or grouped.count(name) > 1:
                raise ConfigError(f"the groups of a cost table must name {name!r} once, as a layer")

    @property
    def units(self) -> tuple[tuple[str, ...], ...]:
        """All layers by name, those of one width together, by the first of each."""
        group_of = {name: group for group in self.groups for name in group}
        return tuple(
            dict.fromkeys(group_of.get(layer.name, (layer.name,)) for layer in self.layers)
        )


@dataclass(frozen=True, slots=True)
class Allocation:
    """A plan within its budget, with what the solver said of it."""

    plan: BitPlan
    objective: float
    status: str
    proven_optimal: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One attempted exchange of bits between layers.

    ``moved``: which widths of the widened layers changed.
    """

    widened: tuple[str, ...]
    narrowed: tuple[str, ...]
    plan: BitPlan
    score: float
    accepted: bool
    moved: Literal["weight", "activation", "both"] = "both"
