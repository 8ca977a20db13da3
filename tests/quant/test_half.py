from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import Case, fits_of
from torch import Tensor, nn

from lampq.artifact.checkpoint import checkpoint_bytes, load_checkpoint
from lampq.models import ModelSource
from lampq.quant.half import halved, is_half
from lampq.quant.modules import QuantLayer, assemble

USER = ModelSource("user", "Tiny", {})


def quantized(case: Case, method: str = "minmax", bits: int = 4) -> nn.Module:
    return assemble(case.model, *fits_of(case, method, bits))


def test_all_but_codes_and_inputs_is_half_and_nearly_the_same(case: Case) -> None:
    before = quantized(case)
    after = halved(before)
    names = [name for name, _ in after.named_parameters()]
    for name, module in after.named_modules():
        if isinstance(module, QuantLayer):
            names += [f"{name}.bias", f"{name}.weight_quantizer.scale"]
    old, new = before.state_dict(), after.state_dict()
    changed = 0
    for name in names:
        assert is_half(new[name]), name
        assert float((new[name] - old[name]).abs().max()) <= 2**-11 * float(old[name].abs().max())
        changed += not torch.equal(new[name], old[name])
    assert changed > len(names) // 2
    for name in set(old) - set(names):
        assert torch.equal(new[name], old[name]), name


def test_the_weight_is_that_of_the_rounded_scale(vit: Case) -> None:
    for module in halved(quantized(vit)).modules():
        if isinstance(module, QuantLayer):
            decoded = module.weight_quantizer.decode(module.codes)
            assert torch.equal(module.weight, decoded.view_as(module.weight))


def test_rounding_twice_changes_nothing_more(vit: Case) -> None:
    once = halved(quantized(vit))
    twice = halved(once)
    assert all(torch.equal(v, twice.state_dict()[k]) for k, v in once.state_dict().items())


def test_the_given_model_stays_as_it_is(vit: Case) -> None:
    model = quantized(vit)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    halved(model)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())


@pytest.mark.parametrize("value", [1e6, 1e-7])
def test_a_tensor_out_of_range_stays_as_it_is(vit: Case, value: float) -> None:
    model = quantized(vit)
    parameter = model.get_submodule("norm").weight
    assert isinstance(parameter, Tensor)
    with torch.no_grad():
        parameter.fill_(value * 1.2345)
    kept = halved(model).get_submodule("norm").weight
    assert torch.equal(kept, parameter)  # type: ignore[arg-type]


def test_a_rounded_model_is_saved_exactly_and_in_half_the_bytes(vit: Case, tmp_path: Path) -> None:
    model = quantized(vit)
    rounded = halved(model)
    content = checkpoint_bytes(rounded, USER, {})
    layers = [m for m in model.modules() if isinstance(m, QuantLayer)]
    numbers = sum(p.numel() for p in model.parameters()) + sum(2 * len(m.bias) for m in layers)
    saved = len(checkpoint_bytes(model, USER, {})) - len(content)
    # offsets in the header take fewer digits too
    assert 2 * numbers <= saved <= 2 * numbers + 200
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    loaded = load_checkpoint(path, vit.original)
    assert loaded.state_dict()["norm.weight"].dtype == torch.float32
    images = vit.samples.images
    with torch.no_grad():
        assert torch.equal(loaded(images), rounded(images))
