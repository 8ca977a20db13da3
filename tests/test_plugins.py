"""The contract of everything that is registered: registering is being tested."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable

import pytest
import torch
from conftest import Case, same_fit, same_quantizer

from lampq.artifact.onnx.sites import runs_in_integers
from lampq.calibrate import LayerStats, MatmulStats
from lampq.config import make_config
from lampq.methods import METHODS, FitCache, LinearView, SiteWidths
from lampq.methods.base import layer_output
from lampq.prepare import options_of
from lampq.quant.base import KINDS, CodedQuantizer, Quantizer, describe, rebuild
from lampq.quant.log import LogQuantizer
from lampq.quant.modules import QuantLinear, QuantMatMul, applied, assemble
from lampq.quant.prefix import PrefixQuantizer
from lampq.quant.token import TokenLogQuantizer, TokenQuantizer
from lampq.quant.twin import TwinGeluQuantizer, TwinSoftmaxQuantizer
from lampq.quant.uniform import UniformQuantizer
from lampq.types import BitPlan, LayerBits, LayerRole, LayerSpec, MatmulSpec

SITES = [
    ("vit", "patch_embed.proj"),
    ("vit", "blocks.0.attn.qkv"),
    ("vit", "blocks.0.attn.proj"),
    ("vit", "blocks.0.mlp.fc1"),
    ("vit", "blocks.0.mlp.fc2"),
    ("vit", "head"),
    ("swin", "layers.1.downsample.reduction"),
]
methods = pytest.mark.parametrize("method", list(METHODS))
sites = pytest.mark.parametrize(("model", "layer"), SITES, ids=[layer for _, layer in SITES])


def _arguments(
    request: pytest.FixtureRequest, model: str, layer: str
) -> tuple[LinearView, LayerStats]:
    case: Case = request.getfixturevalue(model)
    spec = case.graph.layer(layer)
    stats = case.stats[layer]
    assert isinstance(stats, LayerStats)
    return LinearView.of(case.model, spec), stats


@methods
def test_a_method_carries_the_name_it_is_registered_by(method: str) -> None:
    assert METHODS.get(method)().name == method


@methods
@sites
@pytest.mark.parametrize("width", [*range(1, 9), 10])
def test_every_width_gives_a_finite_layer_with_codes_in_range(
    request: pytest.FixtureRequest, method: str, model: str, layer: str, width: int
) -> None:
    view, stats = _arguments(request, model, layer)
    bits = LayerBits(width, width)
    fit = METHODS.get(method)().fit(view, bits, stats)
    assert (fit.spec, fit.bits) == (view.spec, bits)
    assert fit.codes.shape == view.weight.shape
    assert fit.weight_quantizer.bits == width
    assert 0 <= int(fit.codes.min()) <= int(fit.codes.max()) < 2**width
    assert bool(torch.isfinite(layer_output(fit, stats.inputs)).all())


@methods
@sites
def test_inputs_have_the_asked_width_but_for_pictures(
    request: pytest.FixtureRequest, method: str, model: str, layer: str
) -> None:
    view, stats = _arguments(request, model, layer)
    quantizer = METHODS.get(method)().fit(view, LayerBits(8, 3), stats).input_quantizer
    if view.spec.role is LayerRole.PATCH_EMBED:
        assert quantizer is None or quantizer.bits >= 8
    else:
        assert quantizer is not None
        assert quantizer.bits == 3


@methods
@sites
def test_a_fit_is_the_same_every_time(
    request: pytest.FixtureRequest, method: str, model: str, layer: str
) -> None:
    view, stats = _arguments(request, model, layer)
    first = METHODS.get(method)().fit(view, LayerBits(3, 4), stats)
    torch.rand(1)
    assert same_fit(first, METHODS.get(method)().fit(view, LayerBits(3, 4), stats))


@methods
@sites
def test_fitting_writes_into_no_tensor(
    request: pytest.FixtureRequest, method: str, model: str, layer: str
) -> None:
    view, stats = _arguments(request, model, layer)
    given = [view.weight, view.bias, stats.inputs]
    before = [tensor.clone() for tensor in given]
    METHODS.get(method)().fit(view, LayerBits(2, 2), stats)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


@methods
@sites
@pytest.mark.parametrize("width", [1, 4, 8])
def test_for_speed_every_quantized_input_has_one_uniform_scale(
    request: pytest.FixtureRequest, method: str, model: str, layer: str, width: int
) -> None:
    view, stats = _arguments(request, model, layer)
    factory = METHODS.get(method)
    options = options_of(factory, make_config({"profile": "speed"}))
    fit = factory(**options).fit(view, LayerBits(width, width), stats)
    linear = view.spec.role is not LayerRole.PATCH_EMBED
    assert linear or fit.input_quantizer is None or fit.input_quantizer.bits == 8
    if fit.input_quantizer is not None:
        assert runs_in_integers(QuantLinear(fit, tuple(fit.codes.shape)))


@methods
@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("kind", ["qk", "av"])
def test_every_width_gives_a_finite_product(vit: Case, method: str, kind: str, width: int) -> None:
    site = next(site for site in vit.graph.matmuls if site.kind == kind)
    stats = vit.stats[site.name]
    assert isinstance(stats, MatmulStats)
    left, right = stats.left.clone(), stats.right.clone()
    fit = METHODS.get(method)().fit_matmul(site, width, 9 - width, stats)
    again = METHODS.get(method)().fit_matmul(site, width, 9 - width, stats)
    assert fit.left is None or fit.left.bits == width
    assert fit.right is None or fit.right.bits == 9 - width
    assert bool(torch.isfinite(QuantMatMul(fit)(left, right)).all())
    assert torch.equal(stats.left, left)
    assert torch.equal(stats.right, right)
    assert same_quantizer(fit.left, again.left)
    assert same_quantizer(fit.right, again.right)
    assert same_quantizer(fit.output, again.output)


DEGENERATE = {
    "all-zero": torch.zeros(40, 8),
    "constant": torch.full((40, 8), 0.7),
    "one-token": torch.linspace(-1, 1, 8)[None],
    "dead-channel": torch.linspace(-1, 1, 320).view(40, 8) * (torch.arange(8) > 0),
    "huge": torch.linspace(-1e4, 1e4, 320).view(40, 8),
    "tiny": torch.linspace(-1e-6, 1e-6, 320).view(40, 8),
}
LAYERS = {
    "qkv": LayerSpec("b.attn.qkv", LayerRole.QKV, 0, 48, norm="b.norm1"),
    "proj": LayerSpec("b.attn.proj", LayerRole.PROJ, 0, 48),
    "fc2": LayerSpec("b.mlp.fc2", LayerRole.FC2, 0, 48),
}


@methods
@pytest.mark.parametrize("inputs", DEGENERATE.values(), ids=DEGENERATE)
@pytest.mark.parametrize("spec", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("width", [1, 4])
def test_inputs_without_much_in_them_are_fitted(
    method: str, inputs: torch.Tensor, spec: LayerSpec, width: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(6, 8, generator=generator), torch.randn(6, generator=generator)
    bits = LayerBits(width, width)
    fit = METHODS.get(method)().fit(LinearView(spec, weight, bias), bits, LayerStats(inputs))
    assert bool(torch.isfinite(layer_output(fit, inputs)).all())


@methods
@pytest.mark.parametrize("spec", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("width", [1, 4])
def test_rows_of_equal_weights_are_fitted(method: str, spec: LayerSpec, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.stack([torch.zeros(8), torch.full((8,), 0.3), torch.full((8,), -2.0)])
    inputs = torch.randn(40, 8, generator=generator)
    view = LinearView(spec, weight, torch.zeros(3))
    fit = METHODS.get(method)().fit(view, LayerBits(width, width), LayerStats(inputs))
    assert bool(torch.isfinite(layer_output(fit, inputs)).all())


@methods
def test_attention_on_one_token_only_is_fitted(method: str) -> None:
    left = torch.eye(5).expand(2, 3, 5, 5)
    stats = MatmulStats(left, torch.zeros(2, 3, 5, 4))
    fit = METHODS.get(method)().fit_matmul(MatmulSpec("b.attn.av", "av", 0), 4, 4, stats)
    torch.testing.assert_close(applied(fit.left, left), left.contiguous())
    assert torch.equal(applied(fit.right, stats.right), stats.right)


@methods
@torch.no_grad()
def test_a_whole_model_at_eight_bits_is_close_to_float(vit: Case, method: str) -> None:
    sites = SiteWidths(LayerBits(8, 8), None)
    fits = FitCache(vit.model, vit.graph, METHODS.get(method)(), vit.stats, sites)
    before = copy.deepcopy(vit.model.state_dict())
    plan = BitPlan.uniform(vit.graph.allocatable, LayerBits(8, 8))
    quantized = assemble(vit.model, *fits.of_plan(plan))
    exact = vit.model(vit.samples.images)
    error = float((quantized(vit.samples.images) - exact).norm() / exact.norm())
    assert 0 < error < 0.1
    assert all(torch.equal(vit.model.state_dict()[name], t) for name, t in before.items())


def _uniform(bits: int) -> Quantizer:
    return UniformQuantizer.between(bits, torch.tensor(-1.5), torch.tensor(2.0), whole=True)


def _log(bits: int) -> Quantizer:
    shift = torch.tensor([0.17])
    return LogQuantizer(bits, torch.tensor([2.0]), shift, shift, step=20, zero_code="reserved")


def _twin_softmax(bits: int) -> Quantizer:
    return TwinSoftmaxQuantizer.splitting(bits, torch.tensor(0.125))


def _twin_gelu(bits: int) -> Quantizer:
    return TwinGeluQuantizer.reaching(bits, torch.tensor(0.17), torch.tensor(0.3))


def _token(bits: int) -> Quantizer:
    return TokenQuantizer(bits, torch.tensor(0.8))


def _token_log(bits: int) -> Quantizer:
    return TokenLogQuantizer(bits, torch.tensor([0.8]), torch.tensor([0.17]), step=20)


def _prefix(bits: int) -> Quantizer:
    return PrefixQuantizer(bits, _token(8), _uniform(bits), count=1)


EXAMPLES: dict[str, Callable[[int], Quantizer]] = {
    "uniform": _uniform,
    "log": _log,
    "twin_softmax": _twin_softmax,
    "twin_gelu": _twin_gelu,
    "token": _token,
    "token_log": _token_log,
    "prefix": _prefix,
}
kinds = pytest.mark.parametrize("kind", list(KINDS))
widths = pytest.mark.parametrize("bits", range(1, 11))
# two tokens, so that a prefix of one leaves something
X = torch.cat([torch.linspace(-3, 3, 500), torch.tensor([0.0, 1e20, -1e20])]).repeat(2, 1)


def test_every_kind_of_quantizer_has_an_example_here() -> None:
    assert set(EXAMPLES) == set(KINDS)


@kinds
@widths
def test_codes_of_every_kind_are_whole_and_in_range(kind: str, bits: int) -> None:
    quantizer = EXAMPLES[kind](bits)
    codes = quantizer.encode(X)
    assert codes.dtype == torch.int32
    assert codes.shape == X.shape
    assert 0 <= int(codes.min()) <= int(codes.max()) < quantizer.n_codes


@kinds
@widths
def test_the_forward_pass_of_every_kind_has_one_value_for_each_code(kind: str, bits: int) -> None:
    quantizer = EXAMPLES[kind](bits)
    if isinstance(quantizer, CodedQuantizer):
        assert torch.equal(quantizer.decode(quantizer.encode(X)), quantizer(X))
    for values, codes in zip(quantizer(X), quantizer.encode(X), strict=True):
        for code in codes.unique():
            assert len(values[codes == code].unique()) == 1


@kinds
@widths
def test_every_kind_is_rebuilt_from_its_header_and_tensors(kind: str, bits: int) -> None:
    quantizer = EXAMPLES[kind](bits)
    header = json.loads(json.dumps(describe(quantizer)))
    again = rebuild(header, quantizer.state_dict())
    assert same_quantizer(again, quantizer)
    assert torch.equal(again(X), quantizer(X))


@kinds
@widths
def test_every_kind_leaves_its_input_alone(kind: str, bits: int) -> None:
    x = X.clone()
    EXAMPLES[kind](bits)(x)
    assert torch.equal(x, X)


@kinds
def test_every_kind_has_no_parameter_to_train(kind: str) -> None:
    assert list(EXAMPLES[kind](4).parameters()) == []


@kinds
def test_every_kind_follows_the_type_of_its_tensors(kind: str) -> None:
    quantizer = EXAMPLES[kind](4).double()
    assert quantizer(X.double()).dtype == torch.float64
