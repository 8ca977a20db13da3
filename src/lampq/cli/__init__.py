"""The application lampq, and what its commands share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

import typer

from lampq.errors import LampqError
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


def main() -> None:
    """Entry point of the lampq command."""
    app()


# the commands register themselves with the app above, in the order of its help
from lampq.cli import quantize, compare, sweep, reproduce, synthesize, inspect, deploy  # noqa: E402, I001


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
    "sweep",
    "synthesize",
]
