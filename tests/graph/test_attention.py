from __future__ import annotations

import copy

import pytest
import torch
from conftest import Case
from timm.models.swin_transformer import WindowAttention
from timm.models.vision_transformer import Attention
from torch import Tensor, nn

from lampq.graph.attention import (
    ExplicitAttention,
    ExplicitWindowAttention,
    MatMul,
    explicit,
)

TOKENS, CHANNELS, HEADS = 9, 12, 3


def _tokens(count: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, TOKENS, CHANNELS, generator=generator)


def _built(**options: object) -> Attention:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        attention = Attention(CHANNELS, HEADS, **options).eval()
        for parameter in attention.parameters():
            parameter.data += 0.3 * torch.randn(parameter.shape)
    return attention


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"qkv_bias": True},
        {"qk_norm": True, "norm_layer": nn.LayerNorm},
        {"scale_norm": True, "norm_layer": nn.LayerNorm},
        {"attn_head_dim": 5},
        {"gated": True, "qkv_bias": True},
        {"proj_bias": False},
    ],
    ids=["plain", "bias", "qk-norm", "scale-norm", "narrow-heads", "gated", "no-proj-bias"],
)
@torch.no_grad()
def test_explicit_attention_equals_the_fused_one(options: dict[str, object]) -> None:
    attention = _built(**options)
    x = _tokens()
    torch.testing.assert_close(ExplicitAttention(attention)(x), attention(x))


@pytest.mark.parametrize("mask", ["bool", "float", "causal"])
@torch.no_grad()
def test_explicit_attention_masks_as_the_fused_one(mask: str) -> None:
    attention = _built(qkv_bias=True)
    x = _tokens()
    allowed = torch.rand(TOKENS, TOKENS, generator=torch.Generator().manual_seed(1)) < 0.7
    allowed.fill_diagonal_(True)
    arguments = {
        "bool": {"attn_mask": allowed},
        "float": {"attn_mask": torch.where(allowed, 0.5, -2.0)},
        "causal": {"is_causal": True},
    }[mask]
    masked = attention(x, **arguments)
    assert not torch.allclose(masked, attention(x))
    torch.testing.assert_close(ExplicitAttention(attention)(x, **arguments), masked)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("masked", [True, False], ids=["masked", "free"])
@torch.no_grad()
def test_explicit_window_attention_equals_the_original(fused: bool, masked: bool) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        attention = WindowAttention(CHANNELS, HEADS, window_size=3).eval()
        attention.relative_position_bias_table.data.normal_()
    attention.fused_attn = fused
    mask = None
    if masked:
        allowed = torch.rand(4, TOKENS, TOKENS, generator=torch.Generator().manual_seed(1)) < 0.7
        mask = torch.where(allowed, 0.0, -100.0)
    x = _tokens(8)  # two images of four windows
    expected = attention(x, mask)
    torch.testing.assert_close(ExplicitWindowAttention(attention)(x, mask), expected)


@torch.no_grad()
def test_the_explicit_model_gives_the_output_of_the_original(case: Case) -> None:
    images = case.samples.images
    torch.testing.assert_close(case.model(images), case.original(images), rtol=1e-5, atol=1e-5)


def test_every_attention_has_two_matmuls(case: Case) -> None:
    matmuls = [name for name, module in case.model.named_modules() if isinstance(module, MatMul)]
    assert len(matmuls) == 2 * len(case.graph.blocks)


def test_the_original_model_is_left_alone(vit: Case) -> None:
    original = copy.deepcopy(vit.original).train()
    before = copy.deepcopy(original.state_dict())
    explicit(original)
    assert original.training
    assert all(parameter.requires_grad for parameter in original.parameters())
    assert not any(isinstance(module, MatMul) for module in original.modules())
    assert all(torch.equal(original.state_dict()[name], t) for name, t in before.items())


def test_the_explicit_model_is_frozen_and_in_evaluation_mode(vit: Case) -> None:
    model = explicit(copy.deepcopy(vit.original).train())
    assert not any(module.training for module in model.modules())
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_the_explicit_model_holds_the_same_parameters_by_name(case: Case) -> None:
    assert case.model.state_dict().keys() == case.original.state_dict().keys()


class _Subclass(Attention):
    def forward(self, x: Tensor, **_named: object) -> Tensor:
        return x


def test_a_subclass_that_may_compute_something_else_is_left_as_it_is() -> None:
    model = nn.Sequential(_Subclass(CHANNELS, HEADS))
    assert type(explicit(model)[0]) is _Subclass
