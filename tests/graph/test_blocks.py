from __future__ import annotations

import copy

import pytest
import torch
from conftest import Case
from timm.models.vision_transformer import Block
from torch import nn

from lampq.calibrate import collect
from lampq.graph.attention import explicit
from lampq.graph.blocks import ExplicitBlock, Sum
from lampq.hooks import recording
from lampq.tokens import sum_tokens
from lampq.types import LayerRole


@torch.no_grad()
def test_explicit_sums_change_no_answer(case: Case) -> None:
    images = case.samples.images
    torch.testing.assert_close(case.model(images), case.original(images), rtol=1e-4, atol=1e-5)


def test_every_block_has_a_sum_behind_proj_and_one_behind_fc2(case: Case) -> None:
    blocks = range(len(case.graph.blocks))
    expected = [(block, role) for block in blocks for role in (LayerRole.PROJ, LayerRole.FC2)]
    assert sorted((site.block, site.role) for site in case.graph.sums) == sorted(expected)
    for site in case.graph.sums:
        assert isinstance(case.model.get_submodule(site.name), Sum)


@torch.no_grad()
def test_the_last_sum_of_a_block_is_its_output(case: Case) -> None:
    outputs: list[torch.Tensor] = []
    block = case.model.get_submodule(case.graph.blocks[-1])
    name = [site.name for site in case.graph.sums if site.block == len(case.graph.blocks) - 1][-1]
    handle = block.register_forward_hook(lambda _m, _a, output: outputs.append(output))
    with recording(case.model, [name]) as seen:
        case.model(case.samples.images)
    handle.remove()
    assert torch.equal(sum_tokens(seen[name]), outputs[0].flatten(0, -2))


@pytest.mark.parametrize("options", [{}, {"init_values": 0.3}], ids=["plain", "layer-scale"])
@torch.no_grad()
def test_an_explicit_block_passes_masks_on(options: dict[str, float]) -> None:
    torch.manual_seed(0)
    block = Block(12, 3, **options).eval()
    x = torch.randn(2, 5, 12)
    mask = torch.zeros(5, 5).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -1e9)
    opened = ExplicitBlock(copy.deepcopy(block))
    torch.testing.assert_close(opened(x, attn_mask=mask), block(x, attn_mask=mask))
    torch.testing.assert_close(opened(x), block(x))


def test_opening_twice_gives_the_same_modules(case: Case) -> None:
    names = [name for name, _ in case.model.named_modules()]
    assert [name for name, _ in explicit(case.model).named_modules()] == names


def test_a_copy_of_an_explicit_model_shares_nothing_with_it(case: Case) -> None:
    twin = copy.deepcopy(case.model)
    expected = case.model(case.samples.images)
    for module in twin.modules():
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.weight)
    assert torch.equal(case.model(case.samples.images), expected)


def test_sums_are_collected_only_if_asked_for(case: Case) -> None:
    plain = collect(case.model, case.graph, case.samples)
    more = collect(case.model, case.graph, case.samples, sums=case.graph.sums)
    assert set(more) - set(plain) == {site.name for site in case.graph.sums}
    for name, stats in plain.items():
        again = more[name]
        assert all(
            torch.equal(getattr(stats, part), getattr(again, part))
            for part in ("inputs", "left", "right")
            if hasattr(stats, part)
        )
