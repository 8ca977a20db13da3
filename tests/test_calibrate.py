from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import TypeVar

import pytest
import torch
from conftest import Case
from torch import Tensor, nn
from torch.nn import functional as F

from lampq.calibrate import LayerStats, MatmulStats, collect
from lampq.data import Samples
from lampq.errors import GraphError
from lampq.hooks import recording
from lampq.passes import drawn_labels
from lampq.progress import Progress
from lampq.tokens import tokens_of
from lampq.types import LayerRole, LayerSpec, ModelGraph

T = TypeVar("T")

ONE = ModelGraph((LayerSpec("1", LayerRole.FC1, 0, 12),), (), ())


@pytest.fixture
def plain() -> nn.Module:
    """A linear layer that sees four tokens of three channels a picture."""
    return nn.Sequential(nn.Flatten(2), nn.Linear(3, 4)).eval()


def _numbered(count: int) -> Samples:
    """Pictures whose four tokens hold different numbers."""
    return Samples(torch.arange(count * 12.0).view(count, 4, 1, 3))


def _rows(stats: object) -> Tensor:
    assert isinstance(stats, LayerStats)
    return stats.inputs


@torch.no_grad()
def test_every_layer_gives_its_own_output_from_its_recorded_inputs(case: Case) -> None:
    seen: dict[str, Tensor] = {}
    model = copy.deepcopy(case.model)
    for layer in case.graph.layers:
        model.get_submodule(layer.name).register_forward_hook(
            lambda _m, _i, output, name=layer.name: seen.update({name: output})
        )
    model(case.samples.images)
    for layer in case.graph.layers:
        module = case.model.get_submodule(layer.name)
        inputs = _rows(case.stats[layer.name])
        got = F.linear(inputs, module.weight.flatten(1), module.bias)
        wanted = seen[layer.name]
        if isinstance(module, nn.Conv2d):
            wanted = wanted.permute(0, 2, 3, 1)
        torch.testing.assert_close(got, wanted.flatten(0, -2), rtol=1e-4, atol=1e-4)


def test_matmul_operands_fit_together(case: Case) -> None:
    for site in case.graph.matmuls:
        stats = case.stats[site.name]
        assert isinstance(stats, MatmulStats)
        assert stats.left.ndim == stats.right.ndim == 4
        assert stats.left.shape[:2] == stats.right.shape[:2]
        assert stats.left.shape[3] == stats.right.shape[2]


def test_the_left_operand_of_the_value_product_is_a_softmax(case: Case) -> None:
    for site in case.graph.matmuls:
        if site.kind == "av":
            sums = case.stats[site.name].left.sum(dim=-1)
            torch.testing.assert_close(sums, torch.ones_like(sums))


def test_every_site_of_the_graph_has_statistics(case: Case) -> None:
    sites = (*case.graph.layers, *case.graph.matmuls, *case.graph.sums)
    names = [site.name for site in sites]
    assert list(case.stats) == names


def test_all_tokens_are_kept_where_there_are_few(plain: nn.Module) -> None:
    samples = _numbered(5)
    kept = _rows(collect(plain, ONE, samples, max_tokens=100, batch=2)["1"])
    assert torch.equal(kept, samples.images.reshape(-1, 3))


@pytest.mark.parametrize("batch", [1, 3, 4, 5, 16, 100])
@pytest.mark.parametrize("max_tokens", [8, 20, 39])
def test_no_more_tokens_are_kept_than_asked_for(
    plain: nn.Module, max_tokens: int, batch: int
) -> None:
    kept = _rows(collect(plain, ONE, _numbered(10), max_tokens=max_tokens, batch=batch)["1"])
    assert len(kept) <= max_tokens


@pytest.mark.parametrize("batch", [1, 3, 4, 16])
def test_no_more_attention_maps_are_kept_than_asked_for(vit: Case, batch: int) -> None:
    stats = collect(vit.model, vit.graph, vit.samples, max_maps=4, batch=batch)
    for site in vit.graph.matmuls:
        assert len(stats[site.name].left) <= 4


def test_kept_tokens_are_tokens_of_the_samples_each_at_most_once(plain: nn.Module) -> None:
    samples = _numbered(8)
    kept = _rows(collect(plain, ONE, samples, max_tokens=16, batch=4)["1"])
    rows = {tuple(row) for row in samples.images.reshape(-1, 3).tolist()}
    chosen = [tuple(row) for row in kept.tolist()]
    assert set(chosen) <= rows
    assert len(set(chosen)) == len(chosen) == 16


def test_the_same_seed_keeps_the_same_tokens(plain: nn.Module) -> None:
    first, again = (collect(plain, ONE, _numbered(8), max_tokens=8, seed=1)["1"] for _ in range(2))
    assert torch.equal(_rows(first), _rows(again))


def test_another_seed_keeps_other_tokens(plain: nn.Module) -> None:
    first, other = (
        collect(plain, ONE, _numbered(8), max_tokens=8, batch=8, seed=seed)["1"] for seed in (1, 2)
    )
    assert not torch.equal(_rows(first), _rows(other))


def test_the_progress_of_collecting_is_shown_by_batches(vit: Case) -> None:
    class Counting(Progress):
        def track(self, items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
            said.append((label, total))
            for item in items:
                yield item
                steps.append(label)

    said: list[tuple[str, int | None]] = []
    steps: list[str] = []
    collect(vit.model, vit.graph, vit.samples, batch=2, progress=Counting())
    batches = -(-len(vit.samples) // 2)
    assert said == [("inputs of layers", batches)]
    assert len(steps) == batches


def test_collecting_does_not_touch_the_global_generator(vit: Case) -> None:
    before = torch.get_rng_state()
    collect(vit.model, vit.graph, vit.samples, max_tokens=4)
    assert torch.equal(torch.get_rng_state(), before)


class OneTokenCounts(nn.Module):
    """A classifier that looks at the first of four tokens only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(2))[:, 0]


LOOKED_AT = ModelGraph((LayerSpec("layer", LayerRole.FC1, 0, 12),), (), ())


def test_tokens_that_matter_are_drawn_more_often() -> None:
    samples = Samples(torch.randn(8, 4, 1, 3, generator=torch.Generator().manual_seed(0)))
    stats = collect(OneTokenCounts(), LOOKED_AT, samples, tokens="fisher", max_tokens=4000)
    first = samples.images[:, 0, 0]
    share = (_rows(stats["layer"])[:, None] == first).all(dim=-1).any(dim=1).double().mean()
    # one half by weight, and a quarter of the half that is drawn evenly
    assert float(share) == pytest.approx(0.625, abs=0.03)


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_drawing_by_weight_keeps_the_number_of_tokens(case: Case, batch: int) -> None:
    stats = collect(
        case.model, case.graph, case.samples, tokens="fisher", max_tokens=30, batch=batch
    )
    assert {len(_rows(stats[layer.name])) for layer in case.graph.layers} == {30}


def test_drawing_by_weight_repeats_with_the_seed(case: Case) -> None:
    first, again, other = (
        collect(case.model, case.graph, case.samples, tokens="fisher", max_tokens=9, seed=seed)
        for seed in (1, 1, 2)
    )
    name = case.graph.layers[1].name
    assert torch.equal(_rows(first[name]), _rows(again[name]))
    assert not torch.equal(_rows(first[name]), _rows(other[name]))


def test_drawn_tokens_are_inputs_of_their_layer(case: Case) -> None:
    stats = collect(case.model, case.graph, case.samples, tokens="fisher", max_tokens=16)
    for layer in case.graph.layers:
        everything = _rows(case.stats[layer.name])
        drawn = _rows(stats[layer.name])
        distance = (drawn[:, None] - everything).abs().amax(dim=-1).amin(dim=1)
        assert float(distance.max()) < 1e-3, layer.name


def test_a_layer_without_gradient_is_drawn_evenly() -> None:
    class Cut(OneTokenCounts):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.flatten(2).detach())[:, 0] + 0 * x.sum()

    model = Cut().requires_grad_(False)
    samples = _numbered(4)
    kept = _rows(collect(model, LOOKED_AT, samples, tokens="fisher", max_tokens=100)["layer"])
    assert torch.equal(kept, samples.images.reshape(-1, 3))


def test_a_layer_that_is_never_called_is_named() -> None:
    model = nn.Sequential(nn.Flatten(2))
    model.add_module("spare", nn.ModuleList([nn.Linear(3, 4)]))
    model.forward = lambda x: x  # type: ignore[method-assign]
    graph = ModelGraph((LayerSpec("spare.0", LayerRole.FC1, 0, 12),), (), ())
    with pytest.raises(GraphError, match=r"'spare\.0' is never called"):
        collect(model, graph, _numbered(2))


def test_a_patch_embedding_is_a_matrix_on_its_tokens() -> None:
    conv = nn.Conv2d(3, 5, (2, 4), stride=(2, 4), dtype=torch.float64)
    images = torch.randn(
        2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    tokens = tokens_of(conv, images)
    got = F.linear(tokens, conv.weight.flatten(1), conv.bias)
    torch.testing.assert_close(got, conv(images).permute(0, 2, 3, 1).flatten(0, -2))


def test_hooks_leave_when_the_context_ends(plain: nn.Module) -> None:
    with recording(plain, ["1"]) as seen:
        plain(_numbered(1).images)
    seen.clear()
    plain(_numbered(1).images)
    assert seen == {}


def test_hooks_leave_when_the_forward_pass_fails(plain: nn.Module) -> None:
    with pytest.raises(RuntimeError), recording(plain, ["1"]):
        plain(torch.zeros(1, 4, 1, 7))
    assert len(plain[1]._forward_pre_hooks) == 0


@pytest.mark.parametrize("tokens", ["uniform", "fisher"])
def test_gradients_and_blocks_are_there_only_if_asked_for(vit: Case, tokens: str) -> None:
    stats = collect(vit.model, vit.graph, vit.samples, tokens=tokens)  # type: ignore[arg-type]
    assert all(one.gradients is None and one.block is None for one in stats.values())


def _logits_gradient(model: nn.Module, images: Tensor, seed: int) -> Tensor:
    """By hand: softmax minus the label drawn with that seed."""
    with torch.no_grad():
        probabilities = model(images).softmax(dim=1)
    labels = drawn_labels(probabilities.log(), torch.Generator().manual_seed(seed))
    return probabilities - F.one_hot(labels, probabilities.shape[1])


def test_gradients_at_the_logits_are_those_of_drawn_labels(vit: Case) -> None:
    stats = collect(vit.model, vit.graph, vit.samples, gradients=True, seed=5)["head"]
    expected = _logits_gradient(vit.model, vit.samples.images, seed=5)
    assert stats.gradients is not None
    torch.testing.assert_close(stats.gradients, expected)


def test_gradients_belong_to_the_kept_tokens(case: Case) -> None:
    everything = collect(case.model, case.graph, case.samples, gradients=True, seed=1)
    few = collect(case.model, case.graph, case.samples, gradients=True, seed=1, max_tokens=12)
    for layer in case.graph.layers:
        whole, part = everything[layer.name], few[layer.name]
        assert isinstance(whole, LayerStats)
        assert isinstance(part, LayerStats)
        assert part.gradients is not None
        assert whole.gradients is not None
        assert part.gradients.shape == (12, len(case.model.get_submodule(layer.name).weight)) or (
            len(part.gradients) == len(part.inputs) <= 12
        )
        distance = (part.inputs[:, None] - whole.inputs).abs().amax(dim=-1)
        index = distance.argmin(dim=1)
        same = (part.gradients - whole.gradients[index]).abs().amax(dim=1) <= 1e-5
        # equal inputs, as of padding, may belong to another token
        assert bool((same | ((distance <= 1e-6).sum(dim=1) > 1)).all()), layer.name


def test_gradients_of_a_product_have_its_shape_and_bound(case: Case) -> None:
    stats = collect(case.model, case.graph, case.samples, gradients=True, max_maps=4)
    for site in case.graph.matmuls:
        one = stats[site.name]
        assert isinstance(one, MatmulStats)
        assert one.gradients is not None
        assert one.gradients.shape == (one.left @ one.right).shape
        assert len(one.gradients) <= 4
        assert float(one.gradients.abs().max()) > 0


def test_a_gradient_predicts_the_change_of_the_likelihood(vit: Case) -> None:
    model = copy.deepcopy(vit.model).double()
    images = vit.samples.images[:1].double()
    name = "blocks.1.attn.proj"
    stats = collect(model, vit.graph, Samples(images), gradients=True, seed=3)[name]
    assert stats.gradients is not None
    label = drawn_labels(model(images), torch.Generator().manual_seed(3))
    push = torch.randn(
        stats.gradients.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    losses = []
    for step in (-1e-5, 1e-5):
        handle = model.get_submodule(name).register_forward_hook(
            lambda _m, _i, output, step=step: output + step * push
        )
        losses.append(float(F.cross_entropy(model(images), label)))
        handle.remove()
    expected = float((stats.gradients * push).sum())
    assert (losses[1] - losses[0]) / 2e-5 == pytest.approx(expected, rel=1e-5)


def test_tokens_drawn_by_weight_stand_for_all_tokens() -> None:
    samples = Samples(torch.randn(8, 4, 1, 3, generator=torch.Generator().manual_seed(0)))
    model = OneTokenCounts()
    options = {"gradients": True, "max_tokens": 4000}
    exact = collect(model, LOOKED_AT, samples, **options)["layer"]  # type: ignore[arg-type]
    drawn = collect(model, LOOKED_AT, samples, tokens="fisher", **options)["layer"]  # type: ignore[arg-type]
    assert exact.gradients is not None
    assert drawn.gradients is not None
    means = [one.gradients.square().sum(dim=1).mean().item() for one in (exact, drawn)]
    assert means[1] == pytest.approx(means[0], rel=0.1)


def test_a_layer_that_nothing_depends_on_has_gradients_of_zero() -> None:
    class Cut(OneTokenCounts):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.flatten(2).detach())[:, 0] + 0 * x.sum()

    model = Cut().requires_grad_(False)
    stats = collect(model, LOOKED_AT, _numbered(4), gradients=True)["layer"]
    assert stats.gradients is not None
    assert torch.equal(stats.gradients, torch.zeros(16, 4))


@torch.no_grad()
def test_a_block_gives_its_output_from_its_view(case: Case) -> None:
    stats = collect(case.model, case.graph, case.samples, block_images=3)
    seen = 0
    for site in (*case.graph.layers, *case.graph.matmuls):
        view = stats[site.name].block
        if site.block < 0:
            assert view is None
            continue
        assert view is not None
        seen += 1
        assert view.name == case.graph.blocks[site.block]
        assert site.name.startswith(f"{view.name}.")
        assert len(view.output) == 3
        assert not view.output.requires_grad
        assert view.gradient.shape == view.output.shape
        got = view.module(*view.arguments, **view.keywords)
        torch.testing.assert_close(got, view.output)
    assert seen == 6 * len(case.graph.blocks)


def test_the_gradient_at_the_last_block_is_that_of_the_class_token(vit: Case) -> None:
    stats = collect(vit.model, vit.graph, vit.samples, block_images=2)
    view = stats["blocks.1.mlp.fc2"].block
    assert view is not None
    assert float(view.gradient[:, 1:].abs().max()) == 0
    assert float(view.gradient[:, 0].abs().min()) > 0


def test_collecting_leaves_no_hook_behind(vit: Case) -> None:
    collect(vit.model, vit.graph, vit.samples, gradients=True, block_images=2)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in vit.model.modules())
