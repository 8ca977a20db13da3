from __future__ import annotations

import math

import pytest
import torch

from lampq.data import Preprocessing, Samples
from lampq.zero_shot.canvas import Canvas, variation, variation_per_image

HOW = Preprocessing((0.5, 0.4, 0.3), (0.2, 0.25, 0.3), 0.9, 12)


def test_total_variation_is_the_sum_of_four_norms() -> None:
    images = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    total = 0.0
    for down, along in ((0, 1), (1, 0), (1, 1), (1, -1)):
        square = 0.0
        for n in range(2):
            for c in range(3):
                for y in range(4):
                    for x in range(5):
                        if y + down < 4 and 0 <= x + along < 5:
                            away = images[n, c, y + down, x + along] - images[n, c, y, x]
                            square += float(away) ** 2
        total += math.sqrt(square)
    assert float(variation(images)) == pytest.approx(total, rel=1e-5)


def test_a_plain_picture_has_no_variation_and_noise_has_much() -> None:
    plain = torch.full((1, 1, 6, 6), 0.7)
    noise = torch.randn(1, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    assert float(variation(plain)) == 0
    assert float(variation(noise)) > 10


def test_the_variation_of_each_picture_is_that_of_it_alone() -> None:
    images = torch.randn(3, 2, 5, 5, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([variation(images[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(variation_per_image(images), expected)


def test_black_and_white_become_the_ends_of_the_range() -> None:
    canvas = Canvas(HOW)
    bytes_ = torch.stack([torch.zeros(3, 12, 12), torch.full((3, 12, 12), 255)]).to(torch.uint8)
    inputs = Samples(bytes_, None, HOW.mean, HOW.std).inputs(slice(None))
    torch.testing.assert_close(inputs[0], canvas.low.expand(3, 12, 12))
    torch.testing.assert_close(inputs[1], canvas.high.expand(3, 12, 12))


def test_bytes_come_back_through_the_network_input() -> None:
    canvas = Canvas(HOW)
    bytes_ = torch.arange(432).remainder(256).to(torch.uint8).view(1, 3, 12, 12)
    inputs = Samples(bytes_, None, HOW.mean, HOW.std).inputs(slice(None))
    assert torch.equal(canvas.to_bytes(inputs), bytes_)
    assert canvas.shape(5) == (5, 3, 12, 12)


def test_what_is_out_of_range_becomes_black_or_white() -> None:
    canvas = Canvas(HOW)
    assert canvas.to_bytes(torch.full((1, 3, 2, 2), 99.0)).unique().tolist() == [255]
    assert canvas.to_bytes(torch.full((1, 3, 2, 2), -99.0)).unique().tolist() == [0]
