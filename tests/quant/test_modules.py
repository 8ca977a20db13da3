from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lampq.errors import GraphError
from lampq.quant.fold import NormFold
from lampq.quant.log import LogQuantizer
from lampq.quant.modules import (
    LayerFit,
    MatmulFit,
    QuantConv2d,
    QuantLinear,
    QuantMatMul,
    assemble,
    quantized_layer,
    replace_module,
)
from lampq.quant.uniform import UniformQuantizer
from lampq.types import LayerBits, LayerRole, LayerSpec, MatmulSpec

BITS = LayerBits(3, 4)


class Product(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b


class Small(nn.Module):
    """A norm, a linear layer and a product, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6, dtype=torch.float64)
        self.fc = nn.Linear(6, 5, dtype=torch.float64)
        self.product = Product()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(self.norm(x))
        mixed: Tensor = self.product(y, y.transpose(-2, -1))
        return mixed


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def _fit(weight: Tensor, *, inputs: bool = True, fold: NormFold | None = None) -> LayerFit:
    flat = weight.flatten(1)
    low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    grid = UniformQuantizer.between(BITS.weight, low, high, whole=True)
    bounds = torch.tensor([-2.0, 2.0], dtype=torch.float64)
    return LayerFit(
        spec=LayerSpec("fc", LayerRole.FC1, 0, weight.numel(), norm="norm"),
        bits=BITS,
        codes=grid.encode(flat),
        bias=_normal(len(flat)),
        weight_quantizer=grid,
        input_quantizer=UniformQuantizer.between(BITS.activation, *bounds, whole=True)
        if inputs
        else None,
        fold=fold,
    )


@pytest.fixture
def small() -> Small:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Small()


def test_a_fit_gives_the_weight_its_codes_stand_for() -> None:
    weight = _normal(5, 6)
    fit = _fit(weight)
    assert torch.equal(fit.weight, fit.weight_quantizer(weight))


@pytest.mark.parametrize("inputs", [True, False], ids=["quantized", "float"])
def test_a_quantized_linear_layer_multiplies_decoded_codes(inputs: bool) -> None:
    fit = _fit(_normal(5, 6), inputs=inputs)
    x = _normal(2, 3, 6)
    received = x if fit.input_quantizer is None else fit.input_quantizer(x)
    expected = F.linear(received, fit.weight_quantizer.decode(fit.codes), fit.bias)
    assert torch.equal(QuantLinear(fit, (5, 6))(x), expected)


def test_a_quantized_convolution_is_one_of_the_decoded_weight() -> None:
    conv = nn.Conv2d(3, 5, 4, stride=4, dtype=torch.float64)
    fit = _fit(conv.weight.detach(), inputs=False)
    x = _normal(2, 3, 8, 8)
    expected = F.conv2d(x, fit.weight.view(5, 3, 4, 4), fit.bias, stride=4)
    assert torch.equal(QuantConv2d(fit, conv)(x), expected)


def test_a_quantized_product_quantizes_both_operands() -> None:
    one = torch.ones(1, dtype=torch.float64)
    left = LogQuantizer.log2(3, one)
    right = UniformQuantizer.between(4, -one, one, whole=True)
    a, b = _normal(2, 3, 4).abs(), _normal(2, 4, 3)
    fit = MatmulFit(MatmulSpec("product", "av", 0), left, right)
    assert torch.equal(QuantMatMul(fit)(a, b), left(a) @ right(b))


def test_codes_of_eight_bits_fit_in_a_byte() -> None:
    weight = _normal(5, 600)
    low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    grid = UniformQuantizer.between(8, low, high, whole=False)
    spec = LayerSpec("fc", LayerRole.FC1, 0, weight.numel())
    fit = LayerFit(spec, LayerBits(8, 8), grid.encode(weight), _normal(5), grid, None)
    layer = QuantLinear(fit, (5, 600))
    assert int(layer.codes.max()) == 255
    assert torch.equal(grid.decode(layer.codes), layer.weight)


def test_the_decoded_weight_is_not_stored() -> None:
    stored = QuantLinear(_fit(_normal(5, 6)), (5, 6)).state_dict()
    assert "weight" not in stored
    assert stored["codes"].dtype == torch.uint8


def test_a_layer_prints_its_widths() -> None:
    assert "bits=3/4" in repr(QuantLinear(_fit(_normal(5, 6)), (5, 6)))


def test_something_that_is_no_linear_layer_is_refused_by_name_and_type() -> None:
    with pytest.raises(GraphError, match="'fc' is a ReLU, not a linear layer"):
        quantized_layer(_fit(_normal(5, 6)), nn.ReLU())


def test_a_module_is_put_at_a_dotted_name() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.ReLU())
    tanh = nn.Tanh()
    replace_module(model, "0.0", tanh)
    assert model[0][0] is tanh
    assert isinstance(model[1], nn.ReLU)


def test_a_module_is_put_at_the_top_of_the_model(small: Small) -> None:
    tanh = nn.Tanh()
    replace_module(small, "fc", tanh)
    assert small.fc is tanh


def test_assembling_replaces_the_fitted_sites(small: Small) -> None:
    fit = _fit(small.fc.weight.detach())
    one = torch.ones(1, dtype=torch.float64)
    grid = UniformQuantizer.between(4, -one, one, whole=True)
    quantized = assemble(small, [fit], [MatmulFit(MatmulSpec("product", "qk", 0), grid, grid)])
    assert isinstance(quantized.fc, QuantLinear)
    assert isinstance(quantized.product, QuantMatMul)


def test_assembling_leaves_the_float_model_alone(small: Small) -> None:
    before = copy.deepcopy(small.state_dict())
    fold = NormFold(torch.full((6,), 2.0).double(), torch.ones(6).double())
    assemble(small, [_fit(small.fc.weight.detach(), fold=fold)])
    assert isinstance(small.fc, nn.Linear)
    assert small.fc.weight.requires_grad
    assert all(torch.equal(small.state_dict()[name], tensor) for name, tensor in before.items())


def test_an_assembled_model_is_frozen_and_in_evaluation_mode(small: Small) -> None:
    quantized = assemble(small.train(), [_fit(small.fc.weight.detach())])
    assert not any(parameter.requires_grad for parameter in quantized.parameters())
    assert not any(module.training for module in quantized.modules())


def test_a_fold_changes_nothing_where_the_weight_is_already_on_the_grid(small: Small) -> None:
    fold = NormFold(ratio=_normal(6).abs() + 0.5, shift=_normal(6))
    on_grid = _fit(_normal(5, 6)).weight  # what the folded layer holds
    bias = _normal(5)
    with torch.no_grad():
        small.fc.weight.copy_(on_grid / fold.ratio)
        small.fc.bias.copy_(bias - on_grid @ fold.shift)
    fit = _fit(_normal(5, 6), inputs=False, fold=fold)
    x = _normal(2, 4, 6)
    expected = small(x).detach()
    # of_linear of the unfolded bias is the bias of the fit
    assert torch.allclose(fold.of_linear(small.fc.weight, small.fc.bias)[1], fit.bias)
    torch.testing.assert_close(assemble(small, [fit])(x), expected, rtol=1e-10, atol=1e-10)


def test_a_layer_without_fold_leaves_its_norm_as_it_is(small: Small) -> None:
    quantized = assemble(small, [_fit(small.fc.weight.detach())])
    assert torch.equal(quantized.norm.weight, small.norm.weight)
    assert torch.equal(quantized.norm.bias, small.norm.bias)
