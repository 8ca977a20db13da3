"""What pictures are made on: their shape, their range, and how rough they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lampq.data import Preprocessing


@dataclass(frozen=True, slots=True)
class Canvas:
    """Channels and size of a model's input, and what the darkest and brightest pixel become."""

    how: Preprocessing

    @property
    def channels(self) -> int:
        """One for grey pictures, three for coloured ones."""
        return len(self.how.mean)

    def shape(self, count: int) -> tuple[int, int, int, int]:
        """The shape of so many pictures."""
        return (count, self.channels, self.how.size, self.how.size)

    @property
    def low(self) -> Tensor:
        """Network input of a pixel of value 0, (channels, 1, 1)."""
        mean, std = torch.tensor(self.how.mean), torch.tensor(self.how.std)
        return (-mean / std).view(-1, 1, 1)

    @property
    def high(self) -> Tensor:
        """Network input of a pixel of value 1, (channels, 1, 1)."""
        mean, std = torch.tensor(self.how.mean), torch.tensor(self.how.std)
        return ((1 - mean) / std).view(-1, 1, 1)

    def inputs(self, pixels: Tensor) -> Tensor:
        """Network input of pixels in 0..1."""
        return self.low + pixels * (self.high - self.low)

    def to_bytes(self, inputs: Tensor) -> Tensor:
        """The pictures whose network input is nearest to this."""
        pixels = (inputs.detach() - self.low) / (self.high - self.low)
        return (pixels * 255).round().clamp(0, 255).to(torch.uint8)


def variation(images: Tensor) -> Tensor:
    """Total variation: the norms of the differences to the neighbours in four directions, added."""
    return torch.stack([torch.linalg.vector_norm(part) for part in _differences(images)]).sum()


def variation_per_image(images: Tensor) -> Tensor:
    """The total variation of each picture by itself, (images,)."""
    norms = [torch.linalg.vector_norm(part, dim=(1, 2, 3)) for part in _differences(images)]
    return torch.stack(norms).sum(dim=0)


def _differences(images: Tensor) -> tuple[Tensor, ...]:
    return (
        images[..., :, :-1] - images[..., :, 1:],
        images[..., :-1, :] - images[..., 1:, :],
        images[..., 1:, :-1] - images[..., :-1, 1:],
        images[..., :-1, :-1] - images[..., 1:, 1:],
    )
