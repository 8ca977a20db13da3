from __future__ import annotations

import torch

from lampq.quant.log import LogQuantizer
from lampq.quant.uniform import UniformQuantizer
from lampq.reconstruct.straight import logarithmic, uniform

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
