"""Find a plan with a cheap method, change one layer by hand, and use it with another method."""

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path

import lampq
from lampq.evaluate import predict, top1
from lampq.models import bundled_samples, load_model
from lampq.report import plan_json


def main() -> None:
    """Search with minmax, edit plan.json, quantize by it with repq."""
    warnings.simplefilter("ignore", UserWarning)  # the results carry them as notices
    model = load_model("fashion_vit").model
    samples = bundled_samples("calib").subset(128, seed=0)
    test = bundled_samples("eval").subset(500, seed=0)
    labels = test.require_labels("an accuracy")

    found = lampq.quantize(model, samples, bits=4, method="minmax", metric="recon", exchanges=0)
    print(f"found with minmax:  {found.plan.mean_weight_bits:.3f} bits")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        path.write_text(json.dumps(plan_json(found.plan), indent=2), encoding="utf-8")

        edited = json.loads(path.read_text(encoding="utf-8"))
        edited["layers"]["blocks.0.attn.qkv"] = {"weight": 8, "activation": 8}
        path.write_text(json.dumps(edited), encoding="utf-8")

        layers = json.loads(path.read_text(encoding="utf-8"))["layers"]
    plan = {name: lampq.LayerBits(**bits) for name, bits in layers.items()}

    reused = lampq.quantize(model, samples, bits=4, method="repq", plan=plan)
    print(f"reused with repq:   {reused.plan.mean_weight_bits:.3f} bits")
    for notice in reused.notices:
        print(f"note: {notice}")
    for name, result in (("found", found), ("reused", reused)):
        print(f"{name:<7} {top1(predict(result.model, test), labels):6.2f} %")


if __name__ == "__main__":
    main()
