from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import Case
from reconstruct.test_finishers import job_of
from torch import Tensor, nn

from lampq.evaluate import predict
from lampq.quant.modules import QuantLayer, assemble
from lampq.reconstruct import Finish
from lampq.reconstruct.heads import Heads
from lampq.types import LayerRole


def heads_of(job: Finish) -> list[str]:
    return [x.name for x in job.graph.layers if x.role is LayerRole.HEAD]


def assembled(job: Finish) -> nn.Module:
    return assemble(job.model, job.layers, job.sites)


def layer(model: nn.Module, name: str) -> QuantLayer:
    found = model.get_submodule(name)
    assert isinstance(found, QuantLayer)
    return found


def error(job: Finish, model: nn.Module) -> float:
    """Squared error of the answers to images that the head was not solved on as they are."""
    difference = predict(model, job.samples) - predict(job.model, job.samples)
    return difference.double().square().mean().item()


def test_a_solved_head_answers_more_like_the_float_model(case: Case) -> None:
    torch.manual_seed(0)
    job = job_of(case, bits=3)
    before = error(job, assembled(job))
    assert error(job, Heads(ridge=0.3)(job, assembled(job))) < 0.9 * before


def test_only_heads_change_and_they_keep_their_widths(case: Case) -> None:
    torch.manual_seed(0)
    job = job_of(case)
    names = heads_of(job)
    assert names
    before, after = assembled(job), Heads()(job, assembled(job))
    changed = {
        name
        for name, value in before.state_dict().items()
        if not torch.equal(value, after.state_dict()[name])
    }
    assert changed
    assert all(name.startswith(tuple(names)) for name in changed)
    for name in names:
        assert layer(after, name).bits == layer(before, name).bits


def test_a_head_that_is_held_firmly_is_the_float_one_rounded(vit: Case) -> None:
    torch.manual_seed(0)
    job = job_of(vit, bits=8)
    (name,) = heads_of(job)
    (fit,) = (x for x in job.layers if x.spec.name == name)
    weight: Tensor = job.model.get_submodule(name).weight
    if fit.fold is not None:
        weight, _ = fit.fold.of_linear(weight, fit.bias)
    found = layer(Heads(ridge=1e6)(job, assembled(job)), name).weight
    assert torch.allclose(found, weight, atol=float(weight.abs().max()) / 128)


def test_a_model_without_a_quantized_head_stays_as_it_is(vit: Case) -> None:
    job = job_of(vit)
    names = heads_of(job)
    bare = replace(job, layers=tuple(x for x in job.layers if x.spec.name not in names))
    before, after = assembled(bare), Heads()(bare, assembled(bare))
    states = before.state_dict(), after.state_dict()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.parametrize("seed", [0, 1])
def test_the_views_follow_from_the_seed(vit: Case, seed: int) -> None:
    torch.manual_seed(0)
    job = replace(job_of(vit), seed=seed)
    (name,) = heads_of(job)
    one, other = (layer(Heads()(job, assembled(job)), name).codes for _ in range(2))
    assert torch.equal(one, other)
    moved = layer(Heads()(replace(job, seed=seed + 1), assembled(job)), name)
    first = layer(Heads()(job, assembled(job)), name)
    assert not torch.equal(first.bias, moved.bias)


def test_a_head_that_is_a_convolution_is_left_alone(vit: Case) -> None:
    job = job_of(vit)
    (name,) = heads_of(job)
    (stem,) = (x for x in job.layers if x.spec.role is LayerRole.PATCH_EMBED)
    as_head = replace(stem, spec=replace(stem.spec, role=LayerRole.HEAD))
    others = tuple(x for x in job.layers if x not in (stem,) and x.spec.name != name)
    odd = replace(job, layers=(*others, as_head))
    before, after = assembled(odd).state_dict(), Heads()(odd, assembled(odd)).state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
