"""The cost of gpulab: time and memory of notebooks, guard and emulation.

python benchmarks/speed/costs.py budgets --profile smoke --profile quick --device cpu
python benchmarks/speed/costs.py memory --only 03,04
python benchmarks/speed/costs.py guard --write benchmarks/results/guard_cost.md
python benchmarks/speed/costs.py guard-lines --write benchmarks/results/guard_cost.md
python benchmarks/speed/costs.py emulation --write benchmarks/results/emulation_cost.md
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import torch
import torchvision
import typer
from torch import nn
from torch.nn import functional as F

import gpulab as gl
from benchmarks.measuring import (
    ROOT,
    Step,
    command_line,
    machine,
    made_by,
    quartiles,
    race,
    run,
    show,
    table,
)
from companion.notebooks import find_notebooks
from gpulab.guards._write_lines import _time_limit
from gpulab.numerics._emulation import CHIPS

app = command_line(__doc__)
Write = Annotated[Path | None, typer.Option(help="Markdown page to fill between its marks")]


# --- the companion --------------------------------------------------------------------------------


def process_seconds(command: list[str], repeats: int = 1) -> float:
    """Return the median time of a process in seconds; exit if it fails."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def duration(seconds: float) -> str:
    """Return a time in words.

    >>> duration(0.0421), duration(7.31), duration(251)
    ('0.04 s', '7 s', '4 min 11 s')
    """
    if seconds < 1:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


@app.command()
def budgets(
    profile: Annotated[list[str], typer.Option(help="smoke, quick or paper; may be repeated")] = (
        "smoke",
        "quick",
    ),
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps or xpu")] = "cpu",
) -> None:
    """Write time and peak memory of the companion, each notebook and a start to docs/costs.md.

    Time is the wall-clock time of `python -m companion`, into an empty folder, and of each
    notebook. Memory is that of a notebook's largest process, its kernel. A start is the median of
    seven processes. Since machines differ, the total is also given in frames: the number of frames
    on which one thread trains PredNet in that time, at the size of the quick profile.
    """
    trained = gl.train("prednet", setting="cpu:threads=1", profile="quick", progress=False)
    frames_per_second = trained.record["configuration"]["frames"] / trained.history.seconds.iloc[-1]
    rows = []
    for what, command in (
        ("`import gpulab`, including the start of Python", ["-c", "import gpulab"]),
        ("`gpulab --help`", ["-m", "gpulab.cli", "--help"]),
    ):
        rows.append([what, duration(process_seconds([sys.executable, *command], 7)), ""])
    for one in profile:
        with tempfile.TemporaryDirectory() as output:
            command = [
                sys.executable,
                "-m",
                "companion",
                "--profile",
                one,
                "--device",
                device,
                "--output",
                output,
            ]
            whole = process_seconds(command)
            results = json.loads(
                (Path(output) / "report" / "results.json").read_text(encoding="utf-8")
            )
        found = [
            (f"`{result['name']}`, {one}", result["seconds"], result["peak_bytes"])
            for result in results
        ]
        peak = max(memory for _, _, memory in found)
        work = (
            "all of these and the report (as long as training on"
            f" {round(whole * frames_per_second, -3):,.0f} frames)"
        )
        found.append((f"`python -m companion`, {one}: {work}", whole, peak))
        rows += [
            [what, duration(took), f"{memory / 2**20:,.0f} MiB"] for what, took, memory in found
        ]
    speed = (
        f"One thread trains PredNet of the quick profile at {frames_per_second:.0f} frames/s here."
    )
    show(
        "Costs",
        ROOT / "docs" / "costs.md",
        budgets=f"{table('what|time|peak memory', rows)}\n\n{speed} {made_by()}",
    )


SAMPLE_SECONDS = 0.3  # between two measurements of the memory of a notebook's processes


def proportional_bytes(process: psutil.Process) -> int:
    """Return a process's proportional set size (PSS) in bytes; 0 if it has ended."""
    try:
        return process.memory_full_info().pss
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0


def find_kernel(root: psutil.Process) -> psutil.Process | None:
    """Return the Jupyter kernel among the children of a process, if it has started."""
    for process in root.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if any("ipykernel" in part for part in process.cmdline()):
                return process
    return None


def peak_of_all_processes(command: list[str]) -> list[int]:
    """Return the memory of each process of a notebook at the time when their sum is largest."""
    peak: list[int] = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as runner:
        root, kernel = psutil.Process(runner.pid), None
        while runner.poll() is None:
            time.sleep(SAMPLE_SECONDS)
            with contextlib.suppress(psutil.NoSuchProcess):
                kernel = kernel or find_kernel(root)
                processes = [kernel, *kernel.children(recursive=True)] if kernel else []
                sizes = [proportional_bytes(process) for process in processes]
                peak = max(peak, [size for size in sizes if size], key=sum)
    if runner.returncode:
        raise SystemExit(f"exit status {runner.returncode}: {' '.join(command)}")
    return peak


@app.command()
def memory(
    only: Annotated[str, typer.Option(help="first letters of notebooks, such as 03,04")] = "",
    profile: Annotated[str, typer.Option(help="smoke, quick or paper")] = "quick",
    write: Write = None,
) -> None:
    """Measure the peak memory of notebooks, summed over the kernel and the processes it starts.

    Each notebook is executed alone, into an empty folder, and its processes are measured about
    three times a second. Memory that several processes share is counted once. The program that
    executes the notebook, for which a reader has JupyterLab instead, is not counted.
    """
    rows = []
    for notebook in find_notebooks(ROOT / "notebooks", only):
        with tempfile.TemporaryDirectory() as output:
            options = ["--profile", profile, "--device", "cpu", "--only", notebook.stem]
            command = [sys.executable, "-m", "companion", *options, "--output", output]
            peak = sorted(peak_of_all_processes(command), reverse=True)
        parts = " + ".join(f"{size / 2**20:,.0f}" for size in peak if size >= 2**20)
        rows.append([f"`{notebook.stem}`, {profile}", f"{sum(peak) / 2**20:,.0f} MiB", parts])
        print(*rows[-1], flush=True)
    found = table("notebook|memory of all processes|of each, MiB", rows)
    show("Memory of notebooks", write, memory=f"{found}\n\n{made_by()}")


# --- guard and emulation --------------------------------------------------------------------------


class LSTM(nn.Module):
    """A two-layer recurrent cell, and a linear layer on its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTM(64, 256, num_layers=2, batch_first=True), nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.cell(x)[0][:, -1])


class Transformer(nn.Module):
    """Four encoder layers, and a linear layer on the mean of their outputs."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True)
        self.body, self.out = nn.TransformerEncoder(layer, 4), nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.body(x).mean(1))


def image_network(name: str) -> Callable[[], nn.Module]:
    return lambda: getattr(torchvision.models, name)(num_classes=10)


CASES = {
    "resnet18": (image_network("resnet18"), (8, 3, 224, 224)),
    "resnet18, batch 16": (image_network("resnet18"), (16, 3, 224, 224)),
    "mobilenet_v3_small": (image_network("mobilenet_v3_small"), (8, 3, 224, 224)),
    "vit_b_16": (image_network("vit_b_16"), (2, 3, 224, 224)),
    "LSTM": (LSTM, (16, 50, 64)),
    "Transformer encoder": (Transformer, (8, 64, 256)),
    "large: resnet18": (image_network("resnet18"), (256, 3, 224, 224)),
}


def ratios(ways: dict[str, Any], plain: str, other: str) -> list[float]:
    """Return the time of a way divided by that of the plain way, for each round."""
    return [b / a for a, b in zip(ways[plain].seconds, ways[other].seconds, strict=True)]


@app.command()
def guard(
    device: str = "cpu",
    repeats: int = 7,
    only: Annotated[str, typer.Option(help="first letters of the cases to run")] = "",
    write: Write = None,
) -> None:
    """Measure the time of a training step under `gpulab.guard`, relative to the step without it.

    Each step gets its batch from a NumPy array, or from pinned memory if it runs on a GPU.
    """
    setting, rows = gl.Setting.parse(device), []
    for name, (build, shape) in CASES.items():
        if not name.startswith(only) or (device == "cpu" and name.startswith("large")):
            continue
        torch.manual_seed(0)
        array = torch.rand(shape, pin_memory=device != "cpu").numpy()
        step = sgd_step(build().to(device), array, device)

        def guarded(reads: str, step: Step = step) -> None:
            with gl.guard(reads=reads):
                step()

        made = {"without": lambda step=step: step}
        made |= {
            reads: lambda reads=reads, guarded=guarded: partial(guarded, reads)
            for reads in ("backward", "any")
        }
        ways = race(made, setting, repeats, warm_up=2, label=name)
        row = [
            name,
            "×".join(map(str, shape)),
            f"{1000 * statistics.median(ways['without'].seconds):.1f}",
        ]
        for reads in ("backward", "any"):
            found = sorted(ratios(ways, "without", reads))
            row.append(f"{statistics.median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})")
        rows.append(row)
        print(*rows[-1], flush=True)
    steps = table('one step of SGD|input|without, ms|times as long|with reads="any"', rows)
    text = f"{made_by()}\n\n{steps}"
    show("The cost of the guard", write, measured=text)


def pass_over_lines(lines: int) -> float:
    """Return the processor time of two lines in a loop, divided by their number, in seconds."""
    total, started = 0, time.process_time()
    for number in range(lines):
        total += number
    return (time.process_time() - started) / (2 * lines)


@app.command()
def guard_lines(repeats: int = 9, write: Write = None) -> None:
    """Measure the processor time that `gl.guard(reads="any")` adds to a line of the program.

    Lines are measured while arrays are shared with torch: at first, while the guard compares the
    arrays completely, and after the time for that is used up.
    """
    rows = []
    for count, size in ((1, 1 << 14), (1, 1 << 22), (16, 1 << 14), (16, 1 << 20)):
        arrays = [np.zeros(size, np.uint8) for _ in range(count)]
        without = statistics.median(pass_over_lines(10_000) for _ in range(repeats))
        with gl.guard(reads="any"):
            tensors = [torch.from_numpy(array) for array in arrays]
            row: list[Any] = [len(tensors), f"{size:,}"]
            for has_time in (True, False):
                times = []
                for _ in range(repeats):
                    _time_limit.available, _time_limit.has_time = float(has_time), has_time
                    times.append(1e6 * (pass_over_lines(200) - without))
                row.append(f"{statistics.median(times):.1f} ({min(times):.1f} to {max(times):.1f})")
        rows.append(row)
    lines = table("shared arrays|bytes of each|µs for a line|afterwards, µs", rows)
    show("The cost of the guard", write, lines=f"{made_by()}\n\n{lines}")


def sgd_step(net: nn.Module, array: np.ndarray, device: str) -> Step:
    target = torch.zeros(len(array), dtype=torch.long, device=device)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)

    def step() -> None:
        optimizer.zero_grad()
        x = torch.from_numpy(array).to(device, non_blocking=True)
        F.cross_entropy(net(x), target).backward()
        optimizer.step()

    return step


ARITHMETICS: dict[str, dict[str, Any]] = {
    **{name: {"name": name} for name in ("tf32", "bfloat16", "float16", "float8_e4m3fn")},
    "ampere": {"name": CHIPS["ampere"]},  # in TF32, even if this program does not allow it
    "hopper": {"name": CHIPS["hopper"]},
    "split-4": {"order": "split-4"},
}
WINDOW = "PredNet, a window of the quick profile"


def laptop_steps() -> dict[str, Step]:
    """Return training steps of networks of a size that people train on a laptop."""

    def squared(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> Step:
        net, x = make(), torch.randn(shape)
        return lambda: net(x).square().mean().backward()

    steps = {name: squared(*CASES[name]) for name in ("resnet18", "LSTM", "Transformer encoder")}
    frames, images = torch.rand(10, 1, 3, 48, 64), torch.rand(1, 1, 28, 28)
    prednet, autoencoder = (
        gl.models.PredNet(channels=(3, 16, 32), size=(48, 64)),
        gl.models.Autoencoder(),
    )
    steps[WINDOW] = lambda: F.mse_loss(prednet(frames)[0][:-1], frames[1:]).backward()
    steps["autoencoder, one image"] = lambda: F.mse_loss(autoencoder(images), images).backward()
    return steps


def emulated(step: Step, how: dict[str, Any]) -> Step:
    def under() -> None:
        with gl.emulate(**how):
            step()

    return under


@app.command()
def emulation(repeats: int = 9, write: Write = None) -> None:
    """Measure the time of a training step under emulation, relative to a plain step.

    The two take turns, and the result is the median of the paired ratios.
    """
    rows, cpu = [], gl.Setting.parse("cpu")

    def paired(step: Step, ways: dict[str, dict[str, Any]], rounds: int) -> dict[str, Any]:
        made = {"plain": lambda: step} | {
            name: lambda how=how: emulated(step, how) for name, how in ways.items()
        }
        return race(made, cpu, rounds, warm_up=1)

    steps = laptop_steps()
    for name, step in steps.items():
        ways = paired(step, ARITHMETICS, repeats)
        cells = [name, f"{1000 * statistics.median(ways['plain'].seconds):.3g}"]
        for way in ARITHMETICS:
            low, middle, high = quartiles(ratios(ways, "plain", way))
            cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        rows.append(cells)
        print(*cells, flush=True)
    text = (
        f"{machine()}, {repeats}"
        f" pairs.\n\n{table('|'.join(['step', 'plain, ms', *ARITHMETICS]), rows)}"
    )
    show("The cost of emulation", write, measured=text)


if __name__ == "__main__":
    run(app)
