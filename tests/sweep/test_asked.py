from __future__ import annotations

from pathlib import Path

import pytest

from lampq.config import make_config
from lampq.errors import ConfigError, LampqError
from lampq.sweep import Trial, check, read_sweep


def asked(tmp_path: Path, text: str) -> tuple[Trial, ...]:
    path = tmp_path / "sweep.toml"
    path.write_text(text)
    return read_sweep(path)


def test_a_grid_is_every_combination_in_the_order_of_the_file(tmp_path: Path) -> None:
    trials = asked(tmp_path, 'metric = "fisher"\n[grid]\ngamma = [2, 3.5]\nseed = [0, 1]\n')
    assert [(t.config.gamma, t.config.seed) for t in trials] == [
        *((2.0, 0), (2.0, 1), (3.5, 0), (3.5, 1)),
    ]
    assert {t.config.metric for t in trials} == {"fisher"}
    assert trials[2].described == "gamma=3.5 seed=0"


def test_every_entry_of_a_list_goes_through_the_grid_and_its_own(tmp_path: Path) -> None:
    text = """
bits = 4
[grid]
bits = [3, 4]
[[trials]]
metric = "output"
[[trials]]
metric = "fisher"
[trials.grid]
gamma = [2.0, 4.0]
"""
    trials = asked(tmp_path, text)
    assert [(t.config.metric, t.config.bits, t.config.gamma) for t in trials] == [
        *(("output", 3.0, 4.0), ("output", 4.0, 4.0)),
        *(("fisher", 3.0, 2.0), ("fisher", 3.0, 4.0), ("fisher", 4.0, 2.0), ("fisher", 4.0, 4.0)),
    ]


def test_a_file_without_grid_and_list_is_one_trial(tmp_path: Path) -> None:
    (trial,) = asked(tmp_path, 'preset = "paper"\nbits = 3\n')
    assert trial.config == make_config({"preset": "paper", "bits": 3})
    assert trial.inputs["model"] == "fashion_vit"


def test_lists_of_widths_are_values_of_a_grid(tmp_path: Path) -> None:
    trials = asked(tmp_path, "[grid]\nchoices = [[2, 4], [1, 2, 3, 4, 5]]\n")
    assert [t.config.choices for t in trials] == [(2, 4), (1, 2, 3, 4, 5)]


def test_none_takes_back_what_is_common(tmp_path: Path) -> None:
    text = 'reconstruct = "align"\n[grid]\nreconstruct = ["none", "align"]\nfallback = ["none"]\n'
    trials = asked(tmp_path, text)
    assert [t.config.reconstruct for t in trials] == [None, "align"]
    assert {t.config.fallback for t in trials} == {"none"}


def test_inputs_can_be_varied_and_paths_are_absolute(tmp_path: Path) -> None:
    text = """
calib = "pictures"
mean = [0.5, 0.4, 0.3]
crop_pct = 1
[grid]
model = ["fashion_vit", "fashion_swin"]
"""
    trials = asked(tmp_path, text)
    assert [t.inputs["model"] for t in trials] == ["fashion_vit", "fashion_swin"]
    assert trials[0].path("calib") == Path.cwd() / "pictures"
    assert (trials[0].inputs["mean"], trials[0].inputs["crop_pct"]) == ("0.5,0.4,0.3", 1.0)
    assert trials[0].path("weights") is None
    assert trials[0].share != trials[1].share


def test_a_trial_is_the_same_whatever_else_the_file_asks_for(tmp_path: Path) -> None:
    few = asked(tmp_path, "[grid]\ngamma = [3.0]\n")
    many = asked(tmp_path, "[grid]\nseed = [0, 1]\ngamma = [2.0, 3.0]\n")
    assert few[0].key == many[1].key
    assert len({t.key for t in many}) == len({t.name for t in many}) == 4
    assert many[0].share == many[1].share != many[2].share


def test_names_of_folders_are_harmless(tmp_path: Path) -> None:
    (trial,) = asked(tmp_path, f'[grid]\nweights = ["/a b/*{"x" * 200}.pth"]\n')
    assert len(trial.name) < 100
    assert not set(trial.name) & set("/ *?:\\")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('task = "detection"', "a sweep is one of classifiers, not of detection"),
        ("gama = 3", "unknown option 'gama'; known: gamma"),
        ("[grid]\ngama = [3]", "unknown option 'gama'; known: gamma"),
        ("[grid]\ngamma = 3", "grid.gamma must be a list of values, got 3"),
        ("[grid]\ngamma = []", r"grid.gamma must be a list of values, got \[\]"),
        ("grid = 3", "grid must be a table of lists, got 3"),
        ("trials = 3", r"trials must be tables: write \[\[trials\]\]"),
        ("trials = []", "asks for no trial"),
        ("[grid]\ngamma = [4.0, 0.5]", r"gamma must be above 1, got 0.5 \(in gamma=0.5\)"),
        ('[grid]\nbits = ["four"]', r"bits must be a number, got 'four' \(in bits=four\)"),
        ("[grid]\nseed = [0, 0]", "the same trial is asked for twice: seed=0"),
        ("[[trials]]\nseed = 1\n[grid]\nseed = [2]", "a trial gives seed one value, and its grid"),
        ("model = 3", "model must be a name, got 3"),
        ("calib = 3", "calib must be a path, got 3"),
        ('crop_pct = "x"', "crop_pct must be a number, got 'x'"),
        ('mean = ["x"]', "mean must be one number or a list of them"),
        ("[grid", "is not valid TOML"),
    ],
)
def test_what_is_wrong_is_told_in_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        asked(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[grid]\nmethod = ["minmax", "adalgo"]', r"unknown method 'adalgo'.*in method=adalgo"),
        ('[grid]\nmetric = ["fishr"]', "unknown metric 'fishr'"),
        ("choices = [3, 4]\n[grid]\nbits = [3.5, 2]", r"no assignment averages 2 .*in bits=2"),
        ('model = "fashion_vt"', "unknown model 'fashion_vt'"),
        ('calib = "nowhere"', "no folder"),
        ('plan = "nowhere.json"', "no plan"),
        ("mean = [0.1, 0.2]", "the model has 1 channels, got 2 numbers"),
    ],
)
def test_what_only_the_model_tells_is_told_before_the_first_trial(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(LampqError, match=message):
        check(asked(tmp_path, text))
