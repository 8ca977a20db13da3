"""Quantize the bundled Vision Transformer to a mean of three bits and load it back.

The settings are small so that the script takes seconds; leave them out for the real defaults.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

import lampq
from lampq.evaluate import predict, top1
from lampq.models import bundled_samples, load_model


def main() -> None:
    """Search a plan, score it, save the model and check that it loads unchanged."""
    loaded = load_model("fashion_vit")
    test = bundled_samples("eval").subset(500, seed=0)
    labels = test.require_labels("an accuracy")
    result = lampq.quantize(
        loaded.model,
        bundled_samples("calib"),
        bits=3,
        method="repq",
        images=128,
        metric_images=32,
        exchanges=8,
    )
    print(f"float    {top1(predict(loaded.model, test), labels):6.2f} %")
    print(f"uniform  {top1(predict(result.uniform_model(), test), labels):6.2f} %")
    print(f"mixed    {top1(predict(result.model, test), labels):6.2f} %")
    print(f"mean weight bits {result.plan.mean_weight_bits:.3f}")
    for name, bits in result.plan.items():
        print(f"  {name:<20} {bits.weight}")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        result.save(path)
        again = lampq.load(path)
        x = test.inputs(slice(0, 4))
        same = torch.equal(again(x), result.model(x))
        print(f"{path.stat().st_size} bytes, same answers after loading: {same}")


if __name__ == "__main__":
    main()
