"""Tensors of finished work kept on disk, so that an interrupted reconstruction goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor

from lampq.artifact.checkpoint import write_atomically


class StateFolder:
    """A store of one safetensors file per key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, key: str) -> Path:
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.state"

    def save(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Store tensors under a key."""
        content = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
        write_atomically(self._path(key), to_bytes(content))

    def load(self, key: str) -> Mapping[str, Tensor] | None:
        """The stored tensors, if there are readable ones."""
        path = self._path(key)
        if not path.is_file():
            return None
        try:
            return load_file(path)
        except (SafetensorError, OSError):
            return None
