from __future__ import annotations

import copy
import math

import pytest
import torch
from conftest import Case
from timm.models.vision_transformer import ParallelThingsBlock, VisionTransformer
from torch import nn

from lampq.errors import LampqError
from lampq.evaluate import (
    PrefixCache,
    Quality,
    cross_entropy,
    divergence,
    interval95,
    predict,
    top1,
)
from lampq.graph.attention import explicit
from lampq.graph.discover import discover

LOGITS = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 1.0], [0.0, 5.0]])


def _changed_from(case: Case, first: int) -> nn.Module:
    """The model with other weights in block ``first`` and all later layers."""
    model = copy.deepcopy(case.model)
    names = [layer.name for layer in case.graph.layers if layer.block >= first]
    generator = torch.Generator().manual_seed(first)
    for name in (*names, case.graph.layers[-1].name):
        weight = model.get_submodule(name).weight
        weight.data += 0.1 * torch.randn(weight.shape, generator=generator)
    return model


def test_top1_counts_the_largest_logits() -> None:
    assert top1(LOGITS, torch.tensor([0, 1, 1, 1])) == 75.0


def test_cross_entropy_by_hand() -> None:
    # -log(softmax) of the label: log(1 + e^-2), log(1 + e^1)
    expected = (math.log(1 + math.exp(-2)) + math.log(1 + math.e)) / 2
    assert cross_entropy(LOGITS[:2], torch.tensor([0, 0])) == pytest.approx(expected)


def test_the_divergence_from_itself_is_zero() -> None:
    assert divergence(LOGITS, LOGITS) == pytest.approx(0.0, abs=1e-12)


def test_divergence_by_hand() -> None:
    # from the reference (3/4, 1/4) to (1/2, 1/2)
    reference = torch.tensor([[math.log(3.0), 0.0]])
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert divergence(torch.zeros(1, 2), reference) == pytest.approx(expected)


def test_the_interval_of_an_even_accuracy_on_a_hundred_images() -> None:
    # from 40.4 to 59.6: Wilson, 1927
    assert interval95(50.0, 100) == pytest.approx(9.62, abs=0.01)


@pytest.mark.parametrize("accuracy", [0.0, 100.0])
def test_the_interval_at_an_end_is_that_of_about_two_images(accuracy: float) -> None:
    # from 0 to 0.76 %
    assert interval95(accuracy, 500) == pytest.approx(0.38, abs=0.005)


def test_quality_rises_with_every_measure() -> None:
    labels = torch.tensor([0, 1, 0, 1])
    exact = Quality.of(LOGITS, LOGITS, labels)
    worse = Quality.of(-LOGITS, LOGITS, labels)
    assert exact.accuracy > worse.accuracy
    assert exact.likelihood > worse.likelihood
    assert exact.agreement > worse.agreement


def test_without_labels_the_answers_of_the_reference_count() -> None:
    swapped = LOGITS.clone()
    swapped[0] = LOGITS[0].flip(0)
    assert Quality.of(swapped, LOGITS, None).accuracy == 75.0


@pytest.mark.parametrize("batch", [1, 4, 6, 100])
def test_predictions_do_not_depend_on_the_batch(case: Case, batch: int) -> None:
    expected = case.model(case.samples.images)
    torch.testing.assert_close(predict(case.model, case.samples, batch), expected)


@pytest.mark.parametrize("batch", [4, 6])
def test_the_cache_keeps_the_logits_of_the_reference(case: Case, batch: int) -> None:
    cache = PrefixCache(case.model, case.graph.blocks, case.samples, batch=batch)
    assert torch.equal(cache.logits, predict(case.model, case.samples, batch))


@pytest.mark.parametrize("limit", [10**9, 100_000, 1], ids=["all", "some", "none"])
def test_a_run_from_every_block_equals_a_full_run(case: Case, limit: int) -> None:
    cache = PrefixCache(case.model, case.graph.blocks, case.samples, batch=4, limit=limit)
    for first in range(len(case.graph.blocks)):
        model = _changed_from(case, first)
        full = predict(model, case.samples, 4)
        assert not torch.equal(full, cache.logits)
        assert torch.equal(cache.predict(model, first), full)


def test_a_run_from_the_middle_leaves_the_earlier_blocks_out(case: Case) -> None:
    cache = PrefixCache(case.model, case.graph.blocks, case.samples)
    model = _changed_from(case, 1)
    called: list[str] = []
    for name in case.graph.blocks:
        model.get_submodule(name).register_forward_pre_hook(
            lambda *_, name=name: called.append(name)
        )
    cache.predict(model, 1)
    assert called == list(case.graph.blocks[1:])


def test_no_more_is_kept_than_the_limit(case: Case) -> None:
    everything = PrefixCache(case.model, case.graph.blocks, case.samples)
    size = sum(x.nbytes for x in everything._inputs.values())
    limited = PrefixCache(case.model, case.graph.blocks, case.samples, limit=size * 3 // 4)
    kept = sum(x.nbytes for x in limited._inputs.values())
    assert 0 < kept <= size * 3 // 4


def test_the_model_is_restored_after_a_run(case: Case) -> None:
    cache = PrefixCache(case.model, case.graph.blocks, case.samples)
    model = _changed_from(case, 1)
    modules, weights = dict(model.named_modules()), copy.deepcopy(model.state_dict())
    cache.predict(model, len(case.graph.blocks) - 1)
    assert dict(model.named_modules()) == modules
    assert all(torch.equal(model.state_dict()[name], t) for name, t in weights.items())


def test_the_model_is_restored_when_a_run_fails(case: Case) -> None:
    cache = PrefixCache(case.model, case.graph.blocks, case.samples)
    model = copy.deepcopy(case.model)
    last = model.get_submodule(case.graph.blocks[-1])

    def fail(*_: object) -> None:
        raise ArithmeticError

    last.register_forward_pre_hook(fail)
    modules = dict(model.named_modules())
    with pytest.raises(ArithmeticError):
        cache.predict(model, len(case.graph.blocks) - 1)
    assert dict(model.named_modules()) == modules


def test_a_run_gives_each_batch_with_its_labels(case: Case) -> None:
    cache = PrefixCache(case.model, case.graph.blocks, case.samples, batch=4)
    started = cache.started(case.model, 1)
    logits, labels = zip(*((case.model(images), known) for images, known in started), strict=True)
    assert torch.equal(torch.cat(logits), cache.answers)
    assert torch.equal(torch.cat(labels), case.samples.require_labels("a test"))


def test_a_run_with_gradients_reaches_the_first_block_it_runs(case: Case) -> None:
    cache = PrefixCache(case.model, case.graph.blocks, case.samples)
    model = copy.deepcopy(case.model).requires_grad_(True)
    for images, _ in cache.started(model, 1):
        model(images).square().sum().backward()
    reached = [
        any(p.grad is not None for p in model.get_submodule(name).parameters())
        for name in case.graph.blocks
    ]
    assert reached == [False] + [True] * (len(reached) - 1)


def test_the_gradients_of_a_run_are_those_of_a_full_run(case: Case) -> None:
    cache = PrefixCache(case.model, case.graph.blocks, case.samples)
    name = next(layer.name for layer in case.graph.layers if layer.block == 1)
    model = copy.deepcopy(case.model)
    weight = model.get_submodule(name).weight.requires_grad_(True)
    gradients = []
    for first in (0, 1):
        weight.grad = None
        for images, _ in cache.started(model, first):
            model(images).square().sum().backward()
        assert weight.grad is not None
        gradients.append(weight.grad)
    torch.testing.assert_close(gradients[1], gradients[0])


def test_a_run_that_is_given_up_restores_the_model(case: Case) -> None:
    cache = PrefixCache(case.model, case.graph.blocks, case.samples, batch=2)
    model = copy.deepcopy(case.model)
    modules = dict(model.named_modules())
    run = cache.started(model, 1)
    next(run)
    run.close()  # type: ignore[attr-defined]
    assert dict(model.named_modules()) == modules


def test_the_reference_keeps_no_hooks(case: Case) -> None:
    model = copy.deepcopy(case.model)
    PrefixCache(model, case.graph.blocks, case.samples)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_blocks_that_run_side_by_side_are_refused_or_scored_right(vit: Case) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = explicit(
            VisionTransformer(
                img_size=32,
                patch_size=8,
                embed_dim=24,
                depth=2,
                num_heads=3,
                num_classes=10,
                block_fn=ParallelThingsBlock,
            )
        )
    blocks = discover(model).blocks
    try:
        cache = PrefixCache(model, blocks, vit.samples)
        logits = [cache.predict(model, first) for first in range(len(blocks))]
    except LampqError:
        return
    for found in logits:
        torch.testing.assert_close(found, predict(model, vit.samples))
