"""Average precision against hand calculation, and 1 for the truth itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lampq.detection.ap import Detection, average_precision, detect
from lampq.detection.coco import read_coco
from lampq.detection.rle import Mask
from lampq.detection.samples import DetectionSamples, Objects
from lampq.errors import DataError

pytest.importorskip("faster_coco_eval")

SIZE = 120


def square(left: int, top: int, width: int, height: int) -> Mask:
    pixels = np.zeros((SIZE, SIZE), np.uint8)
    pixels[top : top + height, left : left + width] = 1
    return Mask.of(pixels)


def samples(*objects: Objects) -> DetectionSamples:
    return DetectionSamples(
        tuple(torch.zeros(3, SIZE, SIZE).byte() for _ in objects),
        objects,
        ((SIZE, SIZE),) * len(objects),
        tuple(range(1, len(objects) + 1)),
        (3, 5),
        ("cat", "dog"),
    )


def found(masks: list[Mask], labels: list[int], scores: list[float]) -> Detection:
    boxes = torch.tensor([mask.box() for mask in masks]).reshape(-1, 4)
    return Detection(boxes, torch.tensor(labels), torch.tensor(scores), tuple(masks))


BIG, SMALL = square(0, 0, 100, 100), square(5, 5, 20, 20)


def test_the_truth_has_precision_one_for_boxes_and_masks() -> None:
    truth = samples(Objects.of([BIG, SMALL], [1, 2]), Objects.of([SMALL], [1]))
    scores = average_precision(truth, [Detection.exact(o) for o in truth.objects])
    for one in (scores.box, scores.mask):
        assert (one.ap, one.ap50, one.ap75, one.small, one.large) == (1, 1, 1, 1, 1)
        assert one.medium is None
        assert one.per_class == {"cat": 1, "dog": 1}
    assert scores.images == 2


def test_an_overlap_of_sixty_eight_percent_counts_at_four_of_ten_thresholds() -> None:
    # 68 of 100 columns: 0.50, 0.55, 0.60 and 0.65 are reached
    truth = samples(Objects.of([BIG], [1]))
    scores = average_precision(truth, [found([square(0, 0, 68, 100)], [1], [0.9])])
    assert scores.box.ap == pytest.approx(0.4)
    assert scores.mask.ap == pytest.approx(0.4)
    assert (scores.box.ap50, scores.box.ap75) == (1, 0)


def test_boxes_and_masks_are_judged_apart() -> None:
    truth = samples(Objects.of([BIG], [1]))
    right_box = Detection.exact(truth.objects[0])
    half = replace(right_box, masks=(square(0, 0, 100, 60),))
    scores = average_precision(truth, [half])
    assert scores.box.ap == 1
    assert scores.mask.ap == pytest.approx(0.3)  # 0.50, 0.55, 0.60


def test_a_false_alarm_before_the_only_hit_halves_the_precision() -> None:
    truth = samples(Objects.of([BIG], [1]))
    wrong = square(60, 60, 30, 30)
    before = found([wrong, BIG], [1, 1], [0.9, 0.8])
    after = found([wrong, BIG], [1, 1], [0.7, 0.8])
    assert average_precision(truth, [before]).box.ap == pytest.approx(0.5)
    assert average_precision(truth, [after]).box.ap == pytest.approx(1.0)


def test_one_of_two_objects_found_covers_the_first_half_of_the_recalls() -> None:
    # precision 1 at the recalls 0.00 to 0.50, which are 51 of 101
    truth = samples(Objects.of([BIG], [1]), Objects.of([BIG], [1]))
    scores = average_precision(truth, [found([BIG], [1], [0.9]), found([], [], [])])
    assert scores.box.ap == pytest.approx(51 / 101)


def test_a_wrong_class_is_a_miss_and_a_class_without_objects_does_not_count() -> None:
    truth = samples(Objects.of([BIG], [1]))
    scores = average_precision(truth, [found([BIG], [2], [0.9])])
    assert scores.box.ap == 0
    assert scores.box.per_class == {"cat": 0, "dog": None}


def test_no_detections_at_all_score_zero() -> None:
    truth = samples(Objects.of([BIG], [1]))
    assert average_precision(truth, [found([], [], [])]).mask.ap == 0


def test_a_detection_inside_a_crowd_is_no_false_alarm() -> None:
    two = Objects.of([SMALL, square(40, 40, 60, 60)], [1, 1])
    crowd = replace(two, iscrowd=torch.tensor([0, 1]))
    guess = found([square(50, 50, 20, 20), SMALL], [1, 1], [0.9, 0.8])
    assert average_precision(samples(crowd), [guess]).box.ap == pytest.approx(1.0)
    assert average_precision(samples(two), [guess]).box.ap50 < 0.5


def test_scores_need_one_detection_a_picture_and_known_labels() -> None:
    truth = samples(Objects.of([BIG], [1]))
    with pytest.raises(DataError, match="1 pictures but detections of 0"):
        average_precision(truth, [])
    with pytest.raises(DataError, match="label 7"):
        average_precision(truth, [found([BIG], [7], [0.9])])


class Painter(nn.Module):
    """A detector that finds one square in every picture, with soft edges."""

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        mask = torch.full((1, 1, SIZE, SIZE), 0.4)
        mask[..., :100, :100] = 0.6
        box, label = torch.tensor([[0.0, 0.0, 100.0, 100.0]]), torch.tensor([1])
        one = {"boxes": box, "labels": label, "scores": torch.tensor([0.9]), "masks": mask}
        return [one for _ in images]


def test_the_answers_of_a_detector_are_scored_with_masks_cut_at_a_half() -> None:
    truth = samples(*(Objects.of([BIG], [1]) for _ in range(3)))
    answers = detect(Painter().eval(), truth, batch=2)
    assert [answer.masks for answer in answers] == [(BIG,)] * 3
    assert average_precision(truth, answers).mask.ap == 1
    with pytest.raises(DataError, match="eval"):
        detect(Painter().train(), truth)


@pytest.mark.slow
def test_the_truth_of_real_pictures_has_precision_one(real: Path) -> None:
    folder = real / "data" / "coco_mini"
    truth = read_coco(folder / "annotations" / "instances_val.json", folder / "val2017", limit=60)
    scores = average_precision(truth, [Detection.exact(o) for o in truth.objects])
    for one in (scores.box, scores.mask):
        assert (one.ap, one.ap50, one.small, one.medium, one.large) == (1, 1, 1, 1, 1)
