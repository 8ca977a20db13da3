"""An ONNX file of lampq: what is inside, and whether it is still what was written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lampq.artifact.onnx.builder import require_onnx
from lampq.errors import FormatError

KEY = "lampq"
FORMAT_VERSION = 1


def _digest(graph: Any) -> str:
    return hashlib.sha256(graph.SerializeToString(deterministic=True)).hexdigest()


def onnx_bytes(model: Any, about: Mapping[str, Any]) -> bytes:
    """The whole file of a model; ``about`` goes into its metadata, with a digest of its graph."""
    content = {"format_version": FORMAT_VERSION, **about, "digest": _digest(model.graph)}
    del model.metadata_props[:]
    require_onnx().helper.set_model_props(model, {KEY: json.dumps(content)})
    written: bytes = model.SerializeToString(deterministic=True)
    return written


def read_onnx(path: Path) -> tuple[dict[str, Any], bytes]:
    """What the metadata of a file say, and the file itself, checked against its digest."""
    onnx = require_onnx()
    if not path.is_file():
        raise FormatError(f"no ONNX file {str(path)!r}")
    content = path.read_bytes()
    try:
        model = onnx.load_model_from_string(content)
        noted = {entry.key: entry.value for entry in model.metadata_props}
    except Exception as error:
        raise FormatError(f"{str(path)!r} is damaged or no ONNX file") from error
    if KEY not in noted:
        raise FormatError(f"{str(path)!r} is damaged, or an ONNX file that lampq did not write")
    try:
        about: dict[str, Any] = json.loads(noted[KEY])
        version, expected = about["format_version"], about["digest"]
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"the metadata of {str(path)!r} cannot be read: {error}") from error
    if version != FORMAT_VERSION:
        raise FormatError(
            f"{str(path)!r} has format version {version!r}, this lampq reads {FORMAT_VERSION}"
        )
    if expected != _digest(model.graph):
        raise FormatError(f"{str(path)!r} was changed after lampq wrote it, or is damaged")
    return about, content
