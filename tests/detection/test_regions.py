"""Anchors and pooled regions."""

from __future__ import annotations

import torch
from torchvision.models.detection.image_list import ImageList

from lampq.detection.regions import Anchors, RegionPool


def test_anchors_stand_at_multiples_of_their_stride_and_are_not_rounded() -> None:
    anchors = Anchors((32, 64), (0.5, 1.0, 2.0), (4, 8))
    maps = [torch.zeros(2, 1, 3, 2), torch.zeros(2, 1, 2, 1)]
    found = anchors(ImageList(torch.zeros(2, 3, 12, 8), [(12, 8), (10, 8)]), maps)
    assert len(found) == 2
    assert torch.equal(found[0], found[1])
    assert found[0].shape == (3 * (6 + 2), 4)
    square = found[0][1::3]
    # row by row, columns first
    assert square[1].tolist() == [4 - 16, -16, 4 + 16, 16]
    assert square[2].tolist() == [-16, 4 - 16, 16, 4 + 16]
    assert square[7].tolist() == [-32, 8 - 32, 32, 8 + 32]
    sides = found[0][:3, 2:] - found[0][:3, :2]
    torch.testing.assert_close(sides.prod(1), torch.full((3,), 1024.0))
    torch.testing.assert_close(sides[:, 1] / sides[:, 0], torch.tensor([0.5, 1.0, 2.0]))


def test_a_region_is_taken_from_the_level_of_its_scale() -> None:
    pool = RegionPool(7, (4, 8, 16, 32), 56)
    sides = torch.tensor([10.0, 111.0, 112.0, 223.0, 224.0, 448.0, 5000.0])
    boxes = torch.stack([sides * 0, sides * 0, sides, sides], dim=1)
    assert pool.levels(boxes).tolist() == [0, 0, 1, 1, 2, 3, 3]


def test_regions_keep_their_order_and_their_image() -> None:
    pool = RegionPool(2, (4, 8), 8)
    fine = torch.arange(2.0).view(2, 1, 1, 1).expand(2, 1, 16, 16) + 1
    maps = {"0": fine, "1": 10 * fine[:, :, :8, :8]}
    small, large = [8.0, 8.0, 16.0, 16.0], [8.0, 8.0, 40.0, 40.0]
    found = pool(maps, [torch.tensor([large, small]), torch.tensor([small, large])], [])
    assert found.shape == (4, 1, 2, 2)
    assert found.mean((1, 2, 3)).tolist() == [10.0, 1.0, 2.0, 20.0]


def test_no_region_gives_no_map() -> None:
    pool = RegionPool(2, (4, 8), 8)
    maps = {"0": torch.ones(1, 3, 8, 8), "1": torch.ones(1, 3, 4, 4)}
    assert pool(maps, [torch.zeros(0, 4)], []).shape == (0, 3, 2, 2)
