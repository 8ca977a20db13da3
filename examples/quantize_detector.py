"""Quantize the example detector to a mean of four bits, score it and draw what it finds.

Needs ``pip install 'lampq[detection]'``. The settings are small so that the script takes a minute;
leave them out for the real defaults.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import lampq
from lampq.detection.ap import average_precision, detect
from lampq.detection.pictures import save_side_by_side
from lampq.detection.scenes import bundled_scenes
from lampq.detection.weights import load_detector

WEIGHTS = Path(__file__).parent / "detector" / "scene_swin.safetensors"


def main() -> None:
    """Search a plan, compare box and mask AP with the float detector, and write a picture."""
    model = load_detector("scene_swin", WEIGHTS)
    test = bundled_scenes("eval", 40)
    result = lampq.quantize(
        model,
        bundled_scenes("calib", 16),
        bits=4,
        method="repq",
        metric="recon",
        fit_images=8,
        score_images=8,
        exchanges=2,
    )
    found = {"fp32": detect(model, test), "4 bits": detect(result.model, test)}
    for name, detections in found.items():
        scores = average_precision(test, detections)
        print(f"{name:<8} box AP {scores.box.ap:.3f}  mask AP {scores.mask.ap:.3f}")
    print(f"mean weight bits {result.plan.mean_weight_bits:.3f}")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "detections.png"
        save_side_by_side(path, test, found)
        print(f"a picture of {path.stat().st_size // 1024} KB; give another path to keep it")


if __name__ == "__main__":
    main()
