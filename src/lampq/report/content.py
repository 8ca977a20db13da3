"""What the report page shows, from the files of a run folder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lampq.report.frontier import code_bytes, cost_table, frontier, frontier_json, plan_numbers
from lampq.report.scores import detailed, interval, measured, parts
from lampq.types import SEARCHED_ROLES, BitPlan, CostTable, LayerBits, LayerRole, LayerSpec

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The parsed files of one run folder.

    ``layers`` are those of the checkpoint, in execution order. ``others`` are reports of further
    runs whose scores are shown beside this one's, by name. ``pictures`` is a JPEG of answers.
    """

    report: Mapping[str, Any]
    layers: Sequence[tuple[LayerSpec, LayerBits]]
    sensitivity: Mapping[str, Any] | None = None
    histograms: Mapping[str, Any] | None = None
    speed: Mapping[str, Any] | None = None
    others: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    pictures: bytes | None = None

    def plan(self, content: Mapping[str, Any]) -> BitPlan:
        """The plan of a plan.json, in the order of the layers."""
        named = content["layers"]
        layers = tuple(spec for spec, _ in self.layers if spec.name in named)
        widths = (named[spec.name] for spec in layers)
        return BitPlan(layers, tuple(LayerBits(b["weight"], b["activation"]) for b in widths))


def page_content(files: RunFiles) -> Json:
    """All that the page needs, as JSON; numbers that are not finite are null."""
    report = files.report
    plan = files.plan(report["plan"])
    other_bytes = report["files"]["model.safetensors"] - code_bytes(plan)
    costs = None
    if files.sensitivity is not None:
        costs = cost_table([spec for spec, _ in files.layers], files.sensitivity)
    initial = report["initial_plan"]
    content = {
        "model": report["model"]["name"],
        "config": report["config"],
        "notices": report["notices"],
        "solver": report["solver"],
        "reconstruction": report["reconstruction"],
        "seconds": report["seconds"],
        "versions": report["versions"],
        "data": report.get("data", {}),
        "bits": report["bits"],
        "scores": scores(report),
        "measured": measured(report),
        "detailed": detailed(report["scores"]),
        "calibration": report["calibration"],
        "bytes": {
            "fp32": report["float_bytes"],
            "uniform": report["uniform_bytes"],
            "mixed": report["files"]["model.safetensors"],
        },
        "uniform_bits": report["uniform_bits"],
        "speed": files.speed,
        "unmeasured_speed": _unmeasured_speed(report["model"]["kind"]),
        "layers": [
            {
                "name": spec.name,
                "role": spec.role.value,
                "block": spec.block,
                "params": spec.n_params,
                "bits": [bits.weight, bits.activation],
                "searched": spec.name in plan,
            }
            for spec, bits in files.layers
        ],
        "stages": stages([spec for spec, _ in files.layers]),
        "plans": {
            "run": shown_plan(plan, costs, other_bytes),
            "initial": None
            if initial is None
            else shown_plan(files.plan(initial), costs, other_bytes),
        },
        "sensitivity": None,
        "frontier": None,
        "probes": None,
        "exchanges": exchanges(report, costs),
        "histograms": files.histograms,
        "others": [point for name, other in files.others.items() for point in points(name, other)],
    }
    if costs is not None and files.sensitivity is not None:
        content["sensitivity"] = sensitivity(costs, files.sensitivity["details"])
        content["probes"] = probes(costs, files.sensitivity["details"])
        best = frontier(costs, report["bits"]["target_activation"])
        content["frontier"] = frontier_json(best, costs, other_bytes)
    clean: Json = finite(content)
    return clean


def finite(value: Any) -> Any:
    """The same with None for every number that JSON has no word for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return value


def _unmeasured_speed(kind: str) -> str:
    """What the page says of the speed of a kind of model as long as it has no numbers."""
    if kind == "detector":
        return (
            "Detectors are not timed. lampq export writes backbone and pyramid for ONNX Runtime "
            "and OpenVINO."
        )
    return "Not measured yet: lampq bench with this run folder fills this in."


def shown_plan(plan: BitPlan, costs: CostTable | None, other_bytes: int) -> Json:
    """Widths of the searched layers in their order, predicted cost and size of the file."""
    widths = [[bits.weight, bits.activation] for bits in plan.widths]
    if costs is None:
        return {"widths": widths, "cost": None, "bytes": other_bytes + code_bytes(plan)}
    return {"widths": widths, **plan_numbers(plan, costs, other_bytes)}


def scores(report: Mapping[str, Any]) -> Json:
    """Scores with half the width of their 95 % interval, where they have one."""
    return {
        name: {**score, "interval": interval(score)} for name, score in report["scores"].items()
    }


def points(name: str, report: Mapping[str, Any]) -> list[Json]:
    """The measured accuracy of another run, if it has one."""
    if "mixed" not in report["scores"]:
        return []
    main = next(iter(parts(report["scores"]["mixed"]).values()))
    return [
        {
            "name": name,
            "bytes": report["files"]["model.safetensors"],
            "mean_weight_bits": report["bits"]["mean_weight_searched"],
            "value": main,
            **scores(report)["mixed"],
        }
    ]


def stages(layers: Sequence[LayerSpec]) -> list[list[Json]]:
    """The rows of the map: blocks and single layers in execution order, by stage.

    A reduction starts a stage. ``layers`` of a row are numbers in the list of all layers, by role;
    layers outside the blocks are rows of their own.
    """
    found: list[list[Json]] = [[]]
    rows: dict[int, Json] = {}
    for number, layer in enumerate(layers):
        if layer.role is LayerRole.REDUCTION and any(row["block"] >= 0 for row in found[-1]):
            found.append([])
        row = rows.get(layer.block)
        if row is None or layer.block < 0:
            row = {"block": layer.block, "layers": {}}
            found[-1].append(row)
            if layer.role in SEARCHED_ROLES and layer.block >= 0:
                rows[layer.block] = row
        row["layers"].setdefault(layer.role.value, []).append(number)
    return found


def sensitivity(costs: CostTable, details: Mapping[str, Any]) -> Json:
    """Costs by layer and choice; with role factors also what they were before and after."""
    content: Json = {
        "choices": [[bits.weight, bits.activation] for bits in costs.choices],
        "cost": costs.cost.tolist(),
        "before": None,
        "after": None,
        "role_scale": None,
    }
    if "role_scale" in details and "fisher_trace" in details:
        factors, traces = details["role_scale"], details["fisher_trace"]
        content["role_scale"] = factors
        content["before"] = [traces[layer.name] for layer in costs.layers]
        content["after"] = [
            traces[layer.name] * factors[layer.role.value] for layer in costs.layers
        ]
    return content


def probes(costs: CostTable, details: Mapping[str, Any]) -> Json | None:
    """Layers that were probed one by one: what the metric expects of them and what was measured.

    The expectation is trace times role factor, the cost up to a factor that all layers share.
    """
    if "probe" not in details or "role_scale" not in details:
        return None
    probe, numbers = details["probe"], {spec.name: i for i, spec in enumerate(costs.layers)}
    return {
        "bits": probe["bits"],
        "signal": probe["signal"],
        "layers": [
            {
                "layer": numbers[name],
                "predicted": details["fisher_trace"][name]
                * details["role_scale"][costs.layers[numbers[name]].role.value],
                "measured": drop,
            }
            for name, drop in probe["drop"].items()
        ],
    }


def exchanges(report: Mapping[str, Any], costs: CostTable | None) -> Json:
    """The attempted exchanges: score before and after, and the predicted change of cost."""
    part = {"accuracy": "accuracy", "loss": "likelihood", "kl": "agreement", "ap": "ap"}
    measure = part[report["config"]["accept"]]
    start = report["calibration"].get("start")
    best = None if start is None else start[measure]
    first = best
    steps = []
    for step in report["exchanges"]:
        gained = None if best is None else step["score"] - best
        predicted = None if costs is None else predicted_change(step.get("changes"), costs)
        steps.append({**step, "gained": gained, "predicted": predicted})
        if step["accepted"]:
            best = step["score"]
    return {
        "measure": report["config"]["accept"],
        "start": first,
        "uniform": report["calibration"]["uniform"][measure],
        "steps": steps,
    }


def predicted_change(changes: Mapping[str, Any] | None, costs: CostTable) -> float | None:
    """How much the total cost would rise by these changes of widths."""
    if not changes:
        return None
    rows = {layer.name: row for row, layer in enumerate(costs.layers)}
    total = 0.0
    for name, change in changes.items():
        old, new = (costs.choices.index(LayerBits(*change[key])) for key in ("from", "to"))
        total += float(costs.cost[rows[name], new] - costs.cost[rows[name], old])
    return total
