"""The folder of reproduced tables and figures: what is finished, and the files of each part."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from time import perf_counter
from typing import Any

from lampq.artifact.checkpoint import write_atomically
from lampq.bench import processor
from lampq.config import make_config
from lampq.errors import ConfigError, FormatError
from lampq.report import versions
from lampq.reproduce.lab import Asked, Lab
from lampq.reproduce.part import Found, Part
from lampq.reproduce.pictures import FORMS, render
from lampq.reproduce.published import label_of
from lampq.runfolder import STAMP, WORK, open_work
from lampq.version import __version__

VERSION = 1
COMMENT = "% needs \\usepackage{booktabs}\n"


def check_asked(part: Part, asked: Asked) -> None:
    """Raise if the part has no such rows, or no run such options."""
    for row in asked.rows:
        if row not in part.rows:
            known = f"known: {', '.join(part.rows)}" if part.rows else "it has none to choose from"
            raise ConfigError(f"unknown row {row!r} of {part.name}; {known}")
    for bits in asked.bits:
        make_config({**asked.options, "bits": bits})


def open_folder(out: Path, inputs: Mapping[str, Any]) -> Path:
    """The work folder of these inputs: new, or as an earlier command left it."""
    stamp = json.dumps({**inputs, "lampq": __version__}, sort_keys=True)
    return open_work(out, stamp, resume=(out / WORK / STAMP).exists())


def finished(part: Part, out: Path, asked: Asked) -> Found | None:
    """What the folder has of a part already; raises if it was asked for with other options."""
    path = out / f"{part.name}.json"
    if not path.exists():
        return None
    try:
        found: Found = json.loads(path.read_text(encoding="utf-8"))
        version, before = found["reproduce_version"], found["asked"]
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{str(path)!r} cannot be read: {error!r}") from error
    if version != VERSION or before != asked.to_json():
        raise ConfigError(
            f"{str(path)!r} was made with other options: give the same ones, or another --out"
        )
    return found


def compute(
    part: Part, lab: Lab, out: Path, inputs: Mapping[str, Any], command: str
) -> tuple[Found, bool]:
    """What the part finds, and whether it had to be computed."""
    before = finished(part, out, lab.asked)
    if before is not None:
        return before, False
    start = perf_counter()
    seed = int(lab.asked.options.get("seed") or 0)
    used = int(lab.asked.options["images"])
    found: Found = {
        "reproduce_version": VERSION,
        "part": part.name,
        "label": label_of(lab.loaded.source),
        "model": lab.loaded.source.to_json(),
        "inputs": dict(inputs),
        "asked": lab.asked.to_json(),
        "result": part.compute(lab),
        "images": {
            "calibration": min(used, len(lab.calibration(seed))) if part.calibrated else 0,
            "evaluation": len(lab.scored) if part.scored else 0,
        },
        "command": command,
        "seed": seed,
        "date": date.today().isoformat(),
        "seconds": perf_counter() - start,
        "processor": processor(),
        "versions": versions(),
    }
    # as it is read back, so that both ways give the same files
    text = json.dumps(found, indent=2) + "\n"
    write_atomically(out / f"{part.name}.json", text.encode())
    again: Found = json.loads(text)
    return again, True


def about(found: Found) -> str:
    """How the numbers were made, in one line."""
    images, options = found["images"], found["asked"]["options"]
    used = [f"{count:,} {kind} images" for kind, count in images.items() if count]
    return (
        f"`{found['command']}`: {found['model']['name']}, {' and '.join(used) or 'no images'}, "
        f"seed {found['seed']}, preset {options['preset']}, lampq {__version__}, "
        f"{found['date']}."
    )


def write(part: Part, found: Sequence[Found], out: Path, *, pictures: bool) -> list[Path]:
    """Write tables and pictures of what was found on one model or more; the files, in order."""
    tables = part.tables(found)
    lines = [f"# {part.title[0].upper()}{part.title[1:]}", "", f"{part.place} of the paper.", ""]
    content: dict[str, bytes] = {}
    if pictures:
        width, height = part.size
        for form, picture in render(part.draw, found, (width, height * len(found))).items():
            content[f"{part.name}.{form}"] = picture
        lines += [f"![{part.title}]({part.name}.{FORMS[0]})", ""]
    lines += [table.markdown() for table in tables]
    lines += [f"{about(one)}\n" for one in found]
    tex = "\n".join(table.latex() for table in tables)
    texts = {
        f"{part.name}.md": "\n".join(lines),
        f"{part.name}.tex": COMMENT + tex,
        **{f"{table.name}.csv": table.csv() for table in tables},
    }
    content = {**{name: text.encode() for name, text in texts.items()}, **content}
    for name, data in content.items():
        write_atomically(out / name, data)
    return [out / name for name in content]
