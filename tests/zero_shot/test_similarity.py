from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from lampq.zero_shot.similarity import density, pair_similarities, patch_entropy

HEADS = 3


def _mixed(images: int, windows: int, tokens: int, seed: int = 0) -> Tensor:
    """What an attention of three heads gives, (images * windows, tokens, channels), in float64."""
    generator = torch.Generator().manual_seed(seed)
    shape = (images * windows, tokens, HEADS * 4)
    # patches that share a direction, so that similarities are not all near zero
    common = torch.randn(images * windows, 1, 4, generator=generator, dtype=torch.float64)
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    return common.repeat(1, 1, HEADS) + 0.7 * noise


def _similarities(mixed: Tensor, images: int, prefix: int) -> list[NDArray[np.float64]]:
    """All ordered pairs of patches of each image, by loops."""
    heads = sum(mixed.numpy()[:, prefix:, 4 * h : 4 * h + 4] for h in range(HEADS)) / HEADS
    windows = len(heads) // images
    found = []
    for image in range(images):
        values = [
            float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))
            for window in heads[image * windows : (image + 1) * windows]
            for a in window
            for b in window
        ]
        found.append(np.array(values))
    return found


def _entropy(mixed: Tensor, images: int, prefix: int) -> float:
    """PSAQ-ViT's entropy from its definition: ten points, bandwidth 0.01, trapezoids."""
    rows = _similarities(mixed, images, prefix)
    points = np.linspace(min(row.min() for row in rows), max(row.max() for row in rows), 10)
    entropies = []
    for row in rows:
        weights = [
            np.mean(np.exp(-(((x - row) / 0.01) ** 2) / 2) / (0.01 * math.sqrt(2 * math.pi)))
            for x in points
        ]
        p = np.array(weights) + 1e-4
        entropies.append(float(np.trapezoid(-p * np.log(p), points)))
    return float(np.mean(entropies))


@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize(("images", "windows"), [(1, 1), (3, 1), (2, 4)], ids=str)
def test_the_entropy_is_that_of_its_definition(images: int, windows: int, prefix: int) -> None:
    mixed = _mixed(images, windows, 9)
    expected = _entropy(mixed, images, prefix)
    assert float(patch_entropy(mixed, HEADS, images, prefix)) == pytest.approx(expected, rel=1e-9)


def test_pairs_stay_within_their_window_and_images_apart() -> None:
    mixed = _mixed(2, 3, 5)
    pairs, patches = pair_similarities(mixed, HEADS, 2, 1)
    assert (tuple(pairs.shape), patches) == ((2, 3 * 6), 12)
    for row, whole in zip(pairs, _similarities(mixed, 2, 1), strict=True):
        unequal = np.sort(whole[np.abs(whole - 1) > 1e-12])
        np.testing.assert_allclose(np.sort(np.repeat(row.numpy(), 2)), unequal, atol=1e-12)


def test_patches_of_all_directions_have_more_entropy_than_all_but_one_alike() -> None:
    spread = torch.linspace(0, math.pi, 40)
    alike = torch.zeros(40)
    alike[-1] = math.pi
    found = [
        float(patch_entropy(torch.stack([angles.cos(), angles.sin()], dim=1)[None], 1, 1, 0))
        for angles in (spread, alike)
    ]
    assert found[0] > found[1]


@pytest.mark.parametrize("tokens", [1, 2, 6])
def test_equal_patches_have_a_finite_entropy_and_gradient(tokens: int) -> None:
    mixed = torch.ones(2, tokens, 12, requires_grad=True)
    entropy = patch_entropy(mixed, HEADS, 2, 0)
    assert math.isfinite(float(entropy.detach()))
    if entropy.requires_grad:
        entropy.backward()
        assert mixed.grad is not None
        assert bool(torch.isfinite(mixed.grad).all())


def test_the_density_integrates_to_one() -> None:
    values = torch.rand(2, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    points = torch.linspace(-0.2, 1.2, 4001, dtype=torch.float64)
    area = torch.trapezoid(density(values, points), points, dim=1)
    torch.testing.assert_close(area, torch.ones(2, dtype=torch.float64), atol=1e-6, rtol=0)


def test_the_gradient_of_the_density_is_that_of_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(2, 7, generator=generator, dtype=torch.float64).requires_grad_()
    points = torch.linspace(0, 1, 5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda v: density(v, points, 0.2), (values,))


def test_what_is_kept_for_the_gradient_does_not_grow_with_the_points() -> None:
    values = torch.rand(2, 500, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def kept(points: int) -> int:
        total = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal total
            total += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            density(values, torch.linspace(0, 1, points))
        return total

    assert kept(10) - kept(2) == 8
