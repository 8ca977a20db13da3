from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import Case
from reconstruct.test_finishers import Memory, Stop, gap, job_of
from torch import Tensor, nn

from lampq.quant.modules import assemble
from lampq.reconstruct import Align, Distill, Finish, Rates
from lampq.reconstruct import align as aligning
from lampq.reconstruct.align import _Writer
from lampq.reconstruct.feed import Feed
from lampq.reconstruct.least_squares import Problem
from lampq.types import LayerRole


def feed_of(job: Finish) -> Feed:
    return Feed(job.model, job.model, job.graph.blocks, job.samples)


def writers(job: Finish, block: int) -> list[tuple[str, _Writer]]:
    feed = feed_of(job)
    while feed.number < block:
        feed.advance()
    roles = (LayerRole.PROJ, LayerRole.FC2)
    found = [x for x in job.graph.layers if x.block == block and x.role in roles]
    sites = [(x.name, _Writer.of(job, feed, x)) for x in found]
    return [(name, site) for name, site in sites if site is not None]


@torch.no_grad()
def stream(feed: Feed, site: _Writer, inputs: Tensor) -> Tensor:
    """The residual stream behind a layer, its output in it."""
    seen: list[Tensor] = []
    if site.norm is not None:
        norm = feed.block.get_submodule(site.norm)
        handle = norm.register_forward_pre_hook(lambda _module, given: seen.append(given[0]))
    end: Tensor = feed.block(inputs, *feed.call.rest, **feed.call.named)
    if site.norm is None:
        return end
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("block", [0, 1])
def test_what_is_brought_back_makes_the_streams_equal(
    case: Case, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # with windows and shifts the tokens of the layer are not in the order of the stream
    monkeypatch.setattr(aligning, "FARTHEST", 1e9)
    torch.manual_seed(0)
    job = job_of(case)
    feed = feed_of(job)
    while feed.number < block:
        feed.advance()
    inputs = feed.float_inputs[:3]
    moved = inputs + torch.randn_like(inputs)
    both = writers(job, block)
    assert len(both) == 2
    for name, site in both:
        wanted = site.passage(feed.block, inputs, feed.call)
        found = site.passage(feed.block, moved, feed.call)
        correction = wanted.brought_back(found)
        assert correction.shape == wanted.output.shape
        output = wanted.output + correction
        handle = feed.block.get_submodule(site.name).register_forward_hook(
            lambda *_, output=output: output
        )
        corrected = stream(feed, site, moved)
        handle.remove()
        exact = stream(feed, site, inputs)
        torch.testing.assert_close(corrected, exact, atol=1e-4, rtol=1e-4, msg=name)


def test_huge_tokens_of_the_stream_are_brought_back_in_part_only(vit: Case) -> None:
    torch.manual_seed(0)
    job = job_of(vit)
    feed = feed_of(job)
    inputs = feed.float_inputs[:3]
    moved = inputs + 0.01 * torch.randn_like(inputs)
    moved[:, 1] += 1000.0
    ((_, site), _) = writers(job, 0)
    wanted = site.passage(feed.block, inputs, feed.call)
    correction = wanted.brought_back(site.passage(feed.block, moved, feed.call))
    size = correction.norm(dim=-1)
    assert float(size.max()) <= aligning.FARTHEST * float(size.median()) * 1.001


def test_the_solution_is_that_of_weighted_least_squares(vit: Case) -> None:
    torch.manual_seed(0)
    job = job_of(vit, bits=8)
    fit = next(x for x in job.layers if x.spec.role is LayerRole.PROJ)
    fit = replace(fit, input_quantizer=None)
    layer = job.model.get_submodule(fit.spec.name)
    assert isinstance(layer, nn.Linear)
    x = torch.randn(50, 4, layer.in_features)
    truth = torch.randn(layer.out_features, layer.in_features)
    shift = torch.randn(layer.out_features)
    target = x @ truth.T + shift
    problem = Problem(fit, layer, torch.ones(4))
    problem.add(x, target, target)
    found = problem.solved(1e-9)
    # eight bits of a grid that spans the row
    step = float((truth.amax(dim=1) - truth.amin(dim=1)).max()) / 255
    torch.testing.assert_close(found.weight, truth, atol=2 * step, rtol=0)
    torch.testing.assert_close(found.bias, shift, atol=step * 10, rtol=0)


def test_a_strong_ridge_keeps_the_float_weight(vit: Case) -> None:
    torch.manual_seed(0)
    job = job_of(vit, bits=8)
    fit = next(x for x in job.layers if x.spec.role is LayerRole.PROJ)
    layer = job.model.get_submodule(fit.spec.name)
    assert isinstance(layer, nn.Linear)
    x = torch.randn(50, 4, layer.in_features)
    problem = Problem(fit, layer, torch.ones(4))
    problem.add(x, torch.randn(50, 4, layer.out_features), torch.randn(50, 4, layer.out_features))
    found = problem.solved(1e9)
    assert float((found.weight - layer.weight).abs().max()) < 0.02 * float(layer.weight.abs().max())


def test_a_layer_whose_output_few_tokens_make_is_left_alone(vit: Case) -> None:
    torch.manual_seed(0)
    job = job_of(vit)
    fit = next(x for x in job.layers if x.spec.role is LayerRole.FC2)
    layer = job.model.get_submodule(fit.spec.name)
    assert isinstance(layer, nn.Linear)
    output = torch.randn(10, 4, layer.out_features)
    output[0, 0] *= 100
    problem = Problem(fit, layer, torch.ones(4))
    problem.add(torch.randn(10, 4, layer.in_features), output, output)
    assert problem.uneven


def test_the_blocks_end_nearer_to_the_float_ones(case: Case) -> None:
    torch.manual_seed(0)
    job = job_of(case)
    before, after = assemble(job.model, job.layers, job.sites), Align()(job)
    last = job.graph.blocks[-1]
    ends: list[Tensor] = []
    for model in (job.model, before, after):
        handle = model.get_submodule(last).register_forward_hook(lambda _m, _i, x: ends.append(x))
        with torch.no_grad():
            model(job.samples.inputs(slice(None)))
        handle.remove()
    exact, old, new = ends
    assert float((new - exact).square().sum()) < 0.8 * float((old - exact).square().sum())


def test_only_layers_of_blocks_change_and_widths_stay(swin: Case) -> None:
    torch.manual_seed(0)
    job = job_of(swin)
    found = Align().aligned(job)
    assert [x.spec for x in found.layers] == [x.spec for x in job.layers]
    assert [x.bits for x in found.layers] == [x.bits for x in job.layers]
    same = [torch.equal(a.codes, b.codes) for a, b in zip(found.layers, job.layers, strict=True)]
    outside = [x.spec.block < 0 for x in job.layers]
    assert any(outside)
    assert all(is_same for is_same, is_out in zip(same, outside, strict=True) if is_out)
    assert not all(same)


def test_an_interrupted_alignment_goes_on_and_ends_the_same(vit: Case) -> None:
    torch.manual_seed(0)
    job = job_of(vit)
    whole = Align()(job).state_dict()
    store = Memory()

    with pytest.raises(KeyboardInterrupt):
        Align()(replace(job, store=store, progress=Stop(5)))  # type: ignore[arg-type]
    assert len(store.kept) == 5
    resumed = Align()(replace(job, store=store)).state_dict()
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


def test_distillation_starts_from_the_aligned_model(vit: Case) -> None:
    torch.manual_seed(0)
    job = job_of(vit)
    still = Rates(0.0, 1e-12, 0.0)
    found = Distill(still, iterations=1, batch=4)(job)
    assert gap(job, found) == pytest.approx(gap(job, Align()(job)), rel=1e-3)
    plain = Distill(still, iterations=1, batch=4, start=None, heads=None)(job)
    untouched = assemble(job.model, job.layers, job.sites)
    assert gap(job, plain) == pytest.approx(gap(job, untouched), rel=1e-3)


def test_samples_are_not_changed(vit: Case) -> None:
    torch.manual_seed(0)
    job = job_of(vit)
    images = job.samples.images.clone()
    state = torch.random.get_rng_state()
    Align()(job)
    assert torch.equal(images, job.samples.images)
    assert torch.equal(torch.random.get_rng_state(), state)
