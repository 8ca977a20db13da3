"""What happened, as JSON for scripts and Markdown for people."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import nn

from lampq.finish import Reconstruction
from lampq.pipeline import Result, packed
from lampq.quant.modules import QuantLayer
from lampq.quant.prefix import PrefixQuantizer
from lampq.report.scores import markdown
from lampq.types import BitPlan, CostTable, Step

STAGES = ("collect", "fit", "metric", "allocate", "refine", "reconstruct", "evaluate")
REPORT_VERSION = 1
PICTURES = "detections.jpg"


def plan_json(plan: BitPlan) -> dict[str, Any]:
    """The plan as it is written to plan.json and read back."""
    return {
        "mean_weight_bits": plan.mean_weight_bits,
        "mean_activation_bits": plan.mean_activation_bits,
        "layers": {
            name: {"weight": bits.weight, "activation": bits.activation}
            for name, bits in plan.items()
        },
    }


def sensitivity_json(table: CostTable, details: Mapping[str, Any]) -> dict[str, Any]:
    """The cost table as it is written to sensitivity.json."""
    return {
        "choices": [[bits.weight, bits.activation] for bits in table.choices],
        "cost": {
            layer.name: [float(value) for value in row]
            for layer, row in zip(table.layers, table.cost, strict=True)
        },
        "details": dict(details),
        **({"groups": [list(group) for group in table.groups]} if table.groups else {}),
    }


def bits_json(model: nn.Module, plan: BitPlan, target: float, rest_bits: int) -> dict[str, Any]:
    """Mean widths over the searched layers, all quantized layers and the whole model.

    ``rest_bits`` is the width of what is not a code. ``with_scales`` adds the quantizers' scales,
    of that width, and zero points of 8 bits. ``first_tokens`` are those whose inputs have a width
    of their own, None if there are none.
    """
    apart = next((m for m in model.modules() if isinstance(m, PrefixQuantizer)), None)
    layers = [m for m in model.modules() if isinstance(m, QuantLayer)]
    searched = [m for m in layers if m.spec.name in plan]
    rest = sum(p.numel() for p in model.parameters()) + sum(m.bias.numel() for m in layers)

    def codes(some: list[QuantLayer]) -> int:
        return sum(m.codes.numel() * m.bits.weight for m in some)

    def scales(some: list[QuantLayer]) -> int:
        return sum((rest_bits + 8) * m.codes.shape[0] for m in some)

    def weights(some: list[QuantLayer]) -> int:
        return sum(m.codes.numel() for m in some)

    everything = weights(layers) + rest
    return {
        "target": target,
        "mean_weight_searched": codes(searched) / weights(searched),
        "mean_weight_searched_with_scales": (codes(searched) + scales(searched))
        / weights(searched),
        "mean_weight_quantized": codes(layers) / weights(layers),
        "mean_weight_all": (codes(layers) + rest_bits * rest) / everything,
        "mean_weight_all_with_scales": (codes(layers) + scales(layers) + rest_bits * rest)
        / everything,
        "mean_activation_searched": plan.mean_activation_bits,
        "first_tokens": None
        if apart is None
        else {"count": apart.count, "bits": apart.prefix.bits},
    }


def reconstruction_json(done: Reconstruction | None) -> dict[str, Any] | None:
    """What reconstruction brought, on calibration images kept from it."""
    if done is None:
        return None
    return {**asdict(done), "after": asdict(done.after), "kept": done.kept}


def exchanges_json(start: BitPlan | None, steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Every attempted exchange, with the widths it would change in the plan of its time."""
    content = []
    plan = start
    for step in steps:
        assert plan is not None, "exchanges start from a plan"
        content.append(
            {
                "widened": list(step.widened),
                "narrowed": list(step.narrowed),
                "score": step.score,
                "accepted": step.accepted,
                "moved": step.moved,
                "mean_weight_bits": step.plan.mean_weight_bits,
                "mean_activation_bits": step.plan.mean_activation_bits,
                "changes": {
                    name: {
                        "from": [plan[name].weight, plan[name].activation],
                        "to": [bits.weight, bits.activation],
                    }
                    for name, bits in step.plan.items()
                    if bits != plan[name]
                },
            }
        )
        if step.accepted:
            plan = step.plan
    return content


def versions() -> dict[str, str]:
    """Versions of everything a number may depend on."""
    found = {"python": sys.version.split()[0], "platform": platform.platform()}
    for package in ("lampq", "torch", "timm", "scipy", "numpy", "safetensors"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


def build_report(
    result: Result,
    *,
    scores: Mapping[str, Mapping[str, Any]],
    seconds: Mapping[str, float],
    files: Mapping[str, int],
    float_bytes: int,
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """The content of report.json; its keys are stable."""
    allocation = result.allocation
    return {
        "report_version": REPORT_VERSION,
        "model": result.source.to_json(),
        "config": result.config.to_json(),
        "seed": result.config.seed,
        "versions": versions(),
        "scores": {name: dict(score) for name, score in scores.items()},
        "calibration": {name: quality.to_json() for name, quality in result.calibration.items()},
        "uniform_bits": result.uniform.mean_weight_bits,
        "bits": {
            **bits_json(
                result.model, result.plan, result.budget.mean_bits, result.config.rest_bits
            ),
            "target_activation": result.budget.mean_activation_bits,
        },
        "limits": [
            {"name": limit.name, "most": limit.most, "taken": limit.of(result.plan)}
            for limit in result.budget.limits
        ],
        "plan": plan_json(result.plan),
        "initial_plan": None if allocation is None else plan_json(allocation.plan),
        "solver": {
            "status": "plan given" if allocation is None else allocation.status,
            "proven_optimal": allocation is not None and allocation.proven_optimal,
            "objective": None if allocation is None else allocation.objective,
        },
        "exchanges": exchanges_json(result.start, result.steps),
        "reconstruction": reconstruction_json(result.reconstruction),
        "seconds": {stage: float(seconds.get(stage, 0.0)) for stage in STAGES},
        "files": dict(files),
        "float_bytes": float_bytes,
        "notices": list(result.notices),
        **extra,
    }


def uniform_bytes(result: Result) -> int:
    """Size of the checkpoint of the uniform model."""
    return len(packed(result.uniform_model(), result.source, result.uniform, result.config))


def plan_rows(plan: BitPlan) -> list[tuple[str, dict[str, str]]]:
    """Rows (block, role -> width) of the plan, one per block."""
    rows: dict[int, dict[str, str]] = {}
    for layer, bits in zip(plan.layers, plan.widths, strict=True):
        shown = str(bits.weight) if bits.weight == bits.activation else str(bits)
        row = rows.setdefault(layer.block, {})
        role = layer.role.value
        row[role] = f"{row[role]},{shown}" if role in row else shown
    return [(str(block) if block >= 0 else "-", row) for block, row in sorted(rows.items())]


def headline(report: Mapping[str, Any]) -> str:
    """The model and its budget."""
    name, limits = report["model"]["name"], report["limits"]
    if limits:
        return f"{name} within " + " and ".join(f"{one['most']:,} {one['name']}" for one in limits)
    return f"{name} at {report['bits']['target']:.3g} bits"


def report_markdown(report: Mapping[str, Any], plan: BitPlan) -> str:
    """A page of the report for people."""
    lines = [f"# {headline(report)}", ""]
    lines += [f"> {notice}" for notice in report["notices"]]
    lines += ["", *markdown(report["scores"])]
    if PICTURES in report["files"]:
        lines += ["", f"![Detections of the float and of the quantized model]({PICTURES})"]
    size = report["files"].get("model.safetensors", 0)
    ratio = report["float_bytes"] / max(size, 1)
    lines += ["", f"File: {size:,} bytes, {ratio:.1f} times smaller than float32.", ""]
    for one in report["limits"]:
        lines += [f"Counted for the budget: {one['taken']:,} of {one['most']:,} {one['name']}.", ""]
    if report["config"]["profile"] == "speed":
        lines += ["Quantized for speed: weights and inputs of layers, all else in float.", ""]
    means = f"Mean width of the weights {plan.mean_weight_bits:.4g}"
    means += f", of the layers' inputs {plan.mean_activation_bits:.4g}"
    limit = report["bits"]["target_activation"]
    means += "." if limit is None else f" (at most {limit:g})."
    apart = report["bits"]["first_tokens"]
    if apart is not None:
        means += f" Class and register tokens ({apart['count']} an image) have {apart['bits']} bits"
        means += " there, and in attention products."
    lines += [
        "## Widths",
        "",
        means,
        "",
        "| block | qkv | proj | fc1 | fc2 |",
        "|---|---|---|---|---|",
    ]
    for block, row in plan_rows(plan):
        cells = (row.get(role, "") for role in ("qkv", "proj", "fc1", "fc2"))
        lines.append(f"| {block} | {' | '.join(cells)} |")
    lines += ["", "## Seconds", ""]
    lines += [f"- {stage}: {value:.1f}" for stage, value in report["seconds"].items()]
    return "\n".join(lines) + "\n"
