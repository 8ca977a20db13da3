"""RunConfig: every option of a run, checked when it is built; presets; TOML."""

from __future__ import annotations

import math
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from lampq.errors import ConfigError
from lampq.types import INTEGER_BITS, MAX_BITS, MIN_BITS, LayerBits, Profile

Preset = Literal["best", "paper"]
TaskName = Literal["classification", "detection"]
# what alpha_signal and accept may be
SIGNALS: dict[str, tuple[str, ...]] = {
    "classification": ("accuracy", "loss", "kl"),
    "detection": ("ap", "loss"),
}
# what a detector has no form of: logits, second derivatives, integer kernels
REFUSED: dict[str, dict[str, tuple[str, ...]]] = {
    "classification": {},
    "detection": {
        "labels": ("model",),
        "metric": ("kl",),
        "hessian": ("hutchinson",),
        "profile": ("speed",),
    },
}
WIDE = (2, 3, 4, 5, 6, 8)


@dataclass(frozen=True, slots=True)
class RunConfig:
    """All options of one run. Field names are the command-line flags and the TOML keys.

    The defaults are those of the preset "best"; ``make_config`` fills in another preset.
    """

    # what is wanted
    bits: float = 4.0
    act_bits: int | None = None
    target_size: int | None = None
    target_bops: int | None = None
    choices: tuple[int, ...] | None = None
    joint: bool = True
    act_choices: tuple[int, ...] | None = None
    profile: Profile = "accuracy"
    preset: Preset = "best"
    task: TaskName = "classification"
    seed: int = 0
    images: int = 1024
    # base method
    method: str = "adalog"
    rotation: Literal["none", "attention"] = "attention"
    fit_images: int = 1024
    fit_views: int = 4
    fit_tokens: Literal["uniform", "fisher"] = "fisher"
    fit_inputs: Literal["published", "float", "quantized"] = "published"
    search: Literal["fast", "exhaustive"] = "fast"
    zero_code: Literal["extra", "reserved"] = "extra"
    onebit: Literal["adalog", "affine"] = "affine"
    fold: Literal["full", "searched"] = "searched"
    error: Literal["plain", "relative"] = "relative"
    compensation: Literal["none", "gptq"] = "gptq"
    damping: float = 0.01
    input_ranges: Literal["static", "token"] = "token"
    prefix_bits: Literal["target"] | int = 8
    sites: Literal["published", "inputs"] = "inputs"
    edge_bits: Literal["target"] | int = 8
    matmul_bits: Literal["target", "follow"] | int = "target"
    head_bits: Literal["target", "float"] | int = "target"
    rest_bits: Literal[16, 32] = 16
    # metric
    metric: str = "output"
    metric_images: int = 128
    block_contrast: float = 1.0
    labels: Literal["model", "data"] = "model"
    gamma: float = 4.0
    beta: int = 2
    mu: float = 0.5
    probe_images: int = 1024
    trace_images: int = 64
    alpha_signal: Literal["accuracy", "loss", "kl", "ap"] = "kl"
    alpha_trace: Literal["quantized", "fp"] = "fp"
    hessian: Literal["fisher", "hutchinson"] = "fisher"
    # allocation and exchanges
    allocator: str = "ilp"
    configurations: int = 519
    start: Literal["allocated", "better"] = "better"
    exchanges: int = 24
    exchange_error: Literal["cost", "local", "cumulative"] = "cost"
    ratios: Literal["paper", "exact", "optimal", "measured"] = "measured"
    gain_formula: Literal["verbal", "printed"] = "verbal"
    swap_budget: Literal["weighted", "unweighted"] = "weighted"
    accept: Literal["accuracy", "loss", "kl", "ap"] = "kl"
    score_images: int = 256
    patience: int = 5
    fallback: Literal["uniform", "none"] = "uniform"
    # reconstruction
    reconstruct: str | None = None
    reconstruct_images: int = 1024
    ridge: float = 1.0
    iterations: int | None = None
    lr_weights: float | None = None
    lr_scales: float | None = None
    lr_affine: float | None = None
    train_precision: Literal["auto", "float32", "bfloat16"] = "auto"

    def __post_init__(self) -> None:
        rates = ("lr_weights", "lr_scales", "lr_affine")
        for name in ("bits", "gamma", "mu", "damping", "ridge", "block_contrast", *rates):
            if type(getattr(self, name)) is int:
                object.__setattr__(self, name, float(getattr(self, name)))
        hints = typing.get_type_hints(type(self))
        for field in fields(self):
            _check_type(field.name, getattr(self, field.name), hints[field.name])
        widths = ("bits", "act_bits", "beta", "edge_bits", "matmul_bits", "head_bits")
        for name in (*widths, "prefix_bits"):
            value, most = getattr(self, name), self._most(name)
            if isinstance(value, int | float) and not MIN_BITS <= value <= most:
                why = "" if most == MAX_BITS else " with profile speed"
                raise ConfigError(f"{name} must be in {MIN_BITS}..{most}{why}, got {value:g}")
        for name in (
            "images",
            "fit_images",
            "fit_views",
            "metric_images",
            "probe_images",
            "trace_images",
            "score_images",
            "configurations",
            "reconstruct_images",
            "iterations",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        for name in rates:
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise ConfigError(f"{name} must be a rate in [0, 1), got {value:g}")
        for name in ("exchanges", "patience", "seed"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("damping", "ridge"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name):g}")
        if not 1 < self.gamma < math.inf:
            raise ConfigError(f"gamma must be above 1, got {self.gamma:g}")
        if self.seed >= 2**63:
            raise ConfigError(f"seed must be below 2**63, got {self.seed}")
        if not 0 <= self.block_contrast <= 1:
            raise ConfigError(f"block_contrast must be in [0, 1], got {self.block_contrast:g}")
        if not 0 < self.mu <= 1:
            raise ConfigError(f"mu is a share of the blocks in (0, 1], got {self.mu:g}")
        for name in ("target_size", "target_bops"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be positive, got {value}")
        if self.target_bops is not None and self.matmul_bits == "follow":
            raise ConfigError(
                "with target_bops the attention products need a width of their own: "
                "set matmul_bits to target or a number"
            )
        for name in ("choices", "act_choices"):
            widths = getattr(self, name)
            if widths is None:
                continue
            most = self._most(name)
            wrong = [b for b in widths if not MIN_BITS <= b <= most]
            if wrong or not widths or len(set(widths)) != len(widths):
                why = "" if most == MAX_BITS else " with profile speed"
                raise ConfigError(
                    f"{name} must be different widths in {MIN_BITS}..{most}{why}, "
                    f"got {','.join(map(str, widths)) or 'none'}"
                )
        if self.input_ranges == "token" and self.profile == "speed":
            raise ConfigError(
                "integer kernels have static ranges: with profile speed, input_ranges must be "
                "static, got 'token'"
            )
        if self.prefix_bits != "target" and self.profile == "speed":
            raise ConfigError(
                "integer kernels have one width for all tokens: with profile speed, prefix_bits "
                f"must be target, got {self.prefix_bits}"
            )
        if self.joint and self.act_choices is not None:
            raise ConfigError("act_choices are for separate widths: set joint to false")
        self._check_task()

    def _check_task(self) -> None:
        """Raise if an option is not one of the task's."""
        signals = SIGNALS[self.task]
        for name in ("alpha_signal", "accept"):
            if getattr(self, name) not in signals:
                raise ConfigError(
                    f"{name} must be {' or '.join(signals)} for {self.task}, "
                    f"got {getattr(self, name)}"
                )
        for name, refused in REFUSED[self.task].items():
            if getattr(self, name) in refused:
                raise ConfigError(f"{name} cannot be {getattr(self, name)} for {self.task}")
        if self.task == "detection" and self.reconstruct is not None:
            raise ConfigError("detectors cannot be reconstructed: leave reconstruct out")
        if self.task == "detection" and self.fit_views > 1:
            raise ConfigError(f"fit_views must be 1 for detection, got {self.fit_views}")

    def _most(self, name: str = "bits") -> int:
        """The largest value of a width: layers for integer kernels have eight bits at most."""
        layers = name not in ("beta", "matmul_bits")
        return INTEGER_BITS if layers and self.profile == "speed" else MAX_BITS

    @property
    def target(self) -> LayerBits:
        """The uniform width within the budget."""
        weight = math.floor(self.bits + 1e-9)
        return LayerBits(weight, self._activation(weight))

    @property
    def widths(self) -> tuple[LayerBits, ...]:
        """The choices of the allocation, ascending, with their activation widths."""
        weights = self.choices
        if weights is None:
            own = self.preset == "best" and self.target.weight < WIDE[-1] - 1
            weights = WIDE if own else _paper_widths(self.target, self._most())
        if not self.joint:
            around = _around(self.target.activation, self._most())
            activations = sorted(self.act_choices or around)
            return tuple(LayerBits(w, a) for w in sorted(weights) for a in activations)
        return tuple(LayerBits(b, self._activation(b)) for b in sorted(weights))

    @property
    def mean_activation_bits(self) -> float | None:
        """The budget of activation widths; there is none where they follow the weight widths."""
        if self.joint:
            return None
        return self.bits if self.act_bits is None else float(self.act_bits)

    def _activation(self, weight: int) -> int:
        if self.act_bits is None:
            return weight
        difference = self.act_bits - math.floor(self.bits + 1e-9)
        return min(self._most(), max(MIN_BITS, weight + difference))

    def to_json(self) -> dict[str, Any]:
        """The effective values, ready for a report or a file header."""
        effective: dict[str, Any] = {"choices": sorted({b.weight for b in self.widths})}
        if not self.joint:
            effective["act_choices"] = sorted({b.activation for b in self.widths})
        return {**asdict(self), **effective}


def _paper_widths(target: LayerBits, most: int) -> tuple[int, ...]:
    """The paper's sets: 1..5 for 3/3 bits, 2..5 for 4/4, else two on either side."""
    low, high = target.weight - 2, target.weight + 2
    if target.weight == target.activation:
        low, high = {3: (1, 5), 4: (2, 5)}.get(target.weight, (low, high))
    return tuple(range(max(MIN_BITS, low), min(most, high) + 1))


def _around(target: int, most: int) -> tuple[int, ...]:
    """The width and its neighbours: each width more is as many fits again."""
    return tuple(b for b in (target - 1, target, target + 1) if MIN_BITS <= b <= most)


# one width and one static range for all tokens: as published, and all that integer kernels have
EVEN: dict[str, Any] = {"input_ranges": "static", "prefix_bits": "target"}
PAPER: dict[str, Any] = {
    "preset": "paper",
    **EVEN,
    "rotation": "none",
    "fit_images": 32,
    "fit_views": 1,
    "fit_tokens": "uniform",
    "fold": "full",
    "error": "plain",
    "compensation": "none",
    "onebit": "adalog",
    "sites": "published",
    "edge_bits": "target",
    "rest_bits": 32,
    "metric": "fisher",
    "metric_images": 256,
    "alpha_signal": "accuracy",
    "alpha_trace": "quantized",
    "start": "allocated",
    "exchanges": 200,
    "exchange_error": "cumulative",
    "ratios": "paper",
    "accept": "accuracy",
    "score_images": 1024,
    "patience": 0,
}
PRESETS: dict[str, dict[str, Any]] = {"best": {"preset": "best"}, "paper": PAPER}
# of made pictures, whose statistics are only like those of real ones
MADE: dict[str, dict[str, Any]] = {"best": {"damping": 0.3, "block_contrast": 0.5}, "paper": {}}
# what detectors have instead: an image of theirs is as much work as dozens of a classifier's
DETECTION: dict[str, Any] = {
    "images": 256,
    "fit_images": 32,
    "fit_views": 1,
    "metric_images": 64,
    "probe_images": 64,
    "trace_images": 16,
    "score_images": 64,
    "labels": "data",
}
TASKS: dict[str, dict[str, dict[str, Any]]] = {
    "classification": {"best": {}, "paper": {}},
    "detection": {
        "best": {**DETECTION, "alpha_signal": "loss", "accept": "loss"},
        "paper": {**DETECTION, "alpha_signal": "ap", "accept": "ap"},
    },
}


def make_config(options: Mapping[str, Any]) -> RunConfig:
    """A configuration of a preset with some options set; None means not set.

    Args:
        options: Fields of ``RunConfig`` by name; ``preset`` says where all others come from.

    Raises:
        ConfigError: If a name is unknown or a value cannot be used.
    """
    given = {key: value for key, value in options.items() if value is not None}
    preset = given.get("preset", "best")
    if not isinstance(preset, str) or preset not in PRESETS:
        raise ConfigError(f"unknown preset {preset!r}; known: {', '.join(PRESETS)}")
    task = given.get("task", "classification")
    if not isinstance(task, str) or task not in TASKS:
        raise ConfigError(f"unknown task {task!r}; known: {', '.join(TASKS)}")
    known = {field.name for field in fields(RunConfig)}
    unknown = sorted(set(given) - known)
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]!r}; known: {', '.join(sorted(known))}")
    for key in ("choices", "act_choices"):
        if isinstance(given.get(key), list):
            given[key] = tuple(given[key])
    others = given.get("method", "adalog") != "adalog" or given.get("profile") == "speed"
    even = EVEN if others or task == "detection" else {}
    return RunConfig(**{**PRESETS[preset], **TASKS[task][preset], **even, **given})


def read_toml(path: Path) -> dict[str, Any]:
    """The options of a TOML file, not yet checked."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"no configuration file {str(path)!r}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(path)!r} is not valid TOML: {error}") from error


def _check_type(name: str, value: Any, hint: Any) -> None:
    if not _fits(value, hint):
        raise ConfigError(f"{name} must be {_describe(hint)}, got {value!r}")


def _fits(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin is Literal:
        return value in get_args(hint)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(v, get_args(hint)[0]) for v in value)
    if origin is not None:
        return any(_fits(value, part) for part in get_args(hint))
    if hint in (int, float):
        return isinstance(value, hint) and not isinstance(value, bool)
    return isinstance(value, hint)


def _describe(hint: Any) -> str:
    origin = get_origin(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if origin is tuple:
        return f"a list of {_describe(get_args(hint)[0])}"
    if origin is not None:
        return " or ".join(_describe(part) for part in get_args(hint) if part is not type(None))
    names = {int: "a whole number", float: "a number", str: "a name", bool: "true or false"}
    return names.get(hint, str(hint))
