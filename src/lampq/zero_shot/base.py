"""What a recipe is given and what it gives; the options of a synthesis."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from lampq.errors import ConfigError, GraphError
from lampq.graph.discover import discover
from lampq.graph.families import TIMM, RolePattern
from lampq.hooks import recording
from lampq.reconstruct.precision import Precision, precision_named
from lampq.types import LayerRole
from lampq.zero_shot.canvas import Canvas

DEFAULT_RECIPE = "pyramid"
DEFAULT_IMAGES = 512
# the label of a picture that is made for no class
NO_CLASS = -1


def seeded(seed: int, *purpose: object) -> torch.Generator:
    """A source of draws of its own for each purpose of a seed."""
    digest = hashlib.sha256(repr((seed, *purpose)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


@dataclass(frozen=True, slots=True)
class Subject:
    """A frozen copy of the model that pictures are made for, and where its attentions are.

    ``attentions``: the projection of each, by name, and its heads. ``prefix``: how many tokens
    before the patches are none. ``windows``: whether attention works inside windows.
    """

    model: nn.Module
    attentions: Mapping[str, int]
    prefix: int
    windows: bool
    classes: int

    @classmethod
    def of(
        cls, model: nn.Module, canvas: Canvas, patterns: tuple[RolePattern, ...] = TIMM
    ) -> Subject:
        """The subject of a float model, which stays as it is."""
        frozen = copy.deepcopy(model).eval().requires_grad_(False)
        graph = discover(frozen, patterns)
        names = [layer.name for layer in graph.layers if layer.role is LayerRole.PROJ]
        if not names:
            raise GraphError(
                "no layer plays the role proj: pictures are made by what attentions give to their "
                "projection"
            )
        owners = {name: frozen.get_submodule(name.rpartition(".")[0]) for name in names}
        attentions = {name: int(getattr(o, "num_heads", 1)) for name, o in owners.items()}
        try:
            with torch.no_grad(), recording(frozen, names) as seen:
                logits = frozen(torch.zeros(canvas.shape(1)))
        except (RuntimeError, AssertionError) as error:
            raise GraphError(
                f"the model cannot take pictures of shape {canvas.shape(1)[1:]}: "
                f"{(str(error).splitlines() or [type(error).__name__])[0]}"
            ) from error
        if not isinstance(logits, Tensor) or logits.ndim != 2:
            raise GraphError("the model gives no logits (images, classes): it names no class")
        windows = any(len(given[0]) > 1 for given in seen.values())
        prefix = int(getattr(model, "num_prefix_tokens", 0))
        return cls(frozen, attentions, prefix, windows, logits.shape[1])


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model says of the pictures it is shown: logits, and one entropy per attention."""

    logits: Tensor
    entropies: Sequence[Tensor]


class Painting(Protocol):
    """The pictures of one batch while they are made."""

    @property
    def parameters(self) -> Sequence[Tensor]:
        """What is optimised."""
        ...

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        ...

    def shown(self, step: int) -> Tensor:
        """Network input of the pictures, as they are shown to the model in a step."""
        ...

    def loss(self, shown: Tensor, answer: Answer) -> Tensor:
        """What is made smaller."""
        ...

    def settle(self) -> None:
        """Put the parameters back into their range after a step."""
        ...

    def finished(self) -> Tensor:
        """Network input of the pictures."""
        ...


class Recipe(Protocol):
    """A way to make pictures; ``betas`` are those of Adam."""

    name: ClassVar[str]
    betas: ClassVar[tuple[float, float]]

    @property
    def steps(self) -> int:
        """How often each batch is shown to the model."""
        ...

    def labels(self, numbers: range, classes: int, seed: int) -> Tensor:
        """The classes of the pictures with these running numbers; NO_CLASS for none."""
        ...

    def begin(
        self, subject: Subject, canvas: Canvas, labels: Tensor, generator: torch.Generator
    ) -> Painting:
        """The start of a batch; every random draw is from the generator."""
        ...


@dataclass(frozen=True, slots=True)
class Synthesis:
    """How many pictures are made, how, and how many at a time; memory grows with ``batch`` only.

    ``steps``: not set, those of the recipe. ``precision``: in what passes of the model multiply.
    """

    images: int = DEFAULT_IMAGES
    recipe: str = DEFAULT_RECIPE
    steps: int | None = None
    batch: int = 32
    seed: int = 0
    precision: Precision = "auto"

    def __post_init__(self) -> None:
        for name in ("images", "batch", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must be in 0..2**63 - 1, got {self.seed}")
        precision_named(self.precision)

    @property
    def batches(self) -> tuple[range, ...]:
        """The running numbers of the pictures of every batch."""
        starts = range(0, self.images, self.batch)
        return tuple(range(s, min(s + self.batch, self.images)) for s in starts)

    def generator(self, batch: int) -> torch.Generator:
        """The source of all draws of one batch, whichever batches were made before."""
        return seeded(self.seed, "batch", batch)


def drawn_view(images: Tensor, limit: int, generator: torch.Generator) -> Tensor:
    """The pictures rolled along the diagonal by up to ``limit`` pixels, and mirrored or not."""
    offset = int(torch.randint(-limit, limit + 1, (), generator=generator))
    rolled = torch.roll(images, shifts=(offset, offset), dims=(2, 3))
    mirrored = float(torch.rand((), generator=generator)) > 0.5
    return rolled.flip(3) if mirrored else rolled


def options_of(recipe: Recipe) -> dict[str, Any]:
    """The fields of a recipe, for a report."""
    return asdict(recipe) if is_dataclass(recipe) and not isinstance(recipe, type) else {}
