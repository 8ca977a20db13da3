"""What was found is where it was found, in every column."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lampq.detection.ap import Detection
from lampq.detection.pictures import GAP, LINE, drawn, save_side_by_side, side_by_side
from lampq.detection.rle import Mask
from lampq.detection.samples import DetectionSamples, Objects
from lampq.errors import DataError

MASK = Mask.of(np.pad(np.ones((20, 20)), ((30, 14), (30, 14))))


def samples(count: int = 2) -> DetectionSamples:
    return DetectionSamples(
        tuple(torch.zeros(3, 64, 64).byte() for _ in range(count)),
        (Objects.of([MASK], [1]),) * count,
        ((64, 64),) * count,
        tuple(range(count)),
        (1,),
        ("cat",),
    )


def found(score: float) -> Detection:
    exact = Detection.exact(samples().objects[0])
    return Detection(exact.boxes, exact.labels, torch.tensor([score]), exact.masks)


def test_the_mask_is_tinted_and_the_rest_is_left_alone() -> None:
    pixels = np.asarray(drawn(samples().images[0], found(0.9), ("cat",), zoom=1))
    assert (pixels[33:48, 33:48].sum(-1) > 0).all()
    assert (pixels[53:, :] == 0).all()
    assert (pixels[:, :28] == 0).all()


def test_unsure_detections_are_not_drawn() -> None:
    pixels = np.asarray(drawn(samples().images[0], found(0.3), ("cat",)))
    assert (pixels == 0).all()
    pixels = np.asarray(drawn(samples().images[0], found(0.3), ("cat",), least=0.2))
    assert (pixels > 0).any()


def test_every_model_has_its_column_and_every_picture_its_row(tmp_path: Path) -> None:
    columns = {"fp32": [found(0.9)] * 2, "4 bits": [found(0.1)] * 2}
    sheet = side_by_side(samples(), columns, zoom=1)
    assert sheet.size == (GAP + 2 * (64 + GAP), LINE + GAP + 2 * (64 + GAP))
    pixels = np.asarray(sheet)
    top, left, right = LINE + GAP, GAP, GAP + 64 + GAP
    assert (pixels[top : top + 64, left : left + 64] > 0).any()
    assert (pixels[top : top + 64, right : right + 64] == 0).all()
    save_side_by_side(tmp_path / "both.png", samples(), columns, zoom=1)
    with Image.open(tmp_path / "both.png") as opened:
        assert np.array_equal(np.asarray(opened), pixels)
    assert [path.name for path in tmp_path.iterdir()] == ["both.png"]


def test_a_model_without_an_answer_for_every_picture_is_refused() -> None:
    with pytest.raises(DataError, match="fp32 has detections of 1"):
        side_by_side(samples(), {"fp32": [found(0.9)]})
    with pytest.raises(DataError, match="a model"):
        side_by_side(samples(), {})
