"""How a detector's architecture is built again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lampq.detection.options import DetectorOptions
from lampq.models import ModelSource


@dataclass(frozen=True, slots=True)
class DetectorSource(ModelSource):
    """The options of a detector."""

    @classmethod
    def of(cls, options: DetectorOptions) -> DetectorSource:
        """The source of a detector of these options."""
        return cls("detector", options.name, options.to_json())

    def build(self) -> nn.Module:
        """The architecture with arbitrary weights, in evaluation mode."""
        # torchvision's detectors take a while to import, and classifiers do without
        from lampq.detection.models import Detector

        model: nn.Module = Detector(DetectorOptions.from_json(self.options)).eval()
        return model


def source_from(fields: Mapping[str, Any]) -> ModelSource:
    """The source of a file header."""
    kind = DetectorSource if fields["kind"] == "detector" else ModelSource
    return kind(fields["kind"], fields["name"], dict(fields["options"]))
