"""What every runtime gives: a session that takes images and returns logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lampq.errors import DataError, ExportError

Array = NDArray[Any]


class Session(ABC):
    """One ONNX graph in one runtime, ready to run.

    ``shapes`` are those of its inputs; the first dimension of each is free.
    """

    runtime: ClassVar[str]
    shapes: Mapping[str, tuple[int, ...]]

    @abstractmethod
    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """All outputs by name."""

    @abstractmethod
    def integer_nodes(self) -> frozenset[str]:
        """The nodes of the graph that run on integer kernels, by their names in the file."""

    def __call__(self, images: Tensor) -> Tensor:
        """Logits (images, classes) of normalised images (images, channels, height, width)."""
        if len(self.shapes) != 1:
            raise ExportError(f"the graph has {len(self.shapes)} inputs, and images are one")
        ((name, shape),) = self.shapes.items()
        if images.ndim != len(shape) or tuple(images.shape[1:]) != shape[1:] or not len(images):
            raise DataError(
                f"the model takes one or more images of shape {shape[1:]}, got a tensor of shape "
                f"{tuple(images.shape)}"
            )
        values = images.detach().cpu().numpy().astype(np.float32, copy=False)
        outputs = self.run({name: values})
        if len(outputs) != 1:
            raise ExportError(f"the graph has {len(outputs)} outputs: take them from run()")
        (logits,) = outputs.values()
        return torch.from_numpy(logits)


def first_line(error: Exception) -> str:
    """What an error says, short."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:200].rstrip(".")
