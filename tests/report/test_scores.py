"""Scores as reports show them."""

from __future__ import annotations

from typing import Any

from lampq.report.scores import detailed, interval, markdown, measured, parts


def precision(ap: float | None) -> dict[str, Any]:
    sizes = dict.fromkeys(("ap50", "ap75", "small", "medium", "large"), ap)
    return {"ap": ap, **sizes, "per_class": {"cat": ap, "dog": None}}


DETECTOR = {"box": precision(0.5), "mask": precision(0.25), "images": 7}
CLASSIFIER = {"top1": 80.0, "images": 100}


def test_the_parts_of_a_score_are_in_percent() -> None:
    assert parts(CLASSIFIER) == {"top-1 [%]": 80.0}
    assert parts(DETECTOR) == {"box AP [%]": 50.0, "mask AP [%]": 25.0}


def test_only_accuracies_have_an_interval() -> None:
    assert round(interval(CLASSIFIER) or 0, 2) == 7.77
    assert interval(DETECTOR) is None


def test_the_table_of_an_accuracy_has_its_interval() -> None:
    lines = markdown({"mixed": CLASSIFIER})
    assert lines[0] == "| model | top-1 [%] | 95 % interval | images |"
    assert lines[2] == "| mixed | 80.00 | ±7.77 | 100 |"
    assert len(lines) == 3


def test_the_table_of_a_detector_goes_down_to_classes() -> None:
    lines = markdown({"mixed": DETECTOR})
    assert lines[2] == "| mixed | 50.00 | 25.00 | 7 |"
    assert "| cat | 50.00 | 25.00 |" in lines
    assert "| dog | - | - |" in lines
    assert "| small objects | 50.00 | 25.00 |" in lines


def test_all_precisions_are_one_table() -> None:
    columns, rows = detailed({"fp32": DETECTOR, "mixed": DETECTOR})
    assert columns == ["of", "fp32 box", "mixed box", "fp32 mask", "mixed mask"]
    assert rows[0] == ["all", 50.0, 50.0, 25.0, 25.0]
    assert len(rows) == 6 + 2
    assert detailed({"mixed": CLASSIFIER}) == ([], [])


def test_the_page_shows_what_was_measured() -> None:
    found = measured({"scores": {"mixed": DETECTOR}})
    assert (found["title"], found["images"]) == ("Box AP", 7)
    assert found["values"]["mixed"] == {"value": 50.0, "interval": None}


def test_without_evaluation_pictures_the_page_shows_the_calibration() -> None:
    losses = {"scores": {}, "calibration": {"mixed": {"ap": None, "likelihood": -2.5}}}
    assert measured(losses)["title"] == "Loss, calibration"
    assert measured(losses)["values"]["mixed"]["value"] == 2.5
    points = {"scores": {}, "calibration": {"mixed": {"ap": 30.0, "likelihood": None}}}
    assert (measured(points)["title"], measured(points)["unit"]) == ("AP, calibration", " %")
