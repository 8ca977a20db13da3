"""Imports go one way, and importing has no effects."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lampq

ROOT = Path(lampq.__file__).parent
ORDER = (
    "errors",
    "version",
    "types",
    "progress",
    "registry",
    "quant",
    "graph",
    "data",
    "views",
    "models",
    "tokens",
    "hooks",
    "passes",
    "calibrate",
    "methods",
    "reconstruct",
    "evaluate",
    "task",
    "metrics",
    "allocate",
    "refine",
    "inputs",
    "detection",
    "artifact",
    "runtime",
    "pieces",
    "verify",
    "zero_shot",
    "config",
    "tasks",
    "limits",
    "scoring",
    "finish",
    "statistics",
    "prepare",
    "pipeline",
    "sharing",
    "report",
    "runfolder",
    "export",
    "export_detector",
    "bench",
    "compare",
    "reproduce",
    "terminal",
    "typed",
    "sweep",
    "cli",
)
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))
ENTRIES = ("__init__", "__main__")  # they join the modules and are imported by none


def _part(file: str) -> str:
    """The module or package of lampq that a file belongs to."""
    return file.split("/")[0].removesuffix(".py")


def _imported(source: str) -> set[str]:
    """The parts of lampq that a source file imports, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("lampq.")}
    return found


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("from lampq.types import BitPlan", {"types"}),
        ("import lampq.quant.log", {"quant"}),
        ("from lampq import cli", {"cli"}),
        ("def f():\n    from lampq.models import load", {"models"}),
        ("import torch\nfrom pathlib import Path", set()),
    ],
)
def test_imports_are_found_in_a_source(source: str, parts: set[str]) -> None:
    assert _imported(source) == parts


def test_every_module_has_its_place_in_the_order() -> None:
    assert {_part(file) for file in FILES} - set(ENTRIES) <= set(ORDER)


@pytest.mark.parametrize("file", [f for f in FILES if _part(f) in ORDER])
def test_a_module_imports_only_from_those_above_it(file: str) -> None:
    place = ORDER.index(_part(file))
    imported = _imported((ROOT / file).read_text(encoding="utf-8"))
    below = {part for part in imported if part not in ORDER or ORDER.index(part) > place}
    assert below == set()


PROBE = """
import json, logging, random, sys
import numpy, torch

def state():
    return {
        "threads": torch.get_num_threads(),
        "torch seed": torch.initial_seed(),
        "torch generator": torch.get_rng_state().tolist(),
        "numpy generator": str(numpy.random.get_state()),
        "python generator": str(random.getstate()),
        "default dtype": str(torch.get_default_dtype()),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "root handlers": [str(handler) for handler in logging.getLogger().handlers],
        "own handlers": [str(handler) for handler in logging.getLogger("lampq").handlers],
        "level": logging.getLogger().level,
        "cuda": torch.cuda.is_initialized(),
    }

torch.set_num_threads(3)
before = state()
import lampq
after = state()
optional = ("onnx", "onnxruntime", "openvino", "ray", "matplotlib")
loaded = [name for name in optional if name in sys.modules]
changed = [name for name in before if before[name] != after[name]]
json.dump({"changed": changed, "loaded": loaded}, sys.stdout)
"""


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What importing lampq did to a fresh interpreter in an empty folder."""
    folder = tmp_path_factory.mktemp("empty")
    path = os.pathsep.join([str(ROOT.parent), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-B", "-c", PROBE],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    written = [entry.name for entry in folder.iterdir()]
    return {**json.loads(run.stdout), "written": written, "said": run.stderr}


@pytest.mark.parametrize(
    ("what", "expected"),
    [("changed", []), ("loaded", []), ("written", []), ("said", "")],
    ids=["global-state", "optional-packages", "files", "messages"],
)
def test_importing_lampq_has_no_effect(
    probed: dict[str, object], what: str, expected: object
) -> None:
    assert probed[what] == expected
