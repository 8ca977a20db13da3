"""Options that several commands have; defaults belong to the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Weights = Annotated[Path | None, typer.Option(help=".safetensors or .pth state dict")]
Calib = Annotated[Path | None, typer.Option(help="calibration pictures")]
CalibAnnotations = Annotated[
    Path | None, typer.Option(help="COCO file of what is in them (detection)")
]
Evaluation = Annotated[Path | None, typer.Option("--eval", help="evaluation pictures")]
EvalAnnotations = Annotated[
    Path | None, typer.Option(help="COCO file of what is in them (detection)")
]
Images = Annotated[int | None, typer.Option(help="calibration images to use")]
Seed = Annotated[int | None, typer.Option(help="seed of every random draw")]
Mean = Annotated[str | None, typer.Option(help="pixel mean, one or three numbers")]
Std = Annotated[str | None, typer.Option(help="pixel deviation")]
CropPct = Annotated[float | None, typer.Option(help="crop / resized edge")]
Resume = Annotated[bool, typer.Option("--resume", help="continue in --out")]
Quiet = Annotated[bool, typer.Option("--quiet", help="no progress, no table")]
