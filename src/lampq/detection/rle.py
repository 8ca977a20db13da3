"""Masks as run lengths, which take little memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lampq.errors import MissingDependencyError


@dataclass(frozen=True, slots=True)
class Mask:
    """One binary mask as COCO's run lengths: zeros, ones, zeros, ... down the columns.

    Attributes:
        height: Of the picture.
        width: Of the picture.
        counts: Lengths of the runs; the first is of zeros.
    """

    height: int
    width: int
    counts: tuple[int, ...]

    @classmethod
    def of(cls, pixels: NDArray[Any]) -> Mask:
        """The mask of an array (height, width); what is not zero is inside."""
        height, width = pixels.shape
        flat = (pixels != 0).T.reshape(-1)
        edges = np.flatnonzero(flat[1:] != flat[:-1]) + 1
        ends = np.concatenate(([0], edges, [flat.size]))
        counts = np.diff(ends).tolist()
        return cls(height, width, (0, *counts) if flat.size and flat[0] else tuple(counts))

    def pixels(self) -> NDArray[np.uint8]:
        """Zeros and ones (height, width)."""
        runs = np.arange(len(self.counts), dtype=np.uint8) % 2
        flat = np.repeat(runs, self.counts)
        return np.ascontiguousarray(flat.reshape(self.width, self.height).T)

    @property
    def area(self) -> int:
        """Number of pixels inside."""
        return sum(self.counts[1::2])

    def box(self) -> tuple[float, float, float, float]:
        """The smallest box around it, x and y of two corners; zeros if nothing is inside."""
        pixels = self.pixels()
        rows, columns = np.flatnonzero(pixels.any(1)), np.flatnonzero(pixels.any(0))
        if not len(rows):
            return (0.0, 0.0, 0.0, 0.0)
        corners = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
        left, top, right, bottom = (float(value) for value in corners)
        return (left, top, right, bottom)

    def to_json(self) -> dict[str, Any]:
        """As COCO's files write it: ``size`` and uncompressed ``counts``."""
        return {"size": [self.height, self.width], "counts": list(self.counts)}


def coco_package() -> Any:
    """The package that knows COCO's masks and scores, or an error with what to install."""
    try:
        import faster_coco_eval
    except ImportError as error:
        raise MissingDependencyError(
            "COCO's polygons and scores need the package faster-coco-eval: "
            "pip install 'lampq[detection]'"
        ) from error
    return faster_coco_eval


def from_segmentation(segmentation: Any, height: int, width: int) -> Mask:
    """The mask of COCO's polygons or run lengths, packed or not; or ValueError, TypeError."""
    if isinstance(segmentation, dict):
        if list(segmentation.get("size", ())) != [height, width]:
            raise ValueError(f"its size is {segmentation.get('size')}, not {[height, width]}")
        counts = segmentation.get("counts")
        if isinstance(counts, list):
            mask = Mask(height, width, tuple(int(count) for count in counts))
            if sum(mask.counts) != height * width or min(mask.counts, default=0) < 0:
                raise ValueError(f"its runs are {sum(mask.counts)} pixels, not {height * width}")
            return mask
        if not isinstance(counts, str | bytes):
            raise TypeError("it has no counts")
        api = coco_package().mask
        return Mask.of(api.decode({"size": [height, width], "counts": counts}))
    polygons = segmentation if isinstance(segmentation, list) else []
    if not polygons or not all(isinstance(p, list) and len(p) >= 6 for p in polygons):
        raise ValueError("it is neither a list of polygons of three points or more nor run lengths")
    if not all(len(p) % 2 == 0 and all(isinstance(v, int | float) for v in p) for p in polygons):
        raise ValueError("a polygon is not a list of x and y")
    api = coco_package().mask
    return Mask.of(api.decode(api.merge(api.frPyObjects(polygons, height, width))))
