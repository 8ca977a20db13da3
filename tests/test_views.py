from __future__ import annotations

import pytest
import torch

from lampq.config import make_config
from lampq.data import Samples
from lampq.pipeline import seen_by_fits
from lampq.views import mixed, shown, with_views


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_pictures_are_shown_cropped_and_mirrored_or_as_they_are() -> None:
    images = torch.arange(2 * 3 * 8 * 8).view(2, 3, 8, 8).float()
    assert torch.equal(shown(images, 1.0, seeded(0), mirror=False), images)
    views = [shown(images[1:], 1.0, seeded(seed), mirror=True)[0] for seed in range(20)]
    mirrored = [torch.equal(view, images[1].flip(-1)) for view in views]
    assert all(m or torch.equal(v, images[1]) for m, v in zip(mirrored, views, strict=True))
    assert 0 < sum(mirrored) < 20
    cropped = shown(images, 0.3, seeded(0), mirror=False)
    assert cropped.shape == images.shape
    assert not torch.equal(cropped, images)
    assert torch.equal(shown(images, 0.3, seeded(0), mirror=False), cropped)
    assert not torch.equal(shown(images, 0.3, seeded(1), mirror=False), cropped)


def test_mixed_pictures_are_blends_of_two_or_have_a_part_of_the_other() -> None:
    images = torch.stack([torch.zeros(3, 8, 8), torch.ones(3, 8, 8)])
    assert torch.equal(mixed(images, 0.0, seeded(0)), images)
    blended, patched, whole = 0, 0, 0
    for seed in range(60):
        first, second = mixed(images, 0.8, seeded(seed))
        for picture, own in ((first, 0.0), (second, 1.0)):
            values = picture.unique().tolist()
            if len(values) == 1 and 0 < values[0] < 1:
                blended += 1
            elif len(values) == 2:
                assert values == [0, 1]
                rows, columns = (picture[0] != own).nonzero(as_tuple=True)
                box = picture[0, rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
                assert bool((box != own).all())
                patched += 1
            else:
                whole += 1
    assert min(blended, patched, whole) > 10


@pytest.mark.parametrize("kind", [torch.uint8, torch.float32])
def test_views_of_images_come_behind_them_with_their_labels(kind: torch.dtype) -> None:
    pixels = torch.randint(256, (3, 3, 8, 8), generator=seeded(0))
    samples = Samples(pixels.to(kind), torch.arange(3), (0.5,) * 3, (0.5,) * 3)
    more = with_views(samples, 3, 0)
    assert more.images.dtype == kind
    assert torch.equal(more.images[:3], samples.images)
    assert more.labels is not None
    assert more.labels.tolist() == [0, 1, 2] * 3
    # a view lies between the extremes of its own picture
    for view, label in zip(more.images, more.labels, strict=True):
        own = samples.images[label].flatten(1)
        assert bool((view.flatten(1).amin(1) >= own.amin(1)).all())
        assert bool((view.flatten(1).amax(1) <= own.amax(1)).all())
    assert len({view.numpy().tobytes() for view in more.images}) > 6
    assert torch.equal(with_views(samples, 3, 0).images, more.images)
    assert not torch.equal(with_views(samples, 3, 1).images, more.images)
    assert with_views(samples, 1, 0) is samples


@pytest.mark.parametrize(
    ("images", "options", "seen"),
    [
        (8, {}, 32),
        (8, {"fit_views": 2}, 16),
        (8, {"fit_views": 1}, 8),
        (8, {"preset": "paper"}, 8),
        (100, {}, 200),
        (129, {}, 129),
        (300, {}, 300),
        (300, {"fit_images": 64}, 256),
    ],
)
def test_fits_see_other_views_where_images_are_few(
    images: int, options: dict[str, object], seen: int
) -> None:
    samples = Samples(torch.rand(images, 3, 4, 4, generator=seeded(0)))
    assert len(seen_by_fits(samples, make_config(options))) == seen
