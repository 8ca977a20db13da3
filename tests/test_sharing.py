from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Case

from lampq.artifact.fits import FitFolder
from lampq.artifact.states import StateFolder
from lampq.calibrate import Stats
from lampq.config import make_config
from lampq.methods import METHODS, FitCache, SiteWidths
from lampq.methods.minmax import MinMax
from lampq.pipeline import behind_quantized
from lampq.progress import Journal, Progress
from lampq.sharing import (
    Shared,
    key_of,
    model_options,
    shared_options,
    sharing_key,
    statistics_options,
)
from lampq.statistics import Deferred, through
from lampq.types import LayerBits


@pytest.mark.parametrize(
    ("method", "option", "shared"),
    [
        ("adalog", {"gamma": 2.0}, True),
        ("adalog", {"metric": "fisher"}, True),
        ("adalog", {"bits": 3.0}, True),
        ("adalog", {"fit_images": 7}, False),
        ("adalog", {"search": "exhaustive"}, False),
        ("adalog", {"fit_tokens": "uniform"}, False),
        ("adalog", {"fit_views": 1}, False),
        ("adalog", {"rotation": "none"}, False),
        ("adalog", {"seed": 1}, False),
        ("adalog", {"images": 8}, False),
        ("adalog", {"method": "erq"}, False),
        ("minmax", {"search": "exhaustive"}, True),
        ("repq", {"bits": 3.0}, False),
        ("repq", {"edge_bits": 4}, False),
    ],
)
def test_trials_share_what_they_agree_on(method: str, option: dict[str, Any], shared: bool) -> None:
    base = make_config({"method": method})
    assert (sharing_key(base) == sharing_key(replace(base, **option))) == shared


def test_inputs_behind_quantized_sites_depend_on_the_target() -> None:
    assert behind_quantized(METHODS.get("repq"), make_config({}))
    assert not behind_quantized(MinMax(), make_config({}))
    quantized = make_config({"method": "minmax", "fit_inputs": "quantized"})
    assert shared_options(quantized)["behind"][0] == "4/4"


@pytest.mark.parametrize(
    ("option", "shared"),
    [
        ({"gamma": 2.0}, True),
        ({"method": "minmax"}, True),
        ({"search": "exhaustive"}, True),
        ({"method": "ptq4vit"}, False),  # wants gradients
        ({"method": "repq"}, False),  # sees what is behind quantized sites
        ({"fit_images": 7}, False),
        ({"seed": 1}, False),
    ],
    ids=str,
)
def test_methods_that_want_the_same_share_statistics(option: dict[str, Any], shared: bool) -> None:
    base = make_config({})
    keys = [key_of(statistics_options(config)) for config in (base, replace(base, **option))]
    assert (keys[0] == keys[1]) == shared


@pytest.mark.parametrize(
    ("option", "shared"),
    [
        ({"method": "repq"}, True),
        ({"fit_images": 7}, True),
        ({"rotation": "none"}, False),
        ({"seed": 1}, False),
        ({"images": 8}, False),
    ],
    ids=str,
)
def test_traces_of_the_float_model_do_not_depend_on_the_method(
    option: dict[str, Any], shared: bool
) -> None:
    base = make_config({})
    assert (model_options(base) == model_options(replace(base, **option))) == shared


def test_a_process_finds_what_another_has_measured(tmp_path: Path) -> None:
    config, other = make_config({}), make_config({"method": "minmax"})
    one, two = Shared(tmp_path, "one"), Shared(tmp_path, "two")
    first = one.run(config, Progress(), {"model": "a"})
    first.journal.once("score", lambda: 1)
    first.journal.of_model.once("trace", lambda: 2)
    one.evaluations({"model": "a"}).once("fp32", lambda: 3)

    def fail() -> int:
        pytest.fail("measured again")

    second = two.run(config, Progress(), {"model": "a"})
    assert second.journal.once("score", fail) == 1
    assert second.journal.of_model.once("trace", fail) == 2
    assert two.evaluations({"model": "a"}).once("fp32", fail) == 3
    third = two.run(other, Progress(), {"model": "a"})
    assert third.journal.once("score", lambda: 4) == 4
    assert third.journal.of_model.once("trace", fail) == 2
    assert two.run(config, Progress(), {"model": "b"}).journal.once("score", lambda: 5) == 5


def test_a_journal_leaves_the_files_of_others_alone(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.jsonl"
    cut = '{"key": "a", "value": 1}\n{"key": "b", "va'
    theirs.write_text(cut)
    journal = Journal(tmp_path / "own.jsonl", others=[theirs])
    assert journal.once("a", lambda: 2) == 1
    assert journal.once("b", lambda: 3) == 3
    assert theirs.read_text() == cut
    assert (tmp_path / "own.jsonl").read_text() == '{"key": "b", "value": 3}\n'


def test_a_journal_of_its_own_is_that_of_the_model_too() -> None:
    journal = Journal()
    assert journal.of_model is journal


def test_statistics_are_made_when_a_fit_needs_them_and_not_before(
    vit: Case, tmp_path: Path
) -> None:
    asked: list[str] = []

    def make() -> Any:
        asked.append("made")
        return vit.stats

    def cache() -> FitCache:
        sites, store = SiteWidths(LayerBits(8, 8), 4), FitFolder(tmp_path)
        return FitCache(vit.model, vit.graph, MinMax(), Deferred(make), sites, store=store)

    name, bits, site = "blocks.0.attn.qkv", LayerBits(3, 3), vit.graph.matmuls[0]
    first = cache()
    assert asked == []
    first.layer(name, bits)
    first.matmul(site, 4, 4)
    assert asked == ["made"]
    second = cache()
    second.layer(name, bits)
    second.matmul(site, 4, 4)
    assert asked == ["made"]
    second.layer(name, LayerBits(4, 4))
    assert asked == ["made", "made"]


def test_stored_statistics_come_back_as_they_were(vit: Case, tmp_path: Path) -> None:
    def fail() -> dict[str, Stats]:
        pytest.fail("made again")

    store = StateFolder(tmp_path)
    names = [site.name for site in (*vit.graph.layers, *vit.graph.matmuls)]
    stats = {name: replace(vit.stats[name], block=None) for name in names}
    assert through(store, vit.graph, (), lambda: stats) is stats
    again = through(store, vit.graph, (), fail)
    assert set(again) == set(names)
    for layer in vit.graph.layers:
        assert torch.equal(again[layer.name].inputs, vit.stats[layer.name].inputs)
    for site in vit.graph.matmuls:
        assert torch.equal(again[site.name].left, vit.stats[site.name].left)
        assert torch.equal(again[site.name].right, vit.stats[site.name].right)
    next(tmp_path.iterdir()).unlink()
    assert through(store, vit.graph, (), lambda: stats) is stats


def test_statistics_with_views_of_blocks_are_not_stored(vit: Case, tmp_path: Path) -> None:
    assert any(stats.block is not None for stats in vit.stats.values())
    through(StateFolder(tmp_path), vit.graph, (), lambda: vit.stats)
    assert list(tmp_path.iterdir()) == []
