from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lampq.errors import ConfigError
from lampq.quant.prefix import PrefixQuantizer, applied_to_rows
from lampq.quant.token import TokenQuantizer
from lampq.quant.uniform import UniformQuantizer

FINE = TokenQuantizer(8, torch.ones(1))
COARSE = UniformQuantizer.between(3, torch.tensor(-2.0), torch.tensor(2.0), whole=True)


def tokens(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_first_tokens_have_their_own_quantizer_and_the_others_the_usual_one(count: int) -> None:
    x = tokens(4, 7, 16)
    values = PrefixQuantizer(3, FINE, COARSE, count=count)(x)
    assert torch.equal(values[:, :count], FINE(x[:, :count]))
    assert torch.equal(values[:, count:], COARSE(x[:, count:]))


def test_codes_are_those_of_the_parts() -> None:
    x = tokens(2, 3, 7, 16)
    quantizer = PrefixQuantizer(3, FINE, COARSE, count=1)
    codes = quantizer.encode(x)
    assert torch.equal(codes[..., :1, :], FINE.encode(x[..., :1, :]))
    assert torch.equal(codes[..., 1:, :], COARSE.encode(x[..., 1:, :]))
    assert quantizer.n_codes == 256


def test_keys_that_come_transposed_have_the_same_values() -> None:
    x = tokens(2, 3, 7, 16)
    straight = PrefixQuantizer(3, FINE, COARSE, count=2)
    fine = TokenQuantizer(8, torch.ones(1), axis=-2)
    turned = PrefixQuantizer(3, fine, COARSE, count=2, axis=-2)
    assert torch.equal(turned(x.mT), straight(x).mT)
    assert torch.equal(turned.encode(x.mT), straight.encode(x).mT)


def test_single_tokens_are_quantized_as_in_their_image() -> None:
    x = tokens(4, 7, 16)
    quantizer = PrefixQuantizer(3, FINE, COARSE, count=2)
    first = (torch.arange(28) % 7) < 2
    mixed = torch.randperm(28, generator=torch.Generator().manual_seed(1))
    rows = applied_to_rows(quantizer, x.flatten(0, 1)[mixed], first[mixed])
    assert torch.equal(rows, quantizer(x).flatten(0, 1)[mixed])


def test_quantizers_without_a_prefix_do_not_look_at_the_place_of_a_token() -> None:
    rows = tokens(9, 16)
    assert torch.equal(applied_to_rows(COARSE, rows, None), COARSE(rows))
    assert applied_to_rows(None, rows, None) is rows


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 0}, "at least one token, got 0"),
        ({"count": 1, "axis": 1}, "on axis -1 or -2, got 1"),
        ({"count": 1, "bits": 4}, "that of the body, 3, got 4"),
    ],
    ids=["count", "axis", "bits"],
)
def test_what_cannot_be_is_refused(options: dict[str, int], message: str) -> None:
    bits = options.pop("bits", 3)
    with pytest.raises(ConfigError, match=message):
        PrefixQuantizer(bits, FINE, COARSE, **options)
