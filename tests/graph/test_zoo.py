"""What timm builds by name, with random weights and, for speed, fewer blocks and smaller images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import timm
import torch
from torch import nn

from lampq.calibrate import collect
from lampq.data import Samples
from lampq.evaluate import PrefixCache
from lampq.graph.attention import explicit
from lampq.graph.discover import discover, verify_norms, verify_prefix
from lampq.methods import METHODS, FitCache, SiteWidths
from lampq.quant.modules import QuantLayer, QuantMatMul, assemble
from lampq.types import SEARCHED_ROLES, BitPlan, LayerBits, LayerRole, ModelGraph

VIT: dict[str, Any] = {"depth": 2, "img_size": 64}
SWIN: dict[str, Any] = {
    "depths": (2, 1, 1),
    "num_heads": (2, 4, 8),
    "embed_dim": 32,
    "img_size": 112,
}


@dataclass(frozen=True)
class Expected:
    """What is to be found in a model: blocks, other layers, norms to fold, matmuls."""

    options: dict[str, Any]
    blocks: int = 2
    fixed: tuple[str, ...] = ("patch_embed.proj", "head")
    norms: int = 4
    matmuls: int = 4


SWIN_FIXED = (
    "patch_embed.proj",
    "layers.1.downsample.reduction",
    "layers.2.downsample.reduction",
    "head.fc",
)
IN_SWIN = Expected(SWIN, blocks=4, fixed=SWIN_FIXED, norms=10, matmuls=8)
ZOO = {
    "vit_tiny_patch16_224": Expected(VIT),
    "vit_small_patch32_224": Expected(VIT),
    "vit_base_patch16_224": Expected({**VIT, "depth": 1}, blocks=1, norms=2, matmuls=2),
    "vit_medium_patch16_gap_240": Expected(VIT),
    "vit_base_patch16_clip_224": Expected({**VIT, "depth": 1}, blocks=1, norms=2, matmuls=2),
    "vit_small_patch14_dinov2": Expected({**VIT, "img_size": 56}),
    "vit_wee_patch16_reg1_gap_256": Expected(VIT),
    "vit_tiny_patch16_224-qk_norm": Expected({**VIT, "qk_norm": True}),
    # its attention is not known: the layers are found, its matmuls stay in float
    "vit_relpos_small_patch16_224": Expected(VIT, matmuls=0),
    "deit_tiny_patch16_224": Expected(VIT),
    "deit_small_patch16_224": Expected(VIT),
    "deit_tiny_distilled_patch16_224": Expected(
        VIT, fixed=("patch_embed.proj", "head", "head_dist")
    ),
    "deit3_small_patch16_224": Expected(VIT),
    "swin_tiny_patch4_window7_224": IN_SWIN,
    "swin_small_patch4_window7_224": IN_SWIN,
    "swin_base_patch4_window7_224": IN_SWIN,
    "swin_s3_tiny_224": Expected(
        {**SWIN, "window_size": 7}, blocks=4, fixed=SWIN_FIXED, norms=10, matmuls=8
    ),
}


# class, distillation and register tokens, where they are not one
PREFIXES = {
    "vit_medium_patch16_gap_240": 0,
    "vit_relpos_small_patch16_224": 0,
    "vit_wee_patch16_reg1_gap_256": 1,
    "deit_tiny_distilled_patch16_224": 2,
}


@dataclass(frozen=True)
class Built:
    name: str
    expected: Expected
    original: nn.Module
    model: nn.Module
    graph: ModelGraph
    samples: Samples


@pytest.fixture(scope="module", params=ZOO)
def built(request: pytest.FixtureRequest) -> Built:
    """A model of timm with its parameters moved off their neutral initial values."""
    expected = ZOO[request.param]
    name = request.param.split("-")[0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        original = timm.create_model(name, pretrained=False, num_classes=10, **expected.options)
        with torch.no_grad():
            for parameter in original.eval().parameters():
                # LayerScale starts at 1e-6, where no block would matter
                parameter.add_(
                    torch.randn(parameter.shape), alpha=0.2 if parameter.ndim == 1 else 0.02
                )
        size = expected.options["img_size"]
        samples = Samples(torch.randn(2, 3, size, size))
    model = explicit(original)
    return Built(name, expected, original, model, discover(model), samples)


@torch.no_grad()
def test_the_explicit_form_leaves_the_float_output_unchanged(built: Built) -> None:
    images = built.samples.images
    before, after = built.original(images), built.model(images)
    assert float((after - before).norm() / before.norm()) < 1e-5


def test_every_block_has_its_four_layers(built: Built) -> None:
    assert len(built.graph.blocks) == built.expected.blocks
    for block in range(built.expected.blocks):
        roles = [layer.role for layer in built.graph.layers if layer.block == block]
        assert roles == list(SEARCHED_ROLES)


def test_the_layers_outside_the_blocks_are_found(built: Built) -> None:
    assert tuple(layer.name for layer in built.graph.fixed) == built.expected.fixed


def test_every_linear_layer_of_the_network_has_a_role(built: Built) -> None:
    known = {layer.name for layer in built.graph.layers}
    linear = {
        name
        for name, module in built.model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    }
    # the position bias of relpos is computed by a small network of its own
    assert {name for name in linear - known if "rel_pos" not in name} == set()


def test_the_matmuls_of_known_attentions_are_found(built: Built) -> None:
    assert len(built.graph.matmuls) == built.expected.matmuls


def test_the_tokens_before_the_patches_are_known(built: Built) -> None:
    found = {layer.prefix for layer in built.graph.layers if layer.role in SEARCHED_ROLES}
    found |= {site.prefix for site in built.graph.matmuls}
    assert found == {PREFIXES.get(built.name, 0 if "swin" in built.name else 1)}
    assert not any(layer.prefix for layer in built.graph.fixed)
    assert verify_prefix(built.model, built.graph, built.samples.images) == built.graph


def test_all_norms_are_found_and_proven(built: Built) -> None:
    verified = verify_norms(built.model, built.graph, built.samples.images)
    folded = [layer for layer in verified.layers if layer.norm is not None]
    assert len(folded) == built.expected.norms
    assert {layer.role for layer in folded} <= {
        LayerRole.QKV,
        LayerRole.FC1,
        LayerRole.REDUCTION,
    }


@torch.no_grad()
def test_a_run_from_the_last_block_equals_a_full_run(built: Built) -> None:
    cache = PrefixCache(built.model, built.graph.blocks, built.samples)
    found = cache.predict(built.model, len(built.graph.blocks) - 1)
    torch.testing.assert_close(found, built.model(built.samples.images))


def _quantized(built: Built, method: str) -> nn.Module:
    graph = verify_norms(built.model, built.graph, built.samples.images)
    stats = collect(built.model, graph, built.samples, max_tokens=128, max_maps=2)
    sites = SiteWidths(LayerBits(8, 8), None)
    fits = FitCache(built.model, graph, METHODS.get(method)(), stats, sites)
    plan = BitPlan.uniform(graph.allocatable, LayerBits(4, 4))
    return assemble(built.model, *fits.of_plan(plan))


@torch.no_grad()
def test_four_bits_between_the_extremes_give_a_finite_output(built: Built) -> None:
    quantized = _quantized(built, "minmax")
    sites = [m for m in quantized.modules() if isinstance(m, QuantLayer | QuantMatMul)]
    output = quantized(built.samples.images)
    assert len(sites) == len(built.graph.layers) + len(built.graph.matmuls)
    assert output.shape == (2, 10)
    assert bool(torch.isfinite(output).all())
    assert not torch.equal(output, built.model(built.samples.images))


@pytest.mark.parametrize(
    "built", ["deit_tiny_distilled_patch16_224", "swin_tiny_patch4_window7_224"], indirect=True
)
@torch.no_grad()
def test_four_bits_by_adalog_are_nearer_to_float_than_between_the_extremes(built: Built) -> None:
    exact = built.model(built.samples.images)
    searched, plain = (
        float((_quantized(built, method)(built.samples.images) - exact).norm())
        for method in ("adalog", "minmax")
    )
    assert searched < plain
