"""What trials share: fits, statistics, measurements, scores of the float model.

Three keys, from the widest to the narrowest: the inputs (model and pictures), the float model on
the calibration images, and all that a fit depends on. Everything shared is on disk, so that other
processes have it too; the fits of the last key are in memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lampq.artifact.fits import FitFolder
from lampq.artifact.states import StateFolder
from lampq.config import RunConfig
from lampq.methods import METHODS, FitCache
from lampq.methods.base import SumMethod
from lampq.pipeline import behind_quantized
from lampq.prepare import build, options_of, site_widths
from lampq.progress import Journal, Progress
from lampq.reconstruct import NoStore, StateStore
from lampq.scoring import Run

Options = dict[str, Any]


def key_of(options: Mapping[str, Any]) -> str:
    """A short name for some options, the same if and only if they are the same."""
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:24]


def _named(config: RunConfig, *names: str) -> Options:
    return {name: getattr(config, name) for name in names}


def shared_options(config: RunConfig) -> Options:
    """All that fits depend on: trials that agree on it share fits, statistics and measurements."""
    factory = METHODS.get(config.method)
    found = {
        **_named(config, "method", "seed", "images", "profile", "rotation"),
        **_named(config, "fit_images", "fit_views", "fit_tokens", "fit_inputs"),
        "options": options_of(factory, config),
    }
    if behind_quantized(factory, config):
        found["behind"] = [str(config.target), str(site_widths(config))]
    return found


def statistics_options(config: RunConfig) -> Options:
    """All that statistics depend on: methods that want the same of the float model share them."""
    method = build(METHODS.get(config.method), config)
    if behind_quantized(method, config):
        return shared_options(config)
    return {
        **_named(config, "seed", "images", "profile", "rotation"),
        **_named(config, "fit_images", "fit_views", "fit_tokens"),
        "gradients": bool(getattr(method, "wants_gradients", False)),
        "blocks": int(getattr(method, "block_images", 0)),
        "sums": isinstance(method, SumMethod),
    }


def model_options(config: RunConfig) -> Options:
    """All that a measurement of the float model alone depends on, but for what its key names."""
    return _named(config, "seed", "images", "rotation")


def sharing_key(config: RunConfig) -> str:
    """A name for what fits depend on."""
    return key_of(shared_options(config))


class Shared:
    """What trials leave for each other in a folder.

    Every process writes journals of its own, by the name ``owner``, and reads those of all others
    when a trial starts. With ``statistics`` what sites see is on disk too: much larger than the
    fits, and worth it where several processes need it.
    """

    def __init__(self, folder: Path, owner: str = "journal", *, statistics: bool = False) -> None:
        self.folder, self.owner, self._with_statistics = folder, owner, statistics
        self._key = ""
        self._fits: FitCache | None = None

    def run(
        self, config: RunConfig, progress: Progress, inputs: Mapping[str, Any] | None = None
    ) -> Run:
        """What goes on beside a trial, with what the trials before it left.

        ``inputs``: where model and calibration images came from, if trials differ in that.
        """
        root = self.folder / key_of(inputs or {})
        folder = root / sharing_key(config)
        if str(folder) != self._key:
            self._key, self._fits = str(folder), None
        of_model = self._journal(root / key_of(model_options(config)))
        statistics: StateStore = NoStore()
        if self._with_statistics:
            statistics = StateFolder(root / key_of(statistics_options(config)) / "statistics")
        return Run(
            progress,
            self._journal(folder, of_model),
            FitFolder(folder / "fits"),
            fits=self._kept,
            statistics=statistics,
        )

    def evaluations(self, inputs: Mapping[str, Any]) -> Journal:
        """Scores of the float model of these inputs."""
        return self._journal(self.folder / key_of(inputs))

    def _journal(self, folder: Path, of_model: Journal | None = None) -> Journal:
        folder.mkdir(parents=True, exist_ok=True)
        own = folder / f"{self.owner}.jsonl"
        others = [path for path in sorted(folder.glob("*.jsonl")) if path != own]
        return Journal(own, others=others, of_model=of_model)

    def _kept(self, make: Callable[[], FitCache]) -> FitCache:
        if self._fits is None:
            self._fits = make()
        return self._fits
