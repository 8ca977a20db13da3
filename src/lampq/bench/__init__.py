"""Size and speed of a packed model, against torch and against the same runtime without lampq."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lampq.artifact.checkpoint import Header, load_checkpoint, read_checkpoint
from lampq.artifact.onnx.families import input_size
from lampq.bench.contenders import Contender, Contest
from lampq.bench.measure import CLOCKS, Clock, Ratio, in_turns
from lampq.errors import ConfigError
from lampq.export import profile_of
from lampq.progress import Progress
from lampq.runtime import check_runtime, installed
from lampq.runtime import load as load_deployed
from lampq.types import INTEGER_BITS
from lampq.verify import version_of

BENCH_VERSION = 1
# ratios of rounds that are further apart than this were measured on a busy machine
UNSTEADY = 2


@dataclass(frozen=True, slots=True)
class Settings:
    """What is timed, and how."""

    runtimes: tuple[str, ...]
    batches: tuple[int, ...] = (1, 32)
    threads: tuple[int, ...] = (1, 2)
    rounds: int = 7
    clock: Clock = "wall"

    def __post_init__(self) -> None:
        for name in ("batches", "threads"):
            numbers = getattr(self, name)
            if not numbers or min(numbers) < 1:
                raise ConfigError(f"{name} must be whole numbers from 1 on, got {numbers}")
        if self.rounds < 1:
            raise ConfigError(f"rounds must be at least 1, got {self.rounds}")
        if self.clock not in ("wall", "cpu"):
            raise ConfigError(f"clock must be wall or cpu, got {self.clock!r}")
        if not self.runtimes or "torch" in self.runtimes:
            raise ConfigError(
                "a benchmark needs onnxruntime or openvino: pip install 'lampq[bench]'"
            )
        for name in self.runtimes:
            check_runtime(name)


def settings(runtimes: Sequence[str] = (), **options: Any) -> Settings:
    """Settings for the named runtimes, or for all that are installed."""
    return Settings(tuple(runtimes) or installed(), **options)


def bench(path: Path, how: Settings, progress: Progress | None = None) -> dict[str, Any]:
    """All numbers of one packed model, ready for JSON."""
    header, _ = read_checkpoint(path)
    quantized = load_checkpoint(path)
    plain = header.source.build()
    size = input_size(quantized)
    before = torch.get_num_threads()
    rows: list[dict[str, Any]] = []
    try:
        seconds = {name: _loading(path, name, CLOCKS[how.clock]) for name in how.runtimes}
        contest = Contest(quantized, plain, size, how.runtimes)
        for threads in how.threads:
            contenders = contest.contenders(threads)
            for batch in how.batches:
                rows += _timed(contenders, size, threads, batch, how, progress)
    finally:
        torch.set_num_threads(before)
    sizes = _sizes(path, header, sum(p.numel() for p in plain.parameters()))
    found: dict[str, Any] = {
        "bench_version": BENCH_VERSION,
        "file": str(path),
        "model": header.source.name,
        "profile": profile_of(header),
        "processor": processor(),
        "cores": os.cpu_count(),
        "versions": {
            "torch": torch.__version__,
            **{name: version_of(name) for name in how.runtimes},
        },
        "clock": how.clock,
        "rounds": how.rounds,
        "size": sizes,
        "load_seconds": seconds,
        "rows": rows,
        "missing": contest.missing,
    }
    return {**found, "remarks": remarks(found)}


def _loading(path: Path, runtime: str, now: Callable[[], float]) -> float:
    """Seconds from the packed file to a session, the runtime itself already loaded."""
    load_deployed(path, runtime, threads=1)
    start = now()
    load_deployed(path, runtime, threads=1)
    return now() - start


def _sizes(path: Path, header: Header, parameters: int) -> dict[str, Any]:
    """Bytes of the file, of float weights, and of the same file with every layer at eight bits."""
    layers = list(header.layers())
    size = path.stat().st_size
    more = sum(spec.n_params * (INTEGER_BITS - bits.weight) for spec, bits in layers) // 8
    return {
        "bytes": size,
        "float_bytes": 4 * parameters,
        "smaller": 4 * parameters / size,
        "bytes_at_8_bits": size + more,
        "layers": len(layers),
        "layers_below_8_bits": sum(bits.weight < INTEGER_BITS for _, bits in layers),
        "layers_above_8_bits": sum(
            _widest(entry) > INTEGER_BITS for entry in header.content["layers"].values()
        ),
    }


def _widest(entry: Mapping[str, Any]) -> int:
    """The larger one of a layer's widths, as its entry in the header has them."""
    weight, inputs = entry["bits"][0], entry["input_quantizer"]
    return int(max(weight, 0 if inputs is None else inputs["bits"]))


def _timed(
    contenders: list[Contender],
    size: tuple[int, ...],
    threads: int,
    batch: int,
    how: Settings,
    progress: Progress | None,
) -> list[dict[str, Any]]:
    """One row for each contender at one setting."""
    images = torch.randn(batch, *size, generator=torch.Generator().manual_seed(0))

    def running(contender: Contender) -> Any:
        return lambda: contender.run(images)

    with torch.inference_mode():
        times = in_turns(
            {one.name: running(one) for one in contenders},
            rounds=how.rounds,
            clock=how.clock,
            progress=progress,
            label=f"batch {batch}, {threads} thread{'s' if threads > 1 else ''}",
        )
    rows = []
    for one in contenders:
        mine = sorted(times[one.name])
        median = mine[len(mine) // 2]
        rows.append(
            {
                "runtime": one.runtime,
                "kind": one.kind,
                "threads": threads,
                "batch": batch,
                "milliseconds": 1e3 * median,
                "images_per_second": batch / median,
                "against_torch": asdict(Ratio.of(times["torch fp32"], times[one.name])),
                "against_runtime": asdict(Ratio.of(times[f"{one.runtime} fp32"], times[one.name])),
            }
        )
    return rows


def for_page(found: dict[str, Any]) -> dict[str, Any] | None:
    """Milliseconds for one image as the report page reads them; None if no single one was timed.

    Of the fastest runtime, on the fewest threads.
    """
    rows = [row for row in found["rows"] if row["batch"] == 1]
    if not rows:
        return None
    mine = (row for row in rows if row["kind"] == "lampq")
    best = min(mine, key=lambda row: (row["threads"], row["milliseconds"]))
    runtime, threads = best["runtime"], best["threads"]
    plain = {
        row["runtime"]: row["milliseconds"]
        for row in rows
        if row["threads"] == threads and row["kind"] == "fp32"
    }
    clock = "CPU time" if found["clock"] == "cpu" else "measured"
    return {
        "fp32": plain["torch"],
        "mixed": best["milliseconds"],
        "note": f"{clock} in {runtime} on {_threads(threads)}; float32 is eager torch, "
        f"{runtime} takes {plain[runtime]:.3g} ms for it",
    }


def _threads(count: int) -> str:
    return "one thread" if count == 1 else f"{count} threads"


def processor() -> str:
    """The name of the processor, as far as it is known."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def remarks(found: dict[str, Any]) -> list[str]:
    """What the numbers mean, in words."""
    size = found["size"]
    said = [
        f"The file has {size['bytes'] / 1e6:.3g} MB, {size['smaller']:.1f} times less than "
        f"{size['float_bytes'] / 1e6:.3g} MB of 32-bit floats."
    ]
    mine = [row for row in found["rows"] if row["kind"] == "lampq"]
    said += [_in_words(row) for row in mine if row["batch"] == 1]
    below = size["layers_below_8_bits"]
    if below:
        said.append(
            f"{below} of {size['layers']} layers have fewer than 8 bits. The runtimes have no "
            "narrower integers: their widths make the file smaller, not faster. With 8 bits for "
            f"all layers it would have {size['bytes_at_8_bits'] / 1e6:.3g} MB."
        )
    above = size["layers_above_8_bits"]
    if above:
        said.append(
            f"{above} of {size['layers']} layers have a weight or an input of more than 8 bits: "
            "they run in float."
        )
    if found["profile"] == "accuracy":
        said.append(
            "The model is quantized for accuracy: what integer kernels cannot do runs in float. "
            "The plan in a faster form: lampq export RUN --profile speed."
        )
    said += [_against(row, found["rows"]) for row in mine]
    if any(row["against_torch"]["high"] > UNSTEADY * row["against_torch"]["low"] for row in mine):
        said.append(
            f"The ratio to torch changed by more than a factor of {UNSTEADY} between rounds: the "
            "machine is busy. Measure again, or take --clock cpu --threads 1."
        )
    said += [f"Not measured: {reason}." for reason in found["missing"]]
    return [sentence for sentence in said if sentence]


def _faster(ratio: dict[str, float]) -> str:
    """A ratio as a person says it."""
    median = ratio["median"]
    if 0.95 < median < 1.05:
        return "as fast as"
    if median > 1:
        return f"{median:.2f} times faster than"
    return f"{1 / median:.2f} times slower than"


def _in_words(row: dict[str, Any]) -> str:
    return (
        f"In {row['runtime']} one image takes {row['milliseconds']:.3g} ms on "
        f"{_threads(row['threads'])}: "
        f"{_faster(row['against_torch'])} torch, {_faster(row['against_runtime'])} "
        f"{row['runtime']} without quantization."
    )


def _against(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """A warning where the runtime does better without lampq."""
    same = {
        other["kind"]: other["milliseconds"]
        for other in rows
        if all(other[key] == row[key] for key in ("runtime", "threads", "batch"))
    }
    better = [
        kind
        for kind in ("fp32", "bf16", "int8")
        if same.get(kind, 1e30) < 0.95 * row["milliseconds"]
    ]
    if not better:
        return ""
    names = {"fp32": "fp32", "bf16": "unquantized bf16", "int8": "the runtime's own 8-bit form"}
    listed = " and ".join(names[kind] for kind in better)
    return (
        f"In {row['runtime']}, batch {row['batch']}, threads {row['threads']}: {listed} "
        f"{'is' if len(better) == 1 else 'are'} faster than this model."
    )
