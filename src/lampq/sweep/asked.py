"""A sweep as it is asked for: a TOML file, and the trials that follow from it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Any

from lampq.config import RunConfig, make_config, read_toml
from lampq.data import Preprocessing
from lampq.errors import ConfigError, LampqError
from lampq.inputs import load_float
from lampq.models import DEFAULT_MODEL, LoadedModel
from lampq.prepare import prepare
from lampq.runfolder import read_plan
from lampq.sharing import key_of, sharing_key
from lampq.typed import preprocessing_with
from lampq.types import LayerBits

PATHS = ("weights", "calib", "eval", "plan")
TYPED = ("mean", "std", "crop_pct")
INPUTS = ("model", *PATHS, *TYPED)
OPTIONS = tuple(field.name for field in fields(RunConfig))
# those that can be left unset, which TOML has no word for: "none" is ours
UNSET = (*PATHS, *TYPED, *(field.name for field in fields(RunConfig) if field.default is None))
LONGEST_NAME = 80


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of a sweep.

    Attributes:
        inputs: What ``lampq quantize`` is given beside options: the model, absolute paths,
            preprocessing; None where it is not set.
        config: The options in effect.
        varied: What the file gives for the options that it varies.
    """

    inputs: Mapping[str, Any]
    config: RunConfig
    varied: Mapping[str, Any]

    @property
    def key(self) -> str:
        """What tells it from all others: the same for the same inputs and options."""
        return key_of({"inputs": dict(self.inputs), "config": asdict(self.config)})

    @property
    def name(self) -> str:
        """The name of its folder."""
        words = ",".join(f"{name}={_short(value)}" for name, value in self.varied.items())
        readable = re.sub(r"[^\w.,=+-]", "_", words)[:LONGEST_NAME].strip(",")
        return f"{readable or 'trial'}-{self.key[:6]}"

    @property
    def described(self) -> str:
        """What it varies, for people."""
        return " ".join(f"{name}={_short(value)}" for name, value in self.varied.items())

    @property
    def share(self) -> str:
        """The same for trials that share fits."""
        names = ("model", "weights", "calib", *TYPED)
        return key_of({**{n: self.inputs[n] for n in names}, "fits": sharing_key(self.config)})

    @property
    def plan(self) -> dict[str, LayerBits] | None:
        """The given plan, if there is one."""
        path = self.inputs["plan"]
        return None if path is None else read_plan(Path(path))

    def path(self, name: str) -> Path | None:
        """One of the paths among the inputs."""
        return None if self.inputs[name] is None else Path(self.inputs[name])

    def load(self) -> LoadedModel:
        """The float model, once it is known that its pictures are there."""
        paths = (self.path(name) for name in ("weights", "calib", "eval"))
        return load_float(self.inputs["model"], *paths)

    def preprocessing(self, loaded: LoadedModel) -> Preprocessing:
        """How its pictures are prepared."""
        return preprocessing_with(loaded.preprocessing, *(self.inputs[name] for name in TYPED))


def _short(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "+".join(map(_short, value))
    if isinstance(value, float):
        return f"{value:g}"
    return Path(value).stem if isinstance(value, str) and "/" in value else str(value)


def read_sweep(path: Path) -> tuple[Trial, ...]:
    """The trials that a TOML file asks for, in its order; every value is checked.

    Raises:
        ConfigError: If a key is unknown, a value cannot be used or a trial is there twice.
    """
    content = read_toml(path)
    grid = _grid(content.pop("grid", {}), "grid")
    entries = content.pop("trials", [{}])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError("trials must be tables: write [[trials]] above the options of each")
    found = [
        _trial({**content, **options}, varied)
        for entry in entries
        for options, varied in _combinations(grid, entry)
    ]
    if not found:
        raise ConfigError(f"{str(path)!r} asks for no trial")
    keys = [trial.key for trial in found]
    for trial in found:
        if keys.count(trial.key) > 1:
            raise ConfigError(f"the same trial is asked for twice: {trial.described or 'no grid'}")
    return tuple(found)


def _grid(axes: Any, where: str) -> dict[str, list[Any]]:
    if not isinstance(axes, dict):
        raise ConfigError(f"{where} must be a table of lists, got {axes!r}")
    for name, values in axes.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{where}.{name} must be a list of values, got {values!r}")
    return axes


def _combinations(
    grid: Mapping[str, list[Any]], entry: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Options of every trial of one entry, and those of them that are varied."""
    fixed = {name: value for name, value in entry.items() if name != "grid"}
    axes = {**grid, **_grid(entry.get("grid", {}), "trials.grid")}
    for name in fixed:
        if name in axes:
            raise ConfigError(f"a trial gives {name} one value, and its grid gives it several")
    for values in product(*axes.values()):
        varied = {**fixed, **dict(zip(axes, values, strict=True))}
        yield varied, varied


def _trial(options: Mapping[str, Any], varied: Mapping[str, Any]) -> Trial:
    for name in options:
        if name not in (*INPUTS, *OPTIONS):
            near = get_close_matches(name, (*INPUTS, *OPTIONS), n=3) or (*INPUTS, *OPTIONS)
            raise ConfigError(f"unknown option {name!r}; known: {', '.join(near)}")
    given = {
        name: None if name in UNSET and value == "none" else value
        for name, value in options.items()
    }
    inputs = {name: _input(name, given.get(name)) for name in INPUTS}
    try:
        config = make_config({name: given[name] for name in OPTIONS if name in given})
    except LampqError as error:
        words = Trial(inputs, RunConfig(), varied).described
        raise ConfigError(f"{error}" + (f" (in {words})" if words else "")) from error
    if config.task != "classification":
        raise ConfigError(f"a sweep is one of classifiers, not of {config.task}")
    return Trial(inputs, config, dict(varied))


def _input(name: str, value: Any) -> str | float | None:
    if name == "model":
        value = DEFAULT_MODEL if value is None else value
    if value is None:
        return None
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    if name == "crop_pct":
        if not numeric:
            raise ConfigError(f"crop_pct must be a number, got {value!r}")
        return float(value)
    if name in TYPED:
        numbers = value if isinstance(value, list) else [value]
        if not all(isinstance(one, int | float) and not isinstance(one, bool) for one in numbers):
            raise ConfigError(f"{name} must be one number or a list of them, got {value!r}")
        return ",".join(map(str, numbers))
    if not isinstance(value, str) or not value:
        raise ConfigError(
            f"{name} must be a {'name' if name == 'model' else 'path'}, got {value!r}"
        )
    return str(Path(value).absolute()) if name in PATHS else value


def check(trials: Sequence[Trial]) -> None:
    """Raise what any trial would raise before it looks at an image."""
    groups: dict[tuple[Any, ...], list[Trial]] = {}
    for trial in trials:
        known = tuple(trial.inputs[name] for name in ("model", "weights", "calib", "eval"))
        groups.setdefault(known, []).append(trial)
    for some in groups.values():
        loaded = some[0].load()
        for trial in some:
            try:
                trial.preprocessing(loaded)
                prepare(loaded.model, trial.config, plan=trial.plan)
            except LampqError as error:
                words = trial.described
                raise type(error)(f"{error}" + (f" (in {words})" if words else "")) from error
