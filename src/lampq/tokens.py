"""What the layers of a model see, as rows: the tokens of images of one size or of many."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# numbers that are kept of the inputs of one layer at most
MOST_VALUES = 2**25


def _windows(module: nn.Conv2d, inputs: Tensor) -> Tensor:
    """All windows of a convolution as a view, (images, channels, down, across, rows, columns)."""
    down, across = _padding(module)
    padded = F.pad(inputs, (across, across, down, down)) if down or across else inputs
    (rows, columns), (below, right) = module.kernel_size, module.stride
    return padded.unfold(2, rows, below).unfold(3, columns, right)


def _padding(module: nn.Conv2d) -> tuple[int, int]:
    assert not isinstance(module.padding, str), "discovery knows padding in numbers only"
    down, across = module.padding
    return down, across


def count_tokens(module: nn.Module, inputs: Tensor) -> int:
    """How many tokens a layer makes of its input."""
    if isinstance(module, nn.Conv2d):
        return len(inputs) * _windows(module, inputs).shape[2:4].numel()
    if isinstance(module, nn.ConvTranspose2d):
        return len(inputs) * inputs.shape[2:].numel()
    return inputs.shape[:-1].numel()


def tokens_of(module: nn.Module, inputs: Tensor) -> Tensor:
    """Inputs of a linear layer or of a convolution, as (tokens, channels)."""
    if isinstance(module, nn.Conv2d):
        patches = F.unfold(
            inputs, module.kernel_size, padding=_padding(module), stride=module.stride
        )
        return patches.transpose(1, 2).flatten(0, 1)
    if isinstance(module, nn.ConvTranspose2d):
        return inputs.flatten(2).transpose(1, 2).flatten(0, 1)
    return inputs.flatten(0, -2)


def picked_tokens(module: nn.Module, calls: Sequence[Tensor], index: Tensor) -> Tensor:
    """Some of the tokens of all calls of a layer, (picked, channels).

    ``index``: their places among the tokens of the calls one after another, ascending. The windows
    of a convolution overlap: only those that are wanted are copied.
    """
    pieces, before = [], 0
    for inputs in calls:
        count = count_tokens(module, inputs)
        mine = index[(index >= before) & (index < before + count)] - before
        pieces.append(_picked(module, inputs, mine))
        before += count
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _picked(module: nn.Module, inputs: Tensor, index: Tensor) -> Tensor:
    if not isinstance(module, nn.Conv2d):
        return tokens_of(module, inputs)[index]
    windows = _windows(module, inputs)
    down, across = windows.shape[2:4]
    place = index % (down * across)
    chosen = windows[index // (down * across), :, place // across, place % across]
    return chosen.flatten(1)


def first_tokens(module: nn.Module, calls: Sequence[Tensor], index: Tensor, prefix: int) -> Tensor:
    """Which of the picked tokens are among the first ``prefix`` of their image, (picked,)."""
    if not prefix:
        return torch.zeros(len(index), dtype=torch.bool)
    places = [torch.arange(count_tokens(module, x)) % x.shape[-2] for x in calls]
    return (torch.cat(places) < prefix)[index.cpu()]


def rows_at_most(tokens: int, module: nn.Module) -> int:
    """So many tokens, or fewer where each has very many channels."""
    weight = module.weight
    assert isinstance(weight, Tensor), "discovery names layers with weights only"
    channels = len(weight) if isinstance(module, nn.ConvTranspose2d) else weight[0].numel()
    return max(1, min(tokens, MOST_VALUES // channels))


def sum_tokens(operands: tuple[Tensor, ...]) -> Tensor:
    """The values of a residual sum, as (tokens, channels)."""
    return (operands[0] + operands[1]).detach().flatten(0, -2)


def outputs_of(module: nn.Module) -> int:
    """How many numbers a layer gives for each of its tokens."""
    if isinstance(module, nn.ConvTranspose2d):
        return module.weight[0].numel()
    assert isinstance(module, nn.Linear | nn.Conv2d), "discovery names linear layers only"
    return len(module.weight)


def token_gradients(module: nn.Module, gradient: Tensor) -> Tensor:
    """Gradients at the output of a linear layer or of a convolution, as (tokens, outputs)."""
    if isinstance(module, nn.Conv2d):
        return gradient.flatten(2).transpose(1, 2).flatten(0, 1)
    if isinstance(module, nn.ConvTranspose2d):
        rows, columns = module.kernel_size
        cut = gradient.unfold(2, rows, rows).unfold(3, columns, columns)
        return cut.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(0, 2)
    return gradient.flatten(0, -2)


def token_weights(power: Tensor, images: int) -> Tensor:
    """How often each token should be drawn, by the squared gradients at its output; (tokens,).

    One half of the weight is even, the other is the token's share of its image's squared output
    gradient: where the class token alone decides, as in the last blocks of a ViT, it gets most of
    that although it is one of hundreds.
    """
    power = power.reshape(images, -1)
    share = power / power.sum(dim=1, keepdim=True).clamp_min(1e-30)
    return (share + 1 / max(1, share.shape[1])).flatten()


def drawn(
    count: int, keep: int, generator: torch.Generator, weights: Tensor | None = None
) -> Tensor:
    """Numbers of the kept ones, ascending: without replacement, or with it by weight."""
    if weights is None:
        return torch.randperm(count, generator=generator)[:keep].sort().values
    if not keep or not count:
        return torch.zeros(0, dtype=torch.long)
    return weights.multinomial(keep, replacement=True, generator=generator).sort().values
