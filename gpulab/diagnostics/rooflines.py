"""How fast a device can compute and move data: its roofline (Williams, Waterman, Patterson 2009)."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpulab.errors import UsageError
from gpulab.passports import passport
from gpulab.records import recorded_folder
from gpulab.settings import Setting

if TYPE_CHECKING:
    import pandas as pd
    import torch

FLOAT_BYTES = 4
COPY_BYTES = {"cpu": 2**27, "cuda": 2**31, "mps": 2**29, "xpu": 2**30}
LARGEST_MATRIX = {"cpu": 1024, "cuda": 8192, "mps": 4096, "xpu": 4096}


def roofline(setting: Setting | str = "cpu", repeats: int = 7) -> pd.DataFrame:
    """Measure a device: a copy, matrix products of growing size, and layers of the two networks.

    One row an operation: `operation`, `kind`, `flop` and `bytes` (counted: each input read once, each
    output written once), `intensity` in flop per byte, `seconds` (the median of `repeats`, after a
    warm-up), `spread` (the interquartile range over the median), `gflops`, `gigabytes_per_second`,
    `setting`. Takes about ten seconds on a laptop.
    """
    import pandas as pd

    if repeats < 2:
        raise UsageError(f"repeats={repeats}: a median with its spread needs at least 2")
    parsed = Setting.parse(setting)
    with parsed.apply():
        rows = [_measure(parsed, repeats, *operation) for operation in _operations(parsed)]
    frame = pd.DataFrame(rows)
    frame["intensity"] = frame.flop / frame.bytes
    frame["gflops"] = frame.flop / frame.seconds / 1e9
    frame["gigabytes_per_second"] = frame.bytes / frame.seconds / 1e9
    return frame.assign(setting=str(parsed))


def bounds(frame: pd.DataFrame) -> pd.DataFrame:
    """What holds each layer of the two networks back, by the ceilings that `roofline` measured.

    One row a layer and setting: `operation`, `setting`, `intensity`, `ridge` (the intensity at which
    the device's ceilings of bandwidth and arithmetic meet), `bound` (`memory` to the left of it,
    `arithmetic` to the right) and `reached`, the measured rate over the ceiling at that intensity.
    A layer that fits into a cache can reach more than the bandwidth of main memory allows.
    """
    import pandas as pd

    rows = []
    for setting, device in frame.groupby("setting", sort=False):
        bandwidth = device[device.kind == "memory"].gigabytes_per_second.max()
        peak = device.gflops.max()
        for layer in device[device.kind == "network"].itertuples():
            ceiling = min(bandwidth * layer.intensity, peak)
            rows.append(
                {
                    "operation": layer.operation,
                    "setting": setting,
                    "intensity": layer.intensity,
                    "ridge": peak / bandwidth,
                    "bound": "memory" if layer.intensity < peak / bandwidth else "arithmetic",
                    "reached": layer.gflops / ceiling,
                }
            )
    return pd.DataFrame(rows)


def write_roofline(frame: pd.DataFrame, file: Path, command: str) -> None:
    """Keep a measured roofline with this machine's passport and the command that made it."""
    record = {"format": 1, "passport": passport(), "command": command, "rows": frame.to_dict("records")}
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def recorded_rooflines() -> pd.DataFrame:
    """The rooflines shipped with gpulab, as `roofline`, with the column `machine`."""
    import pandas as pd

    parts = []
    for file in sorted(recorded_folder("rooflines").glob("*.json")):
        record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        machine = ", ".join(gpu["name"] for gpu in record["passport"]["gpus"]) or record["passport"]["cpu"]["model"]
        parts.append(pd.DataFrame(record["rows"]).assign(machine=machine))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def _operations(setting: Setting) -> list[tuple[str, str, float, float, Callable[[], object]]]:
    """(name, kind, flop, bytes, the operation) of everything that is measured."""
    import torch
    import torch.nn.functional as F

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(setting.device, setting.dtype)

    size = torch.finfo(setting.dtype).bits // 8
    count = COPY_BYTES[setting.kind] // size
    source, other, target = random(count), random(count), random(count)
    operations: list[tuple[str, str, float, float, Callable[[], object]]] = [
        ("copy", "memory", 0.0, 2.0 * size * count, lambda: target.copy_(source)),
        ("add", "memory", 1.0 * count, 3.0 * size * count, lambda: torch.add(source, other, out=target)),
    ]
    edge = 16
    while edge <= LARGEST_MATRIX[setting.kind]:
        a, b = random(edge, edge), random(edge, edge)
        name = f"matrix product {edge}"
        operations.append((name, "matrix", 2.0 * edge**3, 3.0 * size * edge**2, lambda a=a, b=b: a @ b))  # type: ignore[misc]
        edge *= 2
    image, layer = random(1, 784), random(128, 784)
    operations.append(
        (
            "autoencoder, first layer",
            "network",
            2.0 * 784 * 128,
            size * (784.0 * 128 + 784 + 128),
            lambda: F.linear(image, layer),
        )
    )
    for name, frame_size, channels in (("quick", (48, 64), 16), ("paper", (120, 160), 48)):
        height, width = frame_size[0] // 2, frame_size[1] // 2
        inside, outside = 5 * channels, 4 * channels  # layer 1's gates: errors, from above, hidden
        maps, kernel = random(1, inside, height, width), random(outside, inside, 3, 3)
        flop = 2.0 * 9 * inside * outside * height * width
        moved = size * (9.0 * inside * outside + (inside + outside) * height * width)
        operations.append(
            (f"PredNet ({name}), gates", "network", flop, moved, lambda m=maps, k=kernel: F.conv2d(m, k, padding=1))  # type: ignore[misc]
        )
    return operations


def _measure(
    setting: Setting, repeats: int, name: str, kind: str, flop: float, moved: float, work: Callable[[], object]
) -> dict[str, Any]:
    """Median time of one call, from `repeats` batches of calls that take a few hundredths of a second."""
    once = max(_time(setting, work, 3) / 3, 1e-7)
    calls = max(1, int(0.03 / once))
    _time(setting, work, calls)
    times = [_time(setting, work, calls) / calls for _ in range(repeats)]
    quartiles = statistics.quantiles(times, n=4)
    return {
        "operation": name,
        "kind": kind,
        "flop": flop,
        "bytes": moved,
        "seconds": statistics.median(times),
        "spread": (quartiles[2] - quartiles[0]) / statistics.median(times),
    }


def _time(setting: Setting, work: Callable[[], object], calls: int) -> float:
    _wait(setting)
    started = time.perf_counter()
    for _ in range(calls):
        work()
    _wait(setting)
    return time.perf_counter() - started


def _wait(setting: Setting) -> None:
    """A device works on while Python goes ahead: wait until it is done."""
    import torch

    if setting.kind != "cpu":
        getattr(torch, setting.kind).synchronize()
