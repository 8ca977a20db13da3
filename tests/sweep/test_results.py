from __future__ import annotations

import csv
import io
import sqlite3
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from lampq.config import RunConfig, make_config
from lampq.errors import ConfigError, FormatError
from lampq.sweep import Trial, best, read_results
from lampq.sweep.asked import INPUTS
from lampq.sweep.results import (
    COLUMNS,
    FILE,
    Results,
    failed_row,
    finished_row,
    results_csv,
    results_markdown,
)

NOTHING = dict.fromkeys(INPUTS)


def report(kl: float, top1: float, **more: Any) -> dict[str, Any]:
    quality = {"accuracy": 90.0, "likelihood": -kl - 1, "agreement": -kl}
    return {
        "calibration": {"mixed": quality, **more},
        "scores": {name: {"top1": top1, "images": 40} for name in ("fp32", "uniform", "mixed")},
        "files": {"model.safetensors": 1000},
        "float_bytes": 8000,
        "plan": {"mean_weight_bits": 3.5, "mean_activation_bits": 3.25},
        "seconds": {"fit": 2.0, "evaluate": 1.0},
        "notices": ["one", "two"],
    }


def trial(**options: Any) -> Trial:
    return Trial({**NOTHING, "model": "m"}, make_config(options), options)


def row(kl: float, top1: float, **options: Any) -> dict[str, Any]:
    asked = trial(**options)
    return {**finished_row(asked, report(kl, top1), f"trials/{asked.name}"), "seconds": 1.5}


def test_a_row_comes_back_with_every_option_and_result(tmp_path: Path) -> None:
    results = Results(tmp_path / FILE)
    results.create()
    results.put(row(0.1, 91.0, gamma=3.0, choices=[2, 3, 4], joint=False))
    (found,) = read_results(tmp_path)
    assert set(found) == set(COLUMNS)
    assert {field.name for field in fields(RunConfig)} <= set(COLUMNS)
    assert (found["gamma"], found["choices"], found["joint"]) == (3.0, "2,3,4", 0)
    assert (found["status"], found["failure"], found["top1"]) == ("finished", None, 91.0)
    assert (found["calibration_agreement"], found["smaller"]) == (-0.1, 8.0)
    assert (found["seconds_fit"], found["notices"]) == (2.0, "one; two")


def test_the_table_is_plain_sqlite(tmp_path: Path) -> None:
    results = Results(tmp_path / FILE)
    results.create()
    for gamma, top1 in ((2.0, 80.0), (3.0, 90.0)):
        results.put(row(1 / gamma, top1, gamma=gamma))
    connection = sqlite3.connect(tmp_path / FILE)
    query = "SELECT gamma, top1 FROM trials WHERE calibration_agreement > -0.4"
    assert connection.execute(query).fetchall() == [(3.0, 90.0)]
    connection.close()


def test_a_second_row_of_a_trial_replaces_the_first(tmp_path: Path) -> None:
    results = Results(tmp_path / FILE)
    results.create()
    results.put(failed_row(trial(seed=1), "no memory", "Traceback ..."))
    results.put(row(0.1, 91.0, seed=1))
    (found,) = results.rows()
    assert (found["status"], found["failure"], found["traceback"]) == ("finished", None, None)


def test_the_best_is_the_best_on_calibration_images_whatever_the_evaluation_says() -> None:
    rows = [row(0.3, 95.0, gamma=2.0), row(0.1, 60.0, gamma=3.0), row(0.2, 99.0, gamma=4.0)]
    assert [one["gamma"] for one in best(rows)] == [3.0]
    unknown = [{**one, "top1": None, "uniform_top1": None, "fp32_top1": None} for one in rows]
    assert [one["gamma"] for one in best(unknown)] == [3.0]


def test_each_budget_and_each_model_has_a_best_of_its_own() -> None:
    rows = [
        *(row(0.1, 90.0, bits=4, seed=0), row(0.2, 90.0, bits=4, seed=1)),
        *(row(0.9, 80.0, bits=3, seed=0), row(0.8, 80.0, bits=3, seed=1)),
    ]
    assert [(one["bits"], one["seed"]) for one in best(rows)] == [(4.0, 0), (3.0, 1)]
    rows += [{**rows[3], "model": "other", "calibration_agreement": -2.0}]
    assert [one["model"] for one in best(rows)] == ["m", "m", "other"]


def test_the_score_can_be_chosen() -> None:
    rows = [row(0.1, 90.0, seed=0), {**row(0.2, 90.0, seed=1), "calibration_accuracy": 91.0}]
    assert [one["seed"] for one in best(rows, "accuracy")] == [1]
    assert [one["seed"] for one in best(rows, "loss")] == [0]
    with pytest.raises(ConfigError, match="unknown score 'top1'; known: kl, loss, accuracy"):
        best(rows, "top1")


def test_failed_trials_are_never_the_best() -> None:
    failed = failed_row(trial(seed=1), "it fails")
    assert [one["seed"] for one in best([failed, row(5.0, 10.0, seed=0)])] == [0]
    with pytest.raises(ConfigError, match="no trial of the sweep is finished"):
        best([failed])


def test_a_trained_model_has_its_own_score() -> None:
    trained = {"accuracy": 92.0, "likelihood": -0.5, "agreement": -0.01}
    found = finished_row(trial(), report(0.2, 90.0, reconstructed=trained), "f")
    assert found["calibration_agreement"] == -0.01


def test_without_evaluation_pictures_there_is_no_accuracy() -> None:
    found = finished_row(trial(), {**report(0.2, 90.0), "scores": {}}, "f")
    assert (found["top1"], found["interval95"], found["fp32_top1"]) == (None, None, None)
    assert "| - |" in results_markdown([{**found, "seconds": 1.0}])


def test_print_outs_show_what_is_varied_and_what_failed(tmp_path: Path) -> None:
    results = Results(tmp_path / FILE)
    results.create()
    results.put(row(0.1, 91.0, gamma=3.0))
    results.put({**failed_row(trial(gamma=2.0), "this one fails"), "seconds": 0.5})
    rows = results.rows()
    text = results_markdown(rows)
    assert "| gamma | calib KL | top-1 [%] |" in text
    assert "| 3 | 0.1 | 91.00 |" in text
    assert "| 2 | failed |" in text
    assert f"{trial(gamma=2.0).name} failed: this one fails" in text
    assert f"- `trials/{trial(gamma=3.0).name}`" in text
    flat = list(csv.DictReader(io.StringIO(results_csv(rows))))
    assert [(one["gamma"], one["failure"]) for one in flat] == [
        ("3.0", ""),
        ("2.0", "this one fails"),
    ]


def test_a_folder_without_a_sweep_and_a_damaged_table_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no sweep"):
        read_results(tmp_path)
    (tmp_path / FILE).write_text("no database at all, but long enough to be read as one" * 20)
    with pytest.raises(FormatError, match="is no table of a sweep"):
        read_results(tmp_path)
