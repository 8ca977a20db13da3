from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

from lampq.config import PRESETS, RunConfig, make_config, read_toml
from lampq.errors import ConfigError

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "bits-low": ({"bits": 0.5}, r"bits must be in 1\.\.10, got 0\.5"),
    "bits-high": ({"bits": 11}, r"bits must be in 1\.\.10, got 11"),
    "bits-nan": ({"bits": float("nan")}, "bits"),
    "bits-text": ({"bits": "four"}, "bits must be a number, got 'four'"),
    "bits-bool": ({"bits": True}, "bits must be a number, got True"),
    "act-bits": ({"act_bits": 11}, r"act_bits must be in 1\.\.10, got 11"),
    "edge-bits": ({"edge_bits": 0}, r"edge_bits must be in 1\.\.10, got 0"),
    "edge-bits-text": ({"edge_bits": "wide"}, "edge_bits must be one of target or a whole number"),
    "matmul-bits": ({"matmul_bits": 12}, r"matmul_bits must be in 1\.\.10, got 12"),
    "beta": ({"beta": 0}, r"beta must be in 1\.\.10, got 0"),
    "images": ({"images": 0}, "images must be at least 1, got 0"),
    "fit-images": ({"fit_images": -3}, "fit_images must be at least 1, got -3"),
    "fit-views": ({"fit_views": 0}, "fit_views must be at least 1, got 0"),
    "fit-views-detection": (
        {"task": "detection", "fit_views": 2},
        "fit_views must be 1 for detection, got 2",
    ),
    "metric-images": ({"metric_images": 0}, "metric_images must be at least 1"),
    "probe-images": ({"probe_images": 0}, "probe_images must be at least 1"),
    "trace-images": ({"trace_images": 0}, "trace_images must be at least 1"),
    "score-images": ({"score_images": 0}, "score_images must be at least 1"),
    "images-float": ({"images": 2.5}, r"images must be a whole number, got 2\.5"),
    "exchanges": ({"exchanges": -1}, "exchanges must not be negative, got -1"),
    "patience": ({"patience": -1}, "patience must not be negative"),
    "seed": ({"seed": -1}, "seed must not be negative"),
    "gamma": ({"gamma": 1}, "gamma must be above 1, got 1"),
    "gamma-nan": ({"gamma": float("nan")}, "gamma"),
    "gamma-inf": ({"gamma": float("inf")}, "gamma"),
    "block-contrast": (
        {"block_contrast": 1.5},
        r"block_contrast must be in \[0, 1\], got 1\.5",
    ),
    "mu-zero": ({"mu": 0}, "mu is a share of the blocks"),
    "mu-high": ({"mu": 1.5}, r"mu is a share of the blocks in \(0, 1\], got 1\.5"),
    "target-size": ({"target_size": 0}, "target_size must be positive, got 0"),
    "choices-none": ({"choices": []}, "choices must be different widths in .*, got none"),
    "choices-twice": ({"choices": [2, 3, 2]}, "choices must be different widths .*, got 2,3,2"),
    "choices-wide": ({"choices": [2, 11]}, "choices must be different widths in .*, got 2,11"),
    "choices-text": ({"choices": ["2"]}, "choices must be a list of a whole number"),
    "act-choices": (
        {"joint": False, "act_choices": [2, 11]},
        "act_choices must be different widths in .*, got 2,11",
    ),
    "act-choices-joint": (
        {"act_choices": [2, 3]},
        "act_choices are for separate widths: set joint",
    ),
    "speed-bits": ({"profile": "speed", "bits": 9}, r"bits must be in 1\.\.8 with profile speed"),
    "speed-act-bits": (
        {"profile": "speed", "act_bits": 9},
        r"act_bits must be in 1\.\.8 with profile speed, got 9",
    ),
    "speed-edge-bits": ({"profile": "speed", "edge_bits": 10}, r"edge_bits must be in 1\.\.8 with"),
    "speed-choices": (
        {"profile": "speed", "choices": [8, 9]},
        r"choices must be different widths in 1\.\.8 with profile speed, got 8,9",
    ),
    "joint": ({"joint": 1}, "joint must be true or false, got 1"),
    "hessian": ({"hessian": "x"}, "hessian must be one of fisher, hutchinson"),
    "configurations": ({"configurations": 0}, "configurations must be at least 1"),
    "search": ({"search": "slow"}, "search must be one of fast, exhaustive, got 'slow'"),
    "zero-code": ({"zero_code": "no"}, "zero_code must be one of extra, reserved"),
    "onebit": ({"onebit": "no"}, "onebit must be one of adalog, affine"),
    "compensation": ({"compensation": "erq"}, "compensation must be one of none, gptq"),
    "damping": ({"damping": 0}, "damping must be positive, got 0"),
    "input-ranges": ({"input_ranges": "row"}, "input_ranges must be one of static, token"),
    "ranges-for-speed": (
        {"input_ranges": "token", "profile": "speed"},
        "with profile speed, input_ranges must be static, got 'token'",
    ),
    "prefix-bits": ({"prefix_bits": 11}, r"prefix_bits must be in 1\.\.10, got 11"),
    "prefix-for-speed": (
        {"prefix_bits": 8, "profile": "speed"},
        "with profile speed, prefix_bits must be target, got 8",
    ),
    "labels": ({"labels": "some"}, "labels must be one of model, data"),
    "alpha-signal": ({"alpha_signal": "ce"}, "alpha_signal must be one of accuracy, loss, kl"),
    "alpha-trace": ({"alpha_trace": "x"}, "alpha_trace must be one of quantized, fp"),
    "exchange-error": ({"exchange_error": "x"}, "exchange_error must be one of cost, local"),
    "ratios": ({"ratios": "x"}, "ratios must be one of paper, exact, optimal, measured"),
    "gain-formula": ({"gain_formula": "x"}, "gain_formula must be one of verbal, printed"),
    "swap-budget": ({"swap_budget": "x"}, "swap_budget must be one of weighted, unweighted"),
    "accept": ({"accept": "x"}, "accept must be one of accuracy, loss, kl"),
    "preset": ({"preset": "fast"}, "unknown preset 'fast'; known: best, paper"),
    "preset-list": ({"preset": ["best"]}, "preset"),
    "unknown": ({"bit": 3}, "unknown option 'bit'; known: .*bits"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_option_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(options)


@pytest.mark.parametrize("options", [options for options, _ in WRONG.values()], ids=WRONG)
def test_a_message_is_one_line_in_lower_case_without_a_full_stop(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^[a-z][^\n]*[^.\n]$"):
        make_config(options)


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        make_config({}).bits = 3.0  # type: ignore[misc]


def test_options_that_are_none_are_not_set() -> None:
    assert make_config({"bits": None, "seed": None}) == make_config({})


def test_an_option_given_beside_a_preset_wins() -> None:
    config = make_config({"preset": "paper", "metric": "kl", "patience": 7})
    assert (config.metric, config.patience) == ("kl", 7)
    assert config.accept == "accuracy"


def test_the_paper_preset_takes_the_literal_readings() -> None:
    config = make_config({"preset": "paper"})
    assert config.metric == "fisher"
    assert config.alpha_signal == "accuracy"
    assert config.alpha_trace == "quantized"
    assert config.exchange_error == "cumulative"
    assert config.ratios == "paper"
    assert config.accept == "accuracy"
    assert config.patience == 0


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_a_valid_configuration(preset: str) -> None:
    assert make_config({"preset": preset}).preset == preset


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (3, (1, 2, 3, 4, 5)),
        (3.5, (1, 2, 3, 4, 5)),
        (4, (2, 3, 4, 5)),
        (6, (4, 5, 6, 7, 8)),
        (8, (6, 7, 8, 9, 10)),
        (2, (1, 2, 3, 4)),
        (1, (1, 2, 3)),
    ],
    ids=str,
)
def test_the_choices_of_the_paper_preset_lie_around_the_target(
    bits: float, expected: tuple[int, ...]
) -> None:
    config = make_config({"preset": "paper", "bits": bits})
    assert tuple(width.weight for width in config.widths) == expected


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("paper", [(2, 6), (3, 7), (4, 8), (5, 9), (6, 10)]),
        ("best", [(2, 6), (3, 7), (4, 8), (5, 9), (6, 10), (8, 10)]),
    ],
)
def test_four_bit_weights_with_eight_bit_inputs_have_these_choices(
    preset: str, expected: list[tuple[int, int]]
) -> None:
    widths = make_config({"preset": preset, "bits": 4, "act_bits": 8}).widths
    assert [(width.weight, width.activation) for width in widths] == expected


@pytest.mark.parametrize("preset", PRESETS)
def test_there_is_something_to_choose_around_eight_bits(preset: str) -> None:
    widths = make_config({"preset": preset, "bits": 8, "act_bits": 8}).widths
    assert [(width.weight, width.activation) for width in widths] == [
        (b, b) for b in (6, 7, 8, 9, 10)
    ]


@pytest.mark.parametrize("bits", [2, 3, 4.5, 7, 8])
def test_the_target_of_the_best_preset_is_one_of_its_choices(bits: float) -> None:
    config = make_config({"bits": bits})
    assert config.target in config.widths


def test_choices_are_put_in_order() -> None:
    widths = make_config({"choices": [5, 2, 3]}).widths
    assert [width.weight for width in widths] == [2, 3, 5]
    assert list(widths) == sorted(widths)


@pytest.mark.parametrize(
    ("bits", "act_bits", "expected"),
    [
        (4, None, [(2, 2), (4, 4), (8, 8)]),
        (4, 6, [(2, 4), (4, 6), (8, 10)]),
        (4, 2, [(2, 1), (4, 2), (8, 6)]),
        (4.5, 8, [(2, 6), (4, 8), (8, 10)]),
    ],
    ids=str,
)
def test_activation_widths_keep_their_distance_within_one_to_ten(
    bits: float, act_bits: int | None, expected: list[tuple[int, int]]
) -> None:
    config = make_config({"bits": bits, "act_bits": act_bits, "choices": [2, 4, 8]})
    assert [(width.weight, width.activation) for width in config.widths] == expected


@pytest.mark.parametrize(("bits", "expected"), [(4, 4), (4.99, 4), (5 - 1e-12, 5), (1.0, 1)])
def test_the_target_is_the_widest_uniform_width_within_the_budget(
    bits: float, expected: int
) -> None:
    assert make_config({"bits": bits}).target.weight == expected


@pytest.mark.parametrize("preset", PRESETS)
def test_the_effective_configuration_survives_json(preset: str) -> None:
    config = make_config({"preset": preset, "bits": 3})
    content = json.loads(json.dumps(config.to_json()))
    assert set(content) == {field.name for field in fields(RunConfig)}
    again = make_config(content)
    assert again.widths == config.widths
    assert again.to_json() == config.to_json()


def test_a_toml_file_gives_options(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('bits = 3\nchoices = [2, 3, 4]\nmetric = "kl"\nedge_bits = "target"\n')
    config = make_config(read_toml(path))
    assert config.bits == 3.0
    assert config.choices == (2, 3, 4)
    assert (config.metric, config.edge_bits) == ("kl", "target")


def test_a_toml_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no configuration file .*none\.toml"):
        read_toml(tmp_path / "none.toml")


@pytest.mark.parametrize("content", [b"bits = ", b"\xff\xfe", b"bits 3"], ids=repr)
def test_a_file_that_is_no_toml_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"run\.toml' is not valid TOML"):
        read_toml(path)


def test_a_folder_instead_of_a_toml_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        read_toml(tmp_path)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize(("bits", "act_bits"), [(8, None), (4, 8), (7.5, 8), (3, 6)])
def test_for_speed_no_choice_is_above_eight_bits(
    preset: str, joint: bool, bits: float, act_bits: int | None
) -> None:
    options = {"preset": preset, "bits": bits, "act_bits": act_bits, "joint": joint}
    widths = make_config({**options, "profile": "speed"}).widths
    assert max(max(b.weight, b.activation) for b in widths) <= 8
    plain = make_config(options).widths
    narrow = {b for b in plain if max(b.weight, b.activation) <= 8}
    assert narrow <= set(widths)
    # attention products are in float, whatever is said of them
    make_config({**options, "profile": "speed", "matmul_bits": 10})
