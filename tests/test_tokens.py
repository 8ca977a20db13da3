"""What layers see as rows, by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lampq.tokens import (
    count_tokens,
    drawn,
    outputs_of,
    picked_tokens,
    rows_at_most,
    token_gradients,
    token_weights,
    tokens_of,
)

LAYERS = {
    "linear": (nn.Linear(3, 4), (2, 5, 6, 3)),
    "patches": (nn.Conv2d(3, 4, 2, 2), (2, 3, 6, 8)),
    "padded": (nn.Conv2d(3, 4, 3, padding=1), (2, 3, 5, 7)),
    "strided": (nn.Conv2d(3, 4, (3, 1), stride=(2, 1), padding=(1, 0)), (1, 3, 6, 5)),
    "transposed": (nn.ConvTranspose2d(3, 4, 2, 2), (2, 3, 4, 5)),
}


def _inputs(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _matrix(layer: nn.Module) -> Tensor:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight.flatten(1).T if isinstance(layer, nn.ConvTranspose2d) else weight.flatten(1)


@pytest.mark.parametrize("kind", LAYERS)
@torch.no_grad()
def test_tokens_times_the_matrix_are_the_output(kind: str) -> None:
    layer, shape = LAYERS[kind]
    x = _inputs(shape)
    tokens = tokens_of(layer, x)
    assert len(tokens) == count_tokens(layer, x)
    bias = layer.bias
    assert isinstance(bias, Tensor)
    wanted = token_gradients(layer, layer(x))  # an output has the rows of its gradient
    spots = outputs_of(layer) // len(bias)
    got = tokens @ _matrix(layer).T + bias.repeat_interleave(spots)
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("kind", LAYERS)
def test_picked_tokens_are_those_of_all_calls(kind: str) -> None:
    layer, shape = LAYERS[kind]
    calls = [_inputs(shape), _inputs(shape, 1)[:1]]
    every = torch.cat([tokens_of(layer, x) for x in calls])
    index = torch.tensor([0, 3, 3, len(every) - 1])
    assert torch.equal(picked_tokens(layer, calls, index), every[index])
    assert len(picked_tokens(layer, calls, index[:0])) == 0


def test_gradients_of_a_transposed_convolution_belong_to_its_pixels() -> None:
    layer = nn.ConvTranspose2d(2, 3, 2, 2)
    gradient = _inputs((1, 3, 4, 6))
    rows = token_gradients(layer, gradient)
    assert torch.equal(rows[4].reshape(3, 2, 2), gradient[0, :, 2:4, 2:4])
    assert torch.equal(rows, F.pixel_unshuffle(gradient, 2).permute(0, 2, 3, 1).flatten(0, 2))


def test_tokens_of_very_many_channels_are_fewer() -> None:
    assert rows_at_most(8192, nn.Linear(4096, 1)) == 8192
    assert rows_at_most(8192, nn.Linear(12544, 1)) == 2**25 // 12544
    assert rows_at_most(8192, nn.ConvTranspose2d(8, 3, 2, 2)) == 8192


def test_half_of_a_weight_is_even_and_half_the_share_of_the_image() -> None:
    found = token_weights(torch.tensor([1.0, 3.0, 0.0, 5.0]), 2)
    torch.testing.assert_close(found, torch.tensor([0.75, 1.25, 0.5, 1.5]))
    assert len(token_weights(torch.zeros(0), 1)) == 0


def test_nothing_is_drawn_of_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    assert len(drawn(0, 5, generator)) == len(drawn(0, 5, generator, torch.zeros(0))) == 0
    assert drawn(3, 5, generator).tolist() == [0, 1, 2]
