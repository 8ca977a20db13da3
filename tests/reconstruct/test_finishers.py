from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from conftest import Case, fits_of
from torch import Tensor, nn

from lampq.data import Samples
from lampq.evaluate import divergence, predict
from lampq.hooks import recording, recording_outputs
from lampq.quant.modules import QuantLayer, assemble
from lampq.quant.prefix import PrefixQuantizer
from lampq.quant.token import TokenQuantizer
from lampq.reconstruct import FINISHERS as RECIPES
from lampq.reconstruct import BlockRecipe, Distill, Finish, Finisher, Rates
from lampq.reconstruct import feed as feeds
from lampq.reconstruct.blocks import fisher_weights, tail
from lampq.reconstruct.distill import position_counts
from lampq.reconstruct.feed import Feed, room
from lampq.reconstruct.precision import chosen
from lampq.reconstruct.trainable import trainable
from lampq.types import SEARCHED_ROLES, LayerRole

QDROP = BlockRecipe("nearest two", Rates(1e-2, 4e-4, 0.0), iterations=60, batch=4)
FINISHERS: dict[str, Finisher] = {
    "qdrop": QDROP,
    "float inputs": replace(QDROP, inputs="float", drop=0.0),
    "prediction": replace(QDROP, prediction=10.0),
    "fisher": replace(QDROP, rounding="free", loss="fisher", rates=Rates(1e-2, 1e-3, 1e-3)),
    "distill": Distill(Rates(1e-2, 1e-3, 1e-3), iterations=60, batch=4, keep=10),
}


class Memory:
    """A store in memory that counts."""

    def __init__(self) -> None:
        self.kept: dict[str, Mapping[str, Tensor]] = {}

    def load(self, key: str) -> Mapping[str, Tensor] | None:
        return self.kept.get(key)

    def save(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        self.kept[key] = {name: tensor.cpu().clone() for name, tensor in tensors.items()}


class Stop:
    """Progress that is interrupted after so many pieces of work."""

    def __init__(self, left: int) -> None:
        self.left = left

    def track(self, items: object, label: str, total: int | None = None) -> object:
        del label, total
        for item in items:  # type: ignore[attr-defined]
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
            yield item


def job_of(case: Case, bits: int = 3, method: str = "minmax", **options: object) -> Finish:
    layers, matmuls = fits_of(case, method, bits, **options)
    images = torch.randn(24, *case.samples.images.shape[1:])
    return Finish(case.model, case.graph, tuple(layers), tuple(matmuls), Samples(images))


def gap(job: Finish, model: nn.Module) -> float:
    return divergence(predict(model, job.samples), predict(job.model, job.samples))


@pytest.mark.parametrize("name", FINISHERS)
def test_every_finisher_comes_closer_to_the_float_model(vit: Case, name: str) -> None:
    torch.manual_seed(0)
    job = job_of(vit)
    before = assemble(job.model, job.layers, job.sites)
    assert gap(job, FINISHERS[name](job)) < gap(job, before)


@pytest.mark.parametrize("name", FINISHERS)
def test_every_finisher_runs_on_windows_and_keeps_the_widths(swin: Case, name: str) -> None:
    torch.manual_seed(0)
    job = job_of(swin)
    after = replace(FINISHERS[name], iterations=2)(job)  # type: ignore[type-var]
    assert bool(torch.isfinite(predict(after, job.samples)).all())
    widths = {fit.spec.name: fit.bits for fit in job.layers}
    found = {n: m for n, m in after.named_modules() if isinstance(m, QuantLayer)}
    assert {name: layer.bits for name, layer in found.items()} == widths
    assert all(int(layer.codes.max()) < 2**layer.bits.weight for layer in found.values())


@pytest.mark.parametrize("name", ["align", "distill", "qdrop", "pdquant", "adalog"])
def test_every_recipe_works_with_ranges_per_token(case: Case, name: str) -> None:
    torch.manual_seed(0)
    job = job_of(case, 3, "adalog", input_ranges="token")
    factory = RECIPES.get(name)
    after = (factory() if name == "align" else factory(iterations=2))(job)
    assert bool(torch.isfinite(predict(after, job.samples)).all())
    projections = [f.spec.name for f in job.layers if f.spec.role is LayerRole.PROJ]
    for layer in projections:
        module = after.get_submodule(layer)
        assert isinstance(module, QuantLayer)
        assert isinstance(module.input_quantizer, TokenQuantizer)


@pytest.mark.parametrize("name", ["align", "distill", "qdrop", "pdquant", "adalog"])
def test_every_recipe_works_with_a_width_of_first_tokens(vit: Case, name: str) -> None:
    torch.manual_seed(0)
    job = job_of(vit, 3, "adalog", prefix_bits=8)
    factory = RECIPES.get(name)
    after = (factory() if name == "align" else factory(iterations=2))(job)
    assert bool(torch.isfinite(predict(after, job.samples)).all())
    for fit in job.layers:
        module = after.get_submodule(fit.spec.name)
        assert isinstance(module, QuantLayer)
        apart = isinstance(module.input_quantizer, PrefixQuantizer)
        assert apart == (fit.spec.role in SEARCHED_ROLES)


@pytest.mark.parametrize("name", ["qdrop", "distill"])
def test_the_same_seed_gives_the_same_model(vit: Case, name: str) -> None:
    torch.manual_seed(0)
    job = job_of(vit)
    one, other = (FINISHERS[name](job).state_dict() for _ in range(2))
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("name", ["fisher", "distill"])
def test_an_interrupted_run_goes_on_and_ends_the_same(vit: Case, name: str) -> None:
    torch.manual_seed(0)
    job = job_of(vit)
    whole = FINISHERS[name](job).state_dict()
    store = Memory()

    stop = Stop(80 if name == "fisher" else 45)
    with pytest.raises(KeyboardInterrupt):
        FINISHERS[name](replace(job, store=store, progress=stop))  # type: ignore[arg-type]
    assert store.kept
    resumed = FINISHERS[name](replace(job, store=store)).state_dict()
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


def test_the_float_model_and_the_random_state_are_left_alone(vit: Case) -> None:
    torch.manual_seed(0)
    job = job_of(vit)
    before = {key: value.clone() for key, value in job.model.state_dict().items()}
    state = torch.random.get_rng_state()
    for name in ("qdrop", "distill"):
        FINISHERS[name](job)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(before[key], value) for key, value in job.model.state_dict().items())


def test_the_feed_gives_what_each_block_gets(case: Case) -> None:
    torch.manual_seed(0)
    job = job_of(case)
    model = trainable(job.model, job.layers, job.sites)
    blocks = case.graph.blocks
    feed = Feed(job.model, model, blocks, job.samples)
    images = job.samples.inputs(slice(None))
    with (
        recording(job.model, list(blocks)) as exact,
        recording(model, list(blocks)) as quantized,
        torch.no_grad(),
    ):
        job.model(images)
        model(images)
    for number, name in enumerate(blocks):
        torch.testing.assert_close(feed.float_inputs, exact[name][0], rtol=1e-3, atol=1e-3)
        close = torch.isclose(feed.inputs, quantized[name][0], rtol=1e-3, atol=1e-3)
        assert float(close.double().mean()) > 0.99  # a batch of another size may round differently
        if number + 1 < len(blocks):
            feed.advance()


def test_the_tail_of_a_model_gives_its_logits(case: Case) -> None:
    images = case.samples.inputs(slice(0, 3))
    expected = case.model(images)
    for number, name in enumerate(case.graph.blocks):
        outputs = []
        handle = case.model.get_submodule(name).register_forward_hook(
            lambda _m, _a, output, outputs=outputs: outputs.append(output)
        )
        case.model(images)
        handle.remove()
        rest = tail(case.model, case.graph.blocks, number)
        torch.testing.assert_close(rest(images, outputs[0]), expected, rtol=1e-4, atol=1e-4)


def test_large_arrays_live_in_a_file(monkeypatch: pytest.MonkeyPatch, vit: Case) -> None:
    like = torch.ones(1, 3, 4)
    assert room(10, like).shape == room(10, like, limit=0).shape == (10, 3, 4)
    torch.manual_seed(0)
    job = job_of(vit)
    inside = QDROP(job).state_dict()
    monkeypatch.setattr(feeds.room, "__defaults__", (0,))
    outside = QDROP(job).state_dict()
    assert all(torch.equal(inside[key], outside[key]) for key in inside)


def test_fisher_weights_average_to_one(vit: Case) -> None:
    weights = fisher_weights(vit.model, vit.graph.blocks, vit.samples, 0)
    assert set(weights) == set(vit.graph.blocks)
    for weight in weights.values():
        torch.testing.assert_close(float(weight.mean()), 1.0)
        assert float(weight.min()) >= 0.1


@pytest.mark.parametrize("answers", [0.0, 2.0])
def test_the_loss_is_the_error_that_the_next_norm_shows_and_the_divergence(
    case: Case, answers: float
) -> None:
    torch.manual_seed(0)
    job = job_of(case)
    model = trainable(job.model, job.layers, job.sites)
    images = job.samples.inputs(slice(0, 4))
    blocks = list(case.graph.blocks)
    with (
        torch.no_grad(),
        recording_outputs(job.model, blocks) as wanted,
        recording_outputs(model, blocks) as found,
    ):
        expected = divergence(model(images), job.model(images))
    counts = {name: torch.rand(wanted[name].shape[1:-1]) for name in blocks}
    errors = []
    for name in blocks:
        one, other = (
            (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
            for x in (found[name], wanted[name])
        )
        errors.append(float(((one - other).square().mean(-1) * counts[name]).mean()))
    loss = Distill(answers=answers, precision="float32")._loss(job, model, images, counts)
    assert loss.item() == pytest.approx(answers * expected + sum(errors) / len(errors), rel=1e-3)


def test_positions_count_by_the_fisher_information_as_far_as_asked(case: Case) -> None:
    job = job_of(case)
    even, focused = (
        position_counts(job.model, job.graph.blocks, job.samples, 0, focus) for focus in (0.0, 0.5)
    )
    assert set(focused) == set(job.graph.blocks)
    for name, counts in focused.items():
        assert torch.equal(even[name], torch.ones_like(counts))
        assert counts.mean().item() == pytest.approx(1.0, abs=1e-4)
        assert float(counts.min()) >= 0.5


def test_the_class_token_counts_most_behind_the_last_block(vit: Case) -> None:
    job = job_of(vit)
    counts = position_counts(job.model, job.graph.blocks, job.samples, 0, 0.2)
    last = counts[job.graph.blocks[-1]]
    # the others are not read by anything, but for the tenth that Fisher weights are even
    assert int(last.argmax()) == 0
    assert float(last[0]) > 0.15 * len(last)


def test_distillation_leaves_edges_alone(case: Case) -> None:
    torch.manual_seed(0)
    job = job_of(case)
    rates = Rates(1e-1, 1e-1, 1e-1)
    after = Distill(rates, iterations=3, batch=4, start=None, heads=None)(job)
    before = assemble(job.model, job.layers, job.sites)
    changed = {
        name
        for name, value in before.state_dict().items()
        # a scale goes through its logarithm and back
        if not torch.allclose(value.float(), after.state_dict()[name].float(), rtol=1e-5, atol=0)
    }
    edges = [x.name for x in job.graph.layers if x.role in (LayerRole.PATCH_EMBED, LayerRole.HEAD)]
    assert not [name for name in changed if name.startswith(tuple(edges))]
    for block in job.graph.blocks:
        assert any(name.startswith(f"{block}.") for name in changed), block


@pytest.mark.parametrize("name", ["distill", "qdrop"])
def test_training_in_bfloat16_ends_about_where_training_in_float32_does(
    vit: Case, name: str
) -> None:
    if chosen("auto") is torch.float32:
        pytest.skip("bfloat16 is not faster on this processor")
    torch.manual_seed(0)
    job = job_of(vit)
    gaps = [
        gap(job, replace(FINISHERS[name], precision=precision)(job))  # type: ignore[type-var]
        for precision in ("bfloat16", "float32")
    ]
    before = gap(job, assemble(job.model, job.layers, job.sites))
    assert max(gaps) < before
    assert abs(gaps[0] - gaps[1]) < 0.3 * before


def test_every_picture_is_shown_once_before_any_is_shown_again(vit: Case) -> None:
    job = job_of(vit)
    recipe = Distill(batch=4, smallest=1.0, mirror=False, mixed=0.0)
    steps = len(job.samples) // 4
    for first in (0, steps):
        pictures = torch.cat([recipe._shown(job, first + step) for step in range(steps)])
        assert len(pictures.flatten(1).unique(dim=0)) == len(job.samples)
    assert torch.equal(recipe._shown(job, 3), recipe._shown(job, 3))
