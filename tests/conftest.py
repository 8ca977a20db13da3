"""Tiny models with seeded weights, samples that fit them, and calls of the command."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from PIL import Image
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from typer.testing import CliRunner

import lampq.cli
import lampq.inputs
from lampq.calibrate import Stats, collect
from lampq.cli import app
from lampq.data import Samples
from lampq.graph.attention import explicit
from lampq.graph.discover import discover
from lampq.methods import METHODS, FitCache, SiteWidths
from lampq.models import bundled_samples
from lampq.quant.base import Quantizer, describe
from lampq.quant.modules import LayerFit, SiteFit
from lampq.types import BitPlan, LayerBits, ModelGraph

CLASSES = 10
# a trial of a second or two
QUICK = """
method = "minmax"
metric = "fisher"
bits = 4
choices = [3, 4, 5]
images = 24
fit_images = 8
metric_images = 8
probe_images = 8
trace_images = 4
score_images = 8
exchanges = 2
patience = 1
"""

settings.register_profile("lampq", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("lampq")


@dataclass(frozen=True)
class Case:
    """A float model, its explicit form, what was found in it, and samples for it."""

    original: nn.Module
    model: nn.Module
    graph: ModelGraph
    samples: Samples
    stats: Mapping[str, Stats]


class Outcome:
    """Exit code, standard output and standard error of one call."""

    def __init__(self, *arguments: object) -> None:
        found = CliRunner().invoke(app, [str(argument) for argument in arguments])
        if found.exception is not None and not isinstance(found.exception, SystemExit):
            raise found.exception
        self.code, self.out, self.err = found.exit_code, found.stdout, found.stderr


@contextmanager
def few_bundled(count: int) -> Iterator[None]:
    """The command sees only so many bundled pictures of each split."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            lampq.inputs, "bundled_samples", lambda split: bundled_samples(split).subset(count, 0)
        )
        yield


def write_pictures(folder: Path, samples: Samples, count: int) -> Path:
    """A data folder of some pictures, with labels.csv and images/."""
    (folder / "images").mkdir(parents=True)
    labels = samples.require_labels("a test")
    with (folder / "labels.csv").open("w", newline="") as handle:
        rows = csv.writer(handle)
        rows.writerow(["file", "label"])
        for i in range(count):
            pixels = samples.images[i].permute(1, 2, 0).numpy()
            mode = pixels[:, :, 0] if pixels.shape[2] == 1 else pixels
            Image.fromarray(mode).save(folder / "images" / f"{i}.png")
            rows.writerow([f"{i}.png", int(labels[i])])
    return folder


def same_quantizer(one: Quantizer | None, other: Quantizer | None) -> bool:
    """Whether two quantizers are equal bit for bit."""
    if one is None or other is None:
        return one is other
    tensors, others = one.state_dict(), other.state_dict()
    return describe(one) == describe(other) and all(
        torch.equal(tensors[name], others[name]) for name in tensors
    )


def same_fit(one: LayerFit, other: LayerFit) -> bool:
    """Whether two fits are equal bit for bit."""
    folds = [fit.fold for fit in (one, other) if fit.fold is not None]
    return (
        (one.spec, one.bits) == (other.spec, other.bits)
        and torch.equal(one.codes, other.codes)
        and torch.equal(one.bias, other.bias)
        and same_quantizer(one.weight_quantizer, other.weight_quantizer)
        and same_quantizer(one.input_quantizer, other.input_quantizer)
        and same_quantizer(one.output_quantizer, other.output_quantizer)
        and len(folds) != 1
        and all(torch.equal(fold.ratio, folds[0].ratio) for fold in folds)
        and all(torch.equal(fold.shift, folds[0].shift) for fold in folds)
    )


def fits_of(
    case: Case, method: str, bits: int, **options: object
) -> tuple[list[LayerFit], list[SiteFit]]:
    """Fits of all sites of a tiny model at one width, by a method with these options."""
    width = LayerBits(bits, bits)
    sites = SiteWidths(width, bits)
    cache = FitCache(case.model, case.graph, METHODS.get(method)(**options), case.stats, sites)
    return cache.of_plan(BitPlan.uniform(case.graph.allocatable, width))


def _shaken(model: nn.Module, seed: int) -> nn.Module:
    """The model with norms, biases and tables moved off their neutral initial values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise, alpha=0.2 if parameter.ndim == 1 else 0.1)
    return model.eval()


def _case(build: object, size: tuple[int, int, int]) -> Case:
    assert callable(build)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        original = _shaken(build(), seed=1)
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(6, *size, generator=generator)
    labels = torch.randint(CLASSES, (6,), generator=generator)
    samples = Samples(images, labels)
    model = explicit(original)
    graph = discover(model)
    stats = collect(model, graph, samples, gradients=True, block_images=2, sums=graph.sums)
    return Case(original, model, graph, samples, stats)


@pytest.fixture(scope="session")
def vit() -> Case:
    """A ViT of two blocks."""
    return _case(
        lambda: VisionTransformer(
            img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=CLASSES
        ),
        (3, 32, 32),
    )


@pytest.fixture(scope="session")
def swin() -> Case:
    """A Swin of two stages of two blocks, the second block of the first with shifted windows."""
    return _case(
        lambda: SwinTransformer(
            img_size=28,
            patch_size=2,
            in_chans=1,
            window_size=7,
            embed_dim=16,
            depths=(2, 2),
            num_heads=(2, 4),
            num_classes=CLASSES,
        ),
        (1, 28, 28),
    )


@pytest.fixture(params=["vit", "swin"])
def case(request: pytest.FixtureRequest) -> Case:
    """Either tiny model."""
    found: Case = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session")
def real() -> Path:
    """The folder with trained weights and real images, where there is one."""
    default = Path(__file__).parents[1] / ".." / "shared"
    folder = Path(os.environ.get("LAMPQ_REAL", default)).resolve()
    weights = folder / "weights" / "vit_tiny_patch16_224.safetensors"
    if not weights.is_file():
        pytest.skip(f"no trained weights at {weights}; set LAMPQ_REAL to the folder that has them")
    return folder


@pytest.fixture(scope="module")
def quick_sweep(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes the TOML file of a sweep on twenty-four pictures, all trials quick."""
    folder = tmp_path_factory.mktemp("sweep")
    for split in ("calib", "eval"):
        write_pictures(folder / split, bundled_samples(split), 24)  # type: ignore[arg-type]

    def write(text: str) -> Path:
        path = folder / f"{len(list(folder.iterdir()))}.toml"
        pictures = "".join(f'{split} = "{folder / split}"\n' for split in ("calib", "eval"))
        path.write_text(f"{QUICK}{pictures}{text}")
        return path

    return write
