from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import Case, fits_of
from torch import Tensor, nn

from lampq.hooks import recording
from lampq.quant.base import Quantizer, describe
from lampq.quant.modules import assemble
from lampq.quant.prefix import PrefixQuantizer
from lampq.quant.token import TokenLogQuantizer, TokenQuantizer
from lampq.reconstruct.trainable import (
    Rounding,
    TrainableQuantizer,
    fitted,
    layers_of,
    quantizers,
    trainable,
)


def assert_same_sites(expected: nn.Module, model: nn.Module, sites: list[str], x: Tensor) -> None:
    """Every site gives the same on what the expected model gives it.

    Scales go through their logarithm, so a value on the border of two codes may get the other one;
    it changes its token, on some processors, and hardly ever more than one in ten.
    """
    with torch.no_grad(), recording(expected, sites) as seen:
        expected(x)
    for name in sites:
        with torch.no_grad():
            one, other = (m.get_submodule(name)(*seen[name]) for m in (expected, model))
        close = torch.isclose(one, other, rtol=1e-3, atol=1e-3 * float(one.abs().max()))
        rows = close.flatten(0, -2) if close.dim() > 1 else close[None]
        assert float(rows.all(dim=-1).float().mean()) > 0.9, name


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("adalog", {}),
        ("repq", {}),
        ("minmax", {}),
        ("adalog", {"input_ranges": "token"}),
        ("adalog", {"input_ranges": "token", "prefix_bits": 8}),
    ],
)
def test_an_untrained_model_is_the_assembled_one(
    case: Case, method: str, options: dict[str, Any]
) -> None:
    layers, matmuls = fits_of(case, method, 3, **options)
    images = case.samples.inputs(slice(0, 4))
    expected = assemble(case.model, layers, matmuls)
    norms = [name for name, part in expected.named_modules() if isinstance(part, nn.LayerNorm)]
    sites = [*norms, *(fit.spec.name for fit in (*layers, *matmuls))]
    model = trainable(case.model, layers, matmuls)
    assert_same_sites(expected, model, sites, images)
    assert_same_sites(expected, fitted(model), sites, images)


@pytest.mark.parametrize("axis", [-1, -2])
def test_the_part_of_a_range_per_token_is_trained_straight_through(axis: int) -> None:
    x = torch.randn(2, 3, 6, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    quantizer = TokenQuantizer(3, torch.tensor([0.5, 0.7, 0.9])[:, None, None], axis=axis)
    trained = TrainableQuantizer(quantizer)
    assert trained.log_scale is not None
    values = trained(x)
    torch.testing.assert_close(values, quantizer(x.detach()))
    values.square().sum().backward()
    assert x.grad is not None
    # inside the range the gradient passes, beyond it there is none
    grid = quantizer.at(x.detach())
    place = x.detach() / grid.scale + grid.zero
    inside = (place >= -0.5) & (place <= 7.5)
    assert 0 < int(inside.sum()) < inside.numel()
    torch.testing.assert_close(x.grad, 2 * values.detach() * inside)
    # the clip moves values beyond the range with it, and others by what rounding has done to them
    code = place.round().clamp(0, 7)
    slope = torch.where(inside, code - place, code - grid.zero) * grid.scale
    expected = (2 * values.detach() * slope).sum(dim=(0, 2, 3))
    assert trained.log_scale.grad is not None
    torch.testing.assert_close(trained.log_scale.grad.flatten(), expected)


def test_a_trained_part_of_a_range_is_kept_with_its_axis() -> None:
    trained = TrainableQuantizer(TokenQuantizer(3, torch.tensor(0.5), axis=-2))
    assert trained.log_scale is not None
    trained.log_scale.data += 0.3
    found = trained.fitted()
    assert isinstance(found, TokenQuantizer)
    assert describe(found) == {"kind": "token", "bits": 3, "axis": -2}
    torch.testing.assert_close(found.clip, torch.tensor(0.5 * 2.718281828**0.3))


@pytest.mark.parametrize("shift", [0.0, 0.17])
@pytest.mark.parametrize("first", [0, 2])
def test_powers_of_the_size_of_a_token_are_trained_straight_through(
    shift: float, first: int
) -> None:
    x = torch.randn(2, 6, 40, generator=torch.Generator().manual_seed(0)).abs()
    x = (x * torch.logspace(-2, 2, 6)[:, None] - shift).requires_grad_()
    body = TokenLogQuantizer(3, torch.tensor([0.6]), torch.tensor([shift]), step=30)
    whole: Quantizer = body
    if first:
        whole = PrefixQuantizer(3, TokenQuantizer(8, torch.ones(1)), body, count=first)
    trained = TrainableQuantizer(whole)
    assert trained.log_scale is not None
    values = trained(x)
    torch.testing.assert_close(values, whole(x.detach()), rtol=1e-5, atol=1e-5)
    slope = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    (values * slope).sum().backward()
    # inside the range and in first tokens the gradient passes, beyond the range there is none
    seen, size = x.detach() + shift, x.detach().amax(-1, keepdim=True) + shift
    inside, body_slope = seen <= 0.6 * size, slope.clone()
    inside[:, :first] = True
    body_slope[:, :first] = 0
    assert 0 < int(inside.sum()) < inside.numel()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, slope * inside)
    # as in LSQ: the rounding error inside the range, the largest power beyond it
    error = torch.where(inside, values.detach() - x.detach(), values.detach() + shift)
    assert trained.log_scale.grad is not None
    wanted = (error * body_slope).sum()
    torch.testing.assert_close(trained.log_scale.grad.sum(), wanted, rtol=1e-3, atol=1e-3)


def test_a_trained_part_of_the_size_of_a_token_is_kept_with_its_base() -> None:
    original = TokenLogQuantizer(3, torch.tensor([0.9]), torch.tensor([0.17]), step=41)
    trained = TrainableQuantizer(original)
    assert trained.log_scale is not None
    trained.log_scale.data += 0.3
    found = trained.fitted()
    assert isinstance(found, TokenLogQuantizer)
    assert describe(found) == describe(original)
    torch.testing.assert_close(found.clip, torch.ones(1))
    x = torch.rand(5, 20) - 0.1
    torch.testing.assert_close(trained(x).detach(), found(x))
    trained.log_scale.data -= 0.7
    torch.testing.assert_close(trained(x).detach(), trained.fitted()(x))


def test_the_part_of_a_range_never_grows_beyond_the_whole_and_finds_back() -> None:
    trained = TrainableQuantizer(TokenQuantizer(2, torch.tensor(1.0)))
    assert trained.log_scale is not None
    trained.log_scale.data += 0.2
    x = torch.tensor([[-1.0, 0.4, 1.0]])
    values = trained(x)
    torch.testing.assert_close(values, TokenQuantizer(2, torch.tensor(1.0))(x))
    torch.testing.assert_close(trained.fitted()(x), values)
    (values - x).square().sum().backward()
    assert trained.log_scale.grad is not None
    assert float(trained.log_scale.grad.abs()) > 0


def test_codes_are_kept_until_they_are_trained(vit: Case) -> None:
    layers, matmuls = fits_of(vit, "adalog", 3)
    for rounding in ("free", "nearest two"):
        model = trainable(vit.model, layers, matmuls, rounding)
        for layer, fit in zip(layers_of(model), layers, strict=True):
            assert torch.equal(layer.fitted().codes, fit.codes), (rounding, fit.spec.name)


@pytest.mark.parametrize("rounding", ["free", "nearest two"])
def test_codes_stay_in_range_and_move_as_allowed(vit: Case, rounding: Rounding) -> None:
    layers, matmuls = fits_of(vit, "adalog", 2)
    model = trainable(vit.model, layers, matmuls, rounding)
    generator = torch.Generator().manual_seed(0)
    for layer in layers_of(model):
        assert layer.latent is not None
        layer.latent.data += 20 * torch.randn(layer.latent.shape, generator=generator)
    for layer, fit in zip(layers_of(model), layers, strict=True):
        codes = layer.fitted().codes.int()
        assert int(codes.min()) >= 0
        assert int(codes.max()) <= 3
        moved = int((codes - fit.codes.int()).abs().max())
        assert moved <= 1 if rounding == "nearest two" else moved > 1


def test_training_changes_what_is_saved(vit: Case) -> None:
    layers, matmuls = fits_of(vit, "adalog", 3)
    model = trainable(vit.model, layers, matmuls)
    images = vit.samples.inputs(slice(0, 2))
    before = fitted(model)(images)
    for quantizer in quantizers(model):
        assert quantizer.log_scale is not None
        quantizer.log_scale.data += 0.3
    torch.testing.assert_close(fitted(model)(images), model(images), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(fitted(model)(images), before, atol=1e-2)


def test_gradients_reach_codes_scales_and_biases(case: Case) -> None:
    layers, matmuls = fits_of(case, "adalog", 3)
    model = trainable(case.model, layers, matmuls)
    for parameter in model.parameters():
        parameter.requires_grad = True
    model(case.samples.inputs(slice(0, 4))).square().sum().backward()
    for layer in layers_of(model):
        assert layer.latent is not None
        assert layer.latent.grad is not None
        assert layer.log_scale is not None
        assert layer.log_scale.grad is not None
        assert float(layer.latent.grad.abs().sum()) > 0, layer.fit.spec.name
        assert float(layer.log_scale.grad.abs().sum()) > 0, layer.fit.spec.name
    for quantizer in quantizers(model):
        assert quantizer.log_scale is not None
        assert quantizer.log_scale.grad is not None
        assert bool(torch.isfinite(quantizer.log_scale.grad).all())


def test_dropping_leaves_that_share_of_the_values_alone(vit: Case) -> None:
    layers, matmuls = fits_of(vit, "minmax", 2)
    quantizer = next(quantizers(trainable(vit.model, layers, matmuls)))
    x = torch.rand(20_000)
    rounded = quantizer(x)
    quantizer.drop = 0.3
    kept = quantizer(x)
    same = (kept == x) & (rounded != x)
    assert abs(float(same.double().mean()) - 0.3) < 0.03
    assert bool(((kept == x) | (kept == rounded)).all())
