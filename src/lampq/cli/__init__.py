"""The application lampq, and what its commands share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Literal, NoReturn

import typer

from lampq.data import Preprocessing, Samples, list_folder, read_folder
from lampq.errors import ConfigError, LampqError
from lampq.models import LoadedModel, bundled_samples, load_model
from lampq.progress import Progress
from lampq.terminal import TerminalProgress
from lampq.version import __version__

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Layer-wise mixed-precision quantization of Vision Transformers.",
)


def fail(message: str) -> NoReturn:
    """One sentence on standard error, and exit code 2."""
    print(f"lampq: {message}", file=sys.stderr)
    raise typer.Exit(2)


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """One sentence and exit code 2 for a LampqError; 130 for Ctrl-C."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except LampqError as error:
            fail(str(error))
        except KeyboardInterrupt:
            print("lampq: interrupted", file=sys.stderr)
            raise typer.Exit(130) from None

    return run


def load_float(
    model: str, weights: Path | None, calib: Path | None, evaluation: Path | None
) -> LoadedModel:
    """The float model, once it is known that its pictures are there."""
    loaded = load_alone(model, weights, calib, evaluation)
    if loaded.source.kind != "bundled" and calib is None:
        raise ConfigError(
            f"model {model!r} needs calibration pictures: give --calib DIR, or quantize it with "
            "--zero-shot"
        )
    return loaded


def load_alone(model: str, weights: Path | None, *folders: Path | None) -> LoadedModel:
    """The float model, once it is known that these folders hold pictures."""
    for folder in folders:
        if folder is not None:
            list_folder(folder)
    return load_model(model, weights)


def pictures(
    split: Literal["calib", "eval"], folder: Path | None, how: Preprocessing, **options: Any
) -> Samples:
    """The pictures of a folder, or bundled ones if there is none; ``options`` of read_folder."""
    return bundled_samples(split) if folder is None else read_folder(folder, how, **options)


def calibration_samples(
    calib: Path | None, how: Preprocessing, limit: int, seed: int, progress: Progress
) -> Samples:
    """The calibration pictures of a run."""
    return pictures("calib", calib, how, limit=limit, seed=seed, progress=progress)


def evaluation_samples(
    loaded: LoadedModel,
    calib: Path | None,
    evaluation: Path | None,
    how: Preprocessing,
    progress: Progress,
) -> Samples | None:
    """The evaluation pictures of a run; bundled ones only where the calibration ones are too."""
    if evaluation is None and (loaded.source.kind != "bundled" or calib is not None):
        return None
    return pictures("eval", evaluation, how, progress=progress)


def main() -> None:
    """Entry point of the lampq command."""
    app()


# the commands register themselves with the app above, in the order of its help
from lampq.cli import quantize, compare, reproduce, synthesize, inspect, deploy  # noqa: E402, I001


@app.command("version")
def version_command() -> None:
    """Print the version."""
    print(__version__)


__all__ = [
    "TerminalProgress",
    "app",
    "compare",
    "deploy",
    "inspect",
    "main",
    "quantize",
    "reproduce",
    "synthesize",
]
