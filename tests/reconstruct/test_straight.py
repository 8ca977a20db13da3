from __future__ import annotations

import pytest
import torch

from lampq.quant.log import LogQuantizer
from lampq.quant.uniform import UniformQuantizer
from lampq.reconstruct.straight import First, logarithmic, of_codes, uniform

X = torch.tensor([-3.0, -0.4, 0.1, 0.6, 1.3, 9.0])


def test_uniform_values_are_those_of_the_quantizer() -> None:
    quantizer = UniformQuantizer(3, torch.tensor(0.5), torch.tensor(2.0))
    assert torch.equal(uniform(X, quantizer.scale, quantizer.zero, 3), quantizer(X))


def test_uniform_gradient_passes_inside_the_range_only() -> None:
    x = X.clone().requires_grad_()
    uniform(x, torch.tensor(0.5), torch.tensor(2.0), 3).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 1, 1, 1, 1, 0]


def test_gradient_of_a_uniform_scale_is_the_rounding_error_or_the_last_level() -> None:
    scale = torch.tensor(0.5, requires_grad=True)
    for value, expected in ((0.1, 0 - 0.2), (0.6, 1 - 1.2), (-3.0, 0 - 2.0), (9.0, 7 - 2.0)):
        scale.grad = None
        uniform(torch.tensor([value]), scale, torch.tensor(2.0), 3).sum().backward()
        assert scale.grad is not None
        torch.testing.assert_close(float(scale.grad), expected)


def test_gradient_of_a_scale_per_channel_stays_with_its_channel() -> None:
    scale = torch.tensor([[0.5], [0.25]], requires_grad=True)
    uniform(torch.tensor([[0.1], [9.0]]), scale, torch.zeros(2, 1), 2).sum().backward()
    assert scale.grad is not None
    torch.testing.assert_close(scale.grad, torch.tensor([[-0.2], [3.0]]))


def test_logarithmic_values_are_those_of_the_quantizer() -> None:
    one = torch.ones(1)
    quantizer = LogQuantizer(3, 2 * one, 0 * one, 0 * one, step=20)
    x = torch.rand(100, generator=torch.Generator().manual_seed(0)) * 3
    levels = quantizer.levels / quantizer.scale
    got = logarithmic(x, quantizer.scale, levels, quantizer.denominator / quantizer.step)
    torch.testing.assert_close(got, quantizer(x))


def test_logarithmic_gradients() -> None:
    levels = torch.tensor([1.0, 0.5, 0.25, 0.0])
    x = torch.tensor([5.0, 1.2, 0.6], requires_grad=True)
    scale = torch.tensor([2.0], requires_grad=True)
    value = logarithmic(x, scale, levels, 1.0)
    assert value.tolist() == [2.0, 1.0, 0.5]
    value.sum().backward()
    assert x.grad is not None
    assert scale.grad is not None
    assert x.grad.tolist() == [0, 1, 1]
    # beyond the scale the level itself, inside the rounding error
    torch.testing.assert_close(scale.grad, torch.tensor([1.0 + (0.5 - 0.6) + (0.25 - 0.3)]))


def test_a_logarithmic_grid_is_moved_before_and_after() -> None:
    one = torch.ones(1)
    quantizer = LogQuantizer(3, 2 * one, 0.2 * one, 0.1 * one, step=20)
    x = torch.rand(100, generator=torch.Generator().manual_seed(0)) * 3 - 0.2
    levels = (quantizer.levels + quantizer.offset) / quantizer.scale
    per_octave = quantizer.denominator / quantizer.step
    got = logarithmic(x, quantizer.scale, levels, per_octave, shift=0.2, offset=0.1)
    torch.testing.assert_close(got, quantizer(x))


def test_moves_have_no_part_in_the_gradient_of_a_scale() -> None:
    levels = torch.tensor([1.0, 0.5, 0.25, 0.0])
    x = torch.tensor([5.0, 1.2, 0.6])
    scale = torch.tensor([2.0], requires_grad=True)
    logarithmic(x - 0.3, scale, levels, 1.0, shift=0.3, offset=0.1).sum().backward()
    assert scale.grad is not None
    torch.testing.assert_close(scale.grad, torch.tensor([1.0 + (0.5 - 0.6) + (0.25 - 0.3)]))


@pytest.mark.parametrize("kind", ["one scale", "a scale a token", "logarithmic"])
@pytest.mark.parametrize("axis", [-1, -2])
def test_first_tokens_keep_their_values_and_have_no_part_in_the_scale(kind: str, axis: int) -> None:
    generator = torch.Generator().manual_seed(0)
    data = torch.rand(2, 6, 5, generator=generator)
    weights = torch.rand(2, 6, 5, generator=generator)
    own, count = torch.full_like(data.narrow(axis, 0, 2), 7.0), 2
    shape = [1, 1, 1] if kind != "a scale a token" else [2, 6, 1] if axis == -2 else [2, 1, 5]

    def rounded(x: torch.Tensor, scale: torch.Tensor, first: First | None) -> torch.Tensor:
        if kind == "logarithmic":
            levels = torch.tensor([1.0, 0.5, 0.25, 0.0])
            return logarithmic(x, scale.flatten(), levels, 1.0, shift=0.1, offset=0.1, first=first)
        return uniform(x, scale, torch.ones(1), 2, first)

    x, scale = data.clone().requires_grad_(), torch.full(shape, 0.2, requires_grad=True)
    found = rounded(x, scale, First(own, axis))
    (found * weights).sum().backward()

    # the same, cut into two and put together again
    y, other = data.clone().requires_grad_(), torch.full(shape, 0.2, requires_grad=True)
    ahead, rest = (y.narrow(axis, a, n) for a, n in ((0, count), (count, y.shape[axis] - count)))
    scales = other
    if kind == "a scale a token":
        scales = other.narrow(axis, count, y.shape[axis] - count)
    parts = [ahead + (own - ahead).detach(), rounded(rest, scales, None)]
    expected = torch.cat(parts, dim=axis)
    (expected * weights).sum().backward()

    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(scale.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_weights_are_decoded_codes_and_their_gradients_those_of_a_product() -> None:
    latent = torch.tensor([[-0.8, 0.3, 2.6], [1.4, 3.4, 9.0]], requires_grad=True)
    scale = torch.tensor([[0.5], [0.25]], requires_grad=True)
    zero = torch.tensor([[1.0], [0.0]])
    weight = of_codes(latent, scale, zero, 2)
    assert weight.tolist() == [[-0.5, -0.5, 1.0], [0.25, 0.75, 0.75]]
    slope = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    (weight * slope).sum().backward()
    assert latent.grad is not None
    assert latent.grad.tolist() == [[0.0, 1.0, 1.5], [1.0, 1.25, 0.0]]
    assert scale.grad is not None
    assert scale.grad.tolist() == [[-1.0 - 2.0 + 6.0], [4.0 + 15.0 + 18.0]]
