"""A finished run folder as the report page needs it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lampq.artifact.checkpoint import read_header, write_atomically
from lampq.errors import ConfigError, FormatError
from lampq.report import PICTURES, REPORT_VERSION
from lampq.report.content import RunFiles
from lampq.report.histograms import HISTOGRAMS_VERSION
from lampq.report.page import render

SPEEDS = ("fp32", "uniform", "mixed")


def read_run(folder: Path, others: Sequence[Path] = ()) -> RunFiles:
    """The files of a finished run; ``others`` are finished runs of the same model."""
    report = read_report(folder)
    found = {}
    for other in others:
        found[other.name or str(other)] = content = read_report(other)
        if content["model"]["name"] != report["model"]["name"]:
            raise ConfigError(
                f"{str(other)!r} is a run of {content['model']['name']}, "
                f"{str(folder)!r} one of {report['model']['name']}: only runs of one model compare"
            )
    return files_of(folder, report, found)


def files_of(
    folder: Path,
    report: Mapping[str, Any],
    others: Mapping[str, Mapping[str, Any]] | None = None,
) -> RunFiles:
    """The files beside a report.json that is already known."""
    histograms = _read(folder / "histograms.json")
    if histograms is not None and histograms.get("histograms_version") != HISTOGRAMS_VERSION:
        raise FormatError(
            f"{str(folder / 'histograms.json')!r} has version "
            f"{histograms.get('histograms_version')}, this lampq reads {HISTOGRAMS_VERSION}"
        )
    return RunFiles(
        report=report,
        layers=tuple(read_header(folder / "model.safetensors").layers()),
        sensitivity=None
        if report["initial_plan"] is None
        else _read(folder / "sensitivity.json", needed=True),
        histograms=histograms,
        speed=_speed(folder / "speed.json"),
        others=others or {},
        pictures=_pictures(folder) if PICTURES in report["files"] else None,
    )


def _pictures(folder: Path) -> bytes | None:
    """The picture of answers, unless somebody has taken it away."""
    path = folder / PICTURES
    return path.read_bytes() if path.is_file() else None


def read_report(folder: Path) -> dict[str, Any]:
    """The report.json of a finished run, with its version checked."""
    if not folder.is_dir():
        raise ConfigError(f"no run folder {str(folder)!r}")
    path = folder / "report.json"
    if not path.is_file():
        raise ConfigError(f"{str(folder)!r} holds no finished run: it has no report.json")
    report = _read(path, needed=True)
    assert report is not None, "a needed file is there"
    version = report.get("report_version")
    if not isinstance(version, int) or version > REPORT_VERSION:
        raise FormatError(
            f"{str(path)!r} has report version {version}, this lampq reads up to {REPORT_VERSION}"
        )
    return report


def _read(path: Path, *, needed: bool = False) -> dict[str, Any] | None:
    if not needed and not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FormatError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise FormatError(f"{str(path)!r} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise FormatError(f"{str(path)!r} holds a {type(content).__name__}, not an object")
    return content


def _speed(path: Path) -> dict[str, Any] | None:
    """Milliseconds for one image, as measured by whoever wrote the file."""
    content = _read(path)
    if content is None:
        return None
    for name in SPEEDS:
        value = content.get(name)
        optional = name != "mixed" and value is None
        if not optional and not (isinstance(value, int | float) and 0 < value < float("inf")):
            raise FormatError(
                f"{str(path)!r} has {value!r} for {name!r}: expected milliseconds for one image"
            )
    if not isinstance(content.get("note", ""), str):
        raise FormatError(f"{str(path)!r} has a note that is no text")
    return content


def write_page(folder: Path, run: RunFiles) -> Path:
    """Write report.html into the folder, atomically."""
    path = folder / "report.html"
    write_atomically(path, render(run).encode())
    return path


def remake_page(folder: Path, others: Sequence[Path] = ()) -> Path:
    """Make the page of a finished run again, from its files alone."""
    try:
        return write_page(folder, read_run(folder, others))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise FormatError(
            f"the files in {str(folder)!r} do not belong together or are damaged ({error!r})"
        ) from error
