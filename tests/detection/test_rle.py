"""Masks survive their run lengths, and COCO's forms of them are read."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lampq.detection.rle import Mask, coco_package, from_segmentation
from lampq.errors import MissingDependencyError


@given(
    arrays(
        np.uint8,
        st.tuples(st.integers(1, 7), st.integers(1, 7)),
        elements=st.integers(0, 1),
    )
)
def test_a_mask_comes_back_from_its_runs(pixels: np.ndarray) -> None:
    mask = Mask.of(pixels)
    assert np.array_equal(mask.pixels(), pixels)
    assert mask.area == pixels.sum()


def test_runs_go_down_the_columns_and_start_with_zeros() -> None:
    pixels = np.array([[1, 0], [1, 1]])
    assert Mask.of(pixels).counts == (0, 2, 1, 1)
    assert Mask.of(np.array([[0, 0], [1, 0]])).counts == (1, 1, 2)


def test_the_box_of_a_mask_touches_it() -> None:
    pixels = np.zeros((6, 8))
    pixels[2:4, 3:7] = 1
    assert Mask.of(pixels).box() == (3.0, 2.0, 7.0, 4.0)
    assert Mask.of(np.zeros((6, 8))).box() == (0.0, 0.0, 0.0, 0.0)


def test_a_rectangle_is_the_same_as_polygon_and_as_runs() -> None:
    pytest.importorskip("faster_coco_eval")
    pixels = np.zeros((10, 12), np.uint8)
    pixels[2:6, 3:9] = 1
    polygon = [[3, 2, 9, 2, 9, 6, 3, 6]]
    assert np.array_equal(from_segmentation(polygon, 10, 12).pixels(), pixels)
    assert from_segmentation(Mask.of(pixels).to_json(), 10, 12) == Mask.of(pixels)
    api = coco_package().mask
    packed = api.encode(np.asfortranarray(pixels))
    assert from_segmentation(packed, 10, 12) == Mask.of(pixels)


@pytest.mark.parametrize(
    ("segmentation", "found"),
    [
        ([], "neither"),
        ([[1, 2, 3, 4]], "neither"),
        ([[1, 2, 3, 4, 5, 6, 7]], "x and y"),
        ({"size": [4, 5], "counts": [20]}, "size"),
        ({"size": [10, 12], "counts": [7]}, "7 pixels"),
        ({"size": [10, 12]}, "no counts"),
        (None, "neither"),
    ],
)
def test_other_segmentations_are_refused(segmentation: object, found: str) -> None:
    with pytest.raises((ValueError, TypeError), match=found):
        from_segmentation(segmentation, 10, 12)


def test_a_missing_package_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "faster_coco_eval", None)
    with pytest.raises(MissingDependencyError, match=r"lampq\[detection\]"):
        coco_package()
