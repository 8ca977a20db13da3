"""Time of a whole run in float passes over the same images in the same process, and peak memory.

On one thread it is CPU time, so that a busy machine does not show; on more it is wall time.

python benchmarks/overhead.py --preset best --bits 3 [--threads 1] [--out overhead.json]
"""

from __future__ import annotations

import argparse
import json
import resource
from pathlib import Path

import real
import torch
from rows import clock

from lampq.config import make_config
from lampq.data import Samples
from lampq.evaluate import predict
from lampq.pipeline import Run, quantize
from lampq.progress import Progress


def seconds_of_a_pass(model: torch.nn.Module, samples: Samples) -> float:
    """Seconds of one float pass over the samples."""
    now = clock()
    start = now()
    predict(model, samples)
    return now() - start


def main() -> None:
    """Measure one run and, beside it, the uniform run of the same method."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="best")
    parser.add_argument("--bits", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    loaded, samples = real.model(), real.calibration()
    config = make_config({"preset": options.preset, "bits": options.bits, "seed": options.seed})
    before = seconds_of_a_pass(loaded.model, samples)
    now = clock()
    progress = Progress(now)
    start = now()
    quantize(loaded.model, samples, config=config, run=Run(progress=progress))
    whole = now() - start
    uniform = make_config(
        {
            "preset": options.preset,
            "bits": options.bits,
            "seed": options.seed,
            "choices": (int(options.bits),),
            "exchanges": 0,
            "metric": "recon",
        }
    )
    start = now()
    quantize(loaded.model, samples, config=uniform)
    plain = now() - start
    one_pass = (before + seconds_of_a_pass(loaded.model, samples)) / 2
    result = {
        "preset": options.preset,
        "bits": options.bits,
        "images": len(samples),
        "threads": torch.get_num_threads(),
        "seconds_per_pass": one_pass,
        "passes": whole / one_pass,
        "passes_by_stage": {k: v / one_pass for k, v in progress.seconds.items()},
        "passes_of_uniform": plain / one_pass,
        "ratio_to_uniform": whole / plain,
        "peak_memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
