from __future__ import annotations

import pytest
import torch
from conftest import Case, fits_of

from lampq.quant.modules import assemble
from lampq.reconstruct.trainable import Rounding, fitted, layers_of, quantizers, trainable


@pytest.mark.parametrize("method", ["adalog", "repq", "minmax"])
def test_an_untrained_model_is_the_assembled_one(case: Case, method: str) -> None:
    layers, matmuls = fits_of(case, method, 3)
    images = case.samples.inputs(slice(0, 4))
    expected = assemble(case.model, layers, matmuls)(images)
    model = trainable(case.model, layers, matmuls)
    torch.testing.assert_close(model(images), expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(fitted(model)(images), expected, rtol=1e-3, atol=1e-3)


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
