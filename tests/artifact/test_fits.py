from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import Case, same_fit, same_quantizer

from lampq.artifact.fits import FitFolder
from lampq.methods import METHODS, FitCache, SiteWidths
from lampq.quant.modules import LayerFit, MatmulFit, SumFit
from lampq.quant.prefix import PrefixQuantizer
from lampq.quant.token import TokenQuantizer
from lampq.quant.uniform import UniformQuantizer
from lampq.types import LayerBits, LayerRole, SumSpec

BITS = LayerBits(3, 4)


def fit_of(
    case: Case, method: str, name: str, bits: LayerBits = BITS, **options: object
) -> LayerFit:
    sites = SiteWidths(LayerBits(8, 8), 4)
    fits = FitCache(case.model, case.graph, METHODS.get(method)(**options), case.stats, sites)
    return fits.layer(name, bits)


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("width", [1, 2, 8])
@pytest.mark.parametrize(
    "name", ["patch_embed.proj", "blocks.0.attn.qkv", "blocks.1.mlp.fc1", "blocks.1.mlp.fc2"]
)
def test_a_fit_comes_back_bit_for_bit(
    vit: Case, tmp_path: Path, method: str, width: int, name: str
) -> None:
    fit = fit_of(vit, method, name, LayerBits(width, width))
    FitFolder(tmp_path).save(fit)
    again = FitFolder(tmp_path).load(fit.spec, fit.bits)
    assert again is not None
    assert same_fit(again, fit)
    assert torch.equal(again.weight, fit.weight)


def test_a_range_per_token_comes_back_bit_for_bit(vit: Case, tmp_path: Path) -> None:
    fit = fit_of(vit, "adalog", "blocks.1.attn.proj", input_ranges="token")
    assert isinstance(fit.input_quantizer, TokenQuantizer)
    FitFolder(tmp_path).save(fit)
    again = FitFolder(tmp_path).load(fit.spec, fit.bits)
    assert again is not None
    assert same_fit(again, fit)


@pytest.mark.parametrize("role", ["attn.qkv", "attn.proj", "mlp.fc2"])
def test_a_width_of_first_tokens_comes_back_bit_for_bit(
    vit: Case, tmp_path: Path, role: str
) -> None:
    fit = fit_of(vit, "adalog", f"blocks.1.{role}", prefix_bits=8)
    assert isinstance(fit.input_quantizer, PrefixQuantizer)
    FitFolder(tmp_path).save(fit)
    again = FitFolder(tmp_path).load(fit.spec, fit.bits)
    assert again is not None
    assert same_fit(again, fit)


def test_a_fold_is_kept(vit: Case, tmp_path: Path) -> None:
    fit = fit_of(vit, "repq", "blocks.0.attn.qkv")
    assert fit.fold is not None
    FitFolder(tmp_path).save(fit)
    again = FitFolder(tmp_path).load(fit.spec, fit.bits)
    assert again is not None
    assert again.fold is not None
    assert torch.equal(again.fold.ratio, fit.fold.ratio)


def test_a_fit_that_was_not_stored_is_not_there(vit: Case, tmp_path: Path) -> None:
    fit = fit_of(vit, "minmax", "blocks.0.attn.qkv")
    store = FitFolder(tmp_path)
    store.save(fit)
    assert store.load(fit.spec, LayerBits(4, 3)) is None
    assert store.load(vit.graph.layer("blocks.1.attn.qkv"), fit.bits) is None


def test_a_folder_that_does_not_exist_holds_nothing(vit: Case, tmp_path: Path) -> None:
    assert FitFolder(tmp_path / "none").load(vit.graph.layers[0], BITS) is None


@pytest.mark.parametrize("keep", [0, 1, 8, 100, -1], ids=str)
def test_a_fit_cut_short_counts_as_not_there(vit: Case, tmp_path: Path, keep: int) -> None:
    fit = fit_of(vit, "minmax", "blocks.0.attn.qkv")
    store = FitFolder(tmp_path)
    store.save(fit)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:keep])
    assert store.load(fit.spec, fit.bits) is None
    store.save(fit)
    assert store.load(fit.spec, fit.bits) is not None


def test_stored_fits_are_used_instead_of_new_ones(
    vit: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = SiteWidths(LayerBits(8, 8), 4)
    method = METHODS.get("minmax")()
    first = FitCache(
        vit.model, vit.graph, method, vit.stats, sites, store=FitFolder(tmp_path)
    ).layer("blocks.0.attn.qkv", BITS)
    monkeypatch.setattr(type(method), "fit", lambda *_: pytest.fail("fitted again"))
    second = FitCache(
        vit.model, vit.graph, method, vit.stats, sites, store=FitFolder(tmp_path)
    ).layer("blocks.0.attn.qkv", BITS)
    assert same_fit(first, second)


@pytest.mark.parametrize("method", list(METHODS))
def test_a_product_comes_back_bit_for_bit(vit: Case, tmp_path: Path, method: str) -> None:
    site = vit.graph.matmuls[1]
    fit = METHODS.get(method)().fit_matmul(site, 3, 4, vit.stats[site.name])
    store = FitFolder(tmp_path)
    store.save_site(fit, (3, 4))
    again = store.load_site(site, (3, 4))
    assert isinstance(again, MatmulFit)
    assert again.spec == site
    for name in ("left", "right", "output"):
        assert same_quantizer(getattr(again, name), getattr(fit, name))
    assert store.load_site(site, (4, 3)) is None


def test_a_sum_comes_back_bit_for_bit(tmp_path: Path) -> None:
    site = SumSpec("blocks.0.add1", LayerRole.PROJ, 0)
    quantizer = UniformQuantizer(4, torch.tensor(0.1), torch.tensor(3.0))
    store = FitFolder(tmp_path)
    store.save_site(SumFit(site, quantizer), (4,))
    again = store.load_site(site, (4,))
    assert isinstance(again, SumFit)
    assert same_quantizer(again.quantizer, quantizer)
