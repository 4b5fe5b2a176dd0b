"""gpulab's Hessian beside curvlinops, hessian-eigenthings and PyHessian: time, memory and accuracy.

    pip install curvlinops-for-pytorch==3.0.1 hessian-eigenthings==1.0.0a5 PyHessian==0.1
    python benchmarks/hessian_speed.py --size quick --record data/hessian_speed/my-cpu.json
    python benchmarks/hessian_speed.py --device cuda --products 40 --steps 10 --record data/hessian_speed/my-gpu.json
    python benchmarks/hessian_speed.py --write benchmarks/hessian_speed.md    # from what is recorded

The loss is that of one window of frames of the PredNet of a profile, in float32 without TF32. Each library is called as
its own documentation does, in a process of its own, and they take turns: a few products each, round after round.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import multiprocessing
import os
import shlex
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor, nn
from tqdm.auto import tqdm

import gpulab as gl
from gpulab.passports import passport
from gpulab.settings import PATIENCE
from gpulab.training.protocol import PROFILES, protocol

RECORDS = Path(__file__).parent.parent / "data" / "hessian_speed"
# Only this benchmark needs them: they are no dependency of gpulab, and imported by name.
PIP = {
    "curvlinops": "curvlinops-for-pytorch==3.0.1",
    "hessian_eigenthings": "hessian-eigenthings==1.0.0a5",
    "pyhessian": "PyHessian==0.1",
}
PROBES = 10
CHECKED = 4  # products compared with float64
ACCURATE = 10  # a peer whose error is more than this many times gpulab's is not compared in speed
READING = f"""Each library is called as its documentation does, in a process of its own, and they take turns. The
loss is that of one window; float32, TF32 off. A product is timed by itself, after a first one that counts as set-up
(as does whatever is compiled or captured for it); the median, and in brackets the quartiles. Memory is what the
process had at most, from the set-up to the end of that work, over the network, the window and the vectors: on a GPU
what tensors took (in brackets, what was reserved for them), on a CPU the resident set. The error is the largest of
{CHECKED} products, relative to float64. *In short* compares with the fastest peer whose error is at most {ACCURATE}
times gpulab's. A density has {PROBES} probes, and the same number of Lanczos steps in every library; curvlinops is
given the spectrum's boundaries, or it would need more products. hessian-eigenthings and PyHessian orthogonalise
each new vector against all before it, curvlinops and gpulab do not.

    python benchmarks/hessian_speed.py --write benchmarks/hessian_speed.md
"""
Quadratures = tuple[np.ndarray, np.ndarray]


class Predictions(nn.Module):
    """PredNet as a function from inputs to outputs, for libraries that ask for one and a loss."""

    def __init__(self, net: gl.PredNet) -> None:
        super().__init__()
        self.net = net

    def forward(self, frames: Tensor) -> Tensor:
        return self.net(frames)[0]


class WindowLoss(nn.Module):
    """The loss of `PredNet.training_loss`, from the predictions and the frames that came."""

    reduction = "sum"  # curvlinops asks: the sum over the window, nothing to average

    def forward(self, predictions: Tensor, frames: Tensor) -> Tensor:
        return (predictions - frames).square().flatten(1).mean(1).sum()


def window_loss(net: gl.PredNet, window: Tensor) -> Tensor:
    return net.training_loss(window, None)[0]


class Gpulab:
    """The operator of this project, with as many vectors at once as it takes by itself."""

    distribution = "gpulab"
    blocks = True
    at_once: int | None = None

    def __init__(self, net: gl.PredNet, window: Tensor) -> None:
        self.H = gl.hessian(net, lambda: window_loss(net, window), at_once=self.at_once)

    def product(self, vectors: Tensor) -> Tensor:
        return self.H @ vectors

    def density(self, probes: int, steps: int) -> Quadratures:
        spectrum = gl.spectral_density(self.H, probes=probes, steps=steps, seed=0, progress=False)
        return spectrum.nodes, spectrum.weights


class OneAtOnce(Gpulab):
    """In as little memory as it can."""

    at_once = 1


class ThreeAtOnce(Gpulab):
    """Between the two."""

    at_once = 3


class Curvlinops:
    """https://curvlinops.readthedocs.io: `jvp` of `jacrev`, under `vmap` for many vectors."""

    distribution = "curvlinops-for-pytorch"
    blocks = True

    def __init__(self, net: gl.PredNet, window: Tensor) -> None:
        self.library = importlib.import_module("curvlinops")
        # Its check that two products are the same is left out: it would make the set-up longer.
        self.H = self.library.HessianLinearOperator(
            Predictions(net),
            WindowLoss(),
            list(net.parameters()),
            [(window[:-1], window[1:])],
            check_deterministic=False,
        )

    def product(self, vectors: Tensor) -> Tensor:
        return self.H @ vectors

    def density(self, probes: int, steps: int) -> Quadratures:
        # Boundaries are for its grid only; found by itself they would take products of their own.
        lanczos = self.library.LanczosApproximateSpectrumCached(self.H, steps, boundaries=(-1.0, 1.0))
        lanczos.approximate_spectrum(num_repeats=probes)
        nodes, vectors = zip(*lanczos._lanczos_iters, strict=True)
        return torch.stack(nodes).cpu().numpy(), torch.stack(vectors)[:, 0].square().cpu().numpy()


class HessianEigenthings:
    """https://noahgolmant.github.io/pytorch-hessian-eigenthings: both backward passes anew for each product."""

    distribution = "hessian-eigenthings"
    blocks = False
    method = "autograd"

    def __init__(self, net: gl.PredNet, window: Tensor) -> None:
        self.library = importlib.import_module("hessian_eigenthings")
        self.H = self.library.HessianOperator(net, [window], window_loss, method=self.method)

    def product(self, vector: Tensor) -> Tensor:
        return self.H @ vector

    def density(self, probes: int, steps: int) -> Quadratures:
        spectrum = self.library.spectral_density(self.H, num_runs=probes, lanczos_steps=steps, seed=0)
        return spectrum.raw_eigenvalues.cpu().numpy(), spectrum.raw_weights.cpu().numpy()


class FiniteDifferences(HessianEigenthings):
    """Its other method: the difference of two gradients, with its own step."""

    method = "finite_difference"


class PyHessian:
    """https://github.com/amirgholami/PyHessian: each product goes back through the kept graph of one gradient."""

    distribution = "PyHessian"
    blocks = False

    def __init__(self, net: gl.PredNet, window: Tensor) -> None:
        self.library = importlib.import_module("pyhessian")
        # It calls torch.eig, which torch no longer has, for a matrix that is symmetric.
        torch.eig = _removed_eig
        self.H = self.library.hessian(
            Predictions(net), WindowLoss(), data=(window[:-1], window[1:]), cuda=window.is_cuda
        )

    def product(self, vector: Tensor) -> list[Tensor]:
        pieces = vector.split([p.numel() for p in self.H.params])
        parts = [piece.view_as(p) for piece, p in zip(pieces, self.H.params, strict=True)]
        self.H.model.zero_grad()
        return self.library.utils.hessian_vector_product(self.H.gradsH, self.H.params, parts)

    def density(self, probes: int, steps: int) -> Quadratures:
        nodes, weights = self.H.density(iter=steps, n_v=probes)
        return np.array(nodes), np.array(weights)


def _removed_eig(matrix: Tensor, eigenvectors: bool) -> tuple[Tensor, Tensor]:
    assert eigenvectors
    values, vectors = torch.linalg.eigh(matrix)
    return torch.stack([values, torch.zeros_like(values)], dim=1), vectors


class Gradient:
    """One gradient, to measure products by."""

    distribution = "torch"
    blocks = False

    def __init__(self, net: gl.PredNet, window: Tensor) -> None:
        self.net, self.window = net, window

    def product(self, _: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(window_loss(self.net, self.window), list(self.net.parameters()))


class GraphedGradient(Gradient):
    """The same, captured in a CUDA graph and replayed."""

    def __init__(self, net: gl.PredNet, window: Tensor) -> None:
        super().__init__(net, window)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                super().product(window)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="relaxed"):
            self.gradient = super().product(window)

    def product(self, _: Tensor) -> tuple[Tensor, ...]:
        self.graph.replay()
        return self.gradient


LIBRARIES: dict[str, Any] = {
    "gpulab": Gpulab,
    "gpulab, three at once": ThreeAtOnce,
    "gpulab, one at once": OneAtOnce,
    "curvlinops": Curvlinops,
    "hessian-eigenthings": HessianEigenthings,
    "hessian-eigenthings, finite differences": FiniteDifferences,
    "PyHessian": PyHessian,
}
GRADIENTS: dict[str, Any] = {"a gradient": Gradient, "a gradient in a CUDA graph": GraphedGradient}
EVERY = LIBRARIES | GRADIENTS


# What follows, up to `measure`, runs in the process of one library.

HERE = SimpleNamespace()


def start(library: str, size: str, frames: int, device: str, vectors: int) -> dict[str, Any]:
    """Make the network, the window and the vectors, the same in every process."""
    warnings.simplefilter("ignore")
    setting = contextlib.ExitStack()
    atexit.register(setting.close)  # which also keeps it: a setting that is forgotten is left
    setting.enter_context(gl.setting("cuda:tf32=off" if device == "cuda" else "cpu"))
    made = EVERY[library]
    plan = protocol("prednet", size)
    net = gl.PredNet(channels=plan.model["channels"], size=plan.size).to(device)
    seen = next(gl.load("walk", frames=frames + 1, size=plan.size).windows(frames, 0)).frames
    HERE.net, HERE.made, HERE.device = net, made, device
    HERE.window = torch.from_numpy(seen / np.float32(255))[:, None].to(device)
    n = sum(p.numel() for p in net.parameters())
    HERE.vectors = _unit_vectors(vectors, n).to(device)
    HERE.turn = itertools.cycle(range(vectors))
    for module in PIP:
        if made.distribution in PIP[module]:
            importlib.import_module(module)
    # gpulab may run from its folder, without having been installed.
    version = gl.__version__ if issubclass(made, Gpulab) else importlib.metadata.version(made.distribution)
    _load_kernels(device)
    HERE.baseline = _memory(reset=True)
    return {
        "parameters": n,
        "version": version,
        "threads": torch.get_num_threads(),
    }


def _unit_vectors(count: int, n: int) -> Tensor:
    """(count, n) vectors of length one, as Lanczos multiplies: a finite difference goes as far as they are long."""
    vectors = torch.randn(count, n, generator=torch.Generator().manual_seed(0))
    return vectors.div_(vectors.norm(dim=1, keepdim=True))  # in place: what is left over would be in the baseline


def set_up() -> float:
    """Seconds until the first product is there."""

    def first() -> None:
        HERE.library = HERE.made(HERE.net, HERE.window)
        HERE.library.product(HERE.vectors[0])

    return _seconds(first)


def products(count: int) -> list[float]:
    return [_seconds(lambda v: HERE.library.product(v), HERE.vectors[next(HERE.turn)]) for _ in range(count)]


def block(count: int) -> list[float]:
    """One product with `count` vectors at once."""
    return [_seconds(lambda v: HERE.library.product(v), HERE.vectors[:count].T.contiguous())]


def density(probes: int, steps: int) -> dict[str, Any]:
    """The seconds of one density, and what it says of the spectrum."""
    torch.manual_seed(0)
    found: list[Quadratures] = []
    seconds = _seconds(lambda: found.append(HERE.library.density(probes, steps)))
    nodes, weights = (np.asarray(part, dtype=np.float64) for part in found[0])
    moments = {}
    for name, power in (("mean", 1), ("square", 2)):
        of_probes = (weights * nodes**power).sum(1)
        moments[name] = [float(of_probes.mean()), float(of_probes.std(ddof=1) / len(of_probes) ** 0.5)]
    return {"seconds": seconds, "lowest": float(nodes.min()), "highest": float(nodes.max()), **moments}


def peak() -> dict[str, int]:
    """Bytes over those of the network, the window and the vectors, at most since the process started to measure."""
    return {name: value - HERE.baseline[name] for name, value in _memory().items()}


def exact_products(file: str) -> None:
    """Products in float64, by two backward passes through the whole loss."""
    net, window = HERE.net.double(), HERE.window.double()
    parameters = list(net.parameters())
    exact = []
    for vector in HERE.vectors[:CHECKED].double():
        parts = vector.split([p.numel() for p in parameters])
        gradients = torch.autograd.grad(window_loss(net, window), parameters, create_graph=True)
        inner = sum((g * part.view_as(g)).sum() for g, part in zip(gradients, parts, strict=True))
        exact.append(_flat(torch.autograd.grad(inner, parameters)))
    np.save(file, torch.stack(exact).cpu().numpy(), allow_pickle=False)


def error(file: str) -> float:
    """The largest relative error ‖Hv − exact‖ / ‖exact‖ of the first products."""
    exact = torch.from_numpy(np.load(file, allow_pickle=False)).to(HERE.device)
    found = torch.stack([_flat(HERE.library.product(v)).double() for v in HERE.vectors[:CHECKED]])
    return float(((found - exact).norm(dim=1) / exact.norm(dim=1)).max())


def _flat(result: Tensor | tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    return result if isinstance(result, Tensor) else torch.cat([part.reshape(-1) for part in result])


def _seconds(work: Callable[..., object], *arguments: Any) -> float:
    _wait()
    started = time.perf_counter()
    work(*arguments)
    _wait()
    return time.perf_counter() - started


def _wait() -> None:
    if HERE.device == "cuda":
        torch.cuda.synchronize()


def _load_kernels(device: str) -> None:
    """A small product, so that the code that torch loads at first use is not counted as a library's memory."""
    net, window = gl.PredNet(channels=(3, 4, 4), size=(8, 8)).to(device), torch.rand(3, 1, 3, 8, 8, device=device)
    parameters = list(net.parameters())
    gradients = torch.autograd.grad(window_loss(net, window), parameters, create_graph=True)
    torch.autograd.grad(sum(g.sum() for g in gradients), parameters)


def _memory(reset: bool = False) -> dict[str, int]:
    """Bytes now at most: on a GPU what tensors took, and what the process held for them; else the resident set."""
    if HERE.device == "cuda":
        if reset:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    status = Path("/proc/self/status")
    if not status.exists():  # what only Linux has
        return {}
    if reset:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return {"resident": int(lines["VmHWM"].split()[0]) * 1024}


# From here on: the process that asks the others, one at a time.


class Library:
    """A process that measures one library; what fails is noted, and not asked for again."""

    def __init__(self, name: str, size: str, frames: int, device: str, vectors: int) -> None:
        self.row: dict[str, Any] = {"library": name, "size": size, "frames": frames, "failed": {}, "memory": {}}
        self.process = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        self.started = self.process.submit(start, name, size, frames, device, vectors)

    def ask(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        if what in self.row["failed"] or "set_up" in self.row["failed"]:
            return None
        try:
            return self.process.submit(function, *arguments).result()
        except Exception as problem:  # whatever a library raises: the others are still to be measured
            self.row["failed"][what] = f"{type(problem).__name__}: {str(problem).splitlines()[0][:200]}"
            return None


def measure(
    size: str, frames: int, device: str, names: list[str], *, count: int, blocks: list[int], steps: int, rounds: dict
) -> list[dict[str, Any]]:
    """The rows of one size: every library, in turns."""
    libraries = [Library(name, size, frames, device, max(10, *blocks)) for name in names]
    try:
        for library in libraries:
            library.row |= library.started.result()
        _in_turns(libraries, count, blocks, steps, rounds)
        _compare_with_float64(libraries)
    finally:
        for library in libraries:
            library.process.shutdown(cancel_futures=True)
    return [library.row for library in libraries]


def _in_turns(libraries: list[Library], count: int, blocks: list[int], steps: int, rounds: dict) -> None:
    operators = [library for library in libraries if library.row["library"] in LIBRARIES]
    takers = [library for library in operators if LIBRARIES[library.row["library"]].blocks]
    some = max(1, count // rounds["products"])
    turns = len(libraries) * (1 + rounds["products"]) + len(operators) * rounds["density"]
    bar = tqdm(total=turns + len(takers) * len(blocks) * (1 + rounds["blocks"]), unit="turn")

    def taking_turns(which: list[Library], times: int) -> Iterator[Library]:
        for number in range(times):
            first = number % max(1, len(which))
            for library in which[first:] + which[:first]:
                bar.set_postfix_str(f"{library.row['size']}, {library.row['library']}")
                yield library
                bar.update()

    with bar:
        for library in taking_turns(libraries, 1):
            library.row["set_up"] = library.ask("set_up", set_up)
            library.ask("products", products, 1)
        for library in taking_turns(libraries, rounds["products"]):
            library.row.setdefault("products", []).extend(library.ask("products", products, some) or [])
        _note_peaks(libraries, "products")
        for library in taking_turns(operators, rounds["density"]):
            library.row.setdefault("densities", []).append(library.ask("density", density, PROBES, steps))
            library.row["steps"] = steps
        _note_peaks(operators, "density")
        for k in blocks:
            for number in range(1 + rounds["blocks"]):
                for library in taking_turns(takers, 1):
                    seconds = library.ask(f"block {k}", block, k) or []
                    part = library.row.setdefault("blocks", {}).setdefault(str(k), {"first": None, "seconds": []})
                    if number == 0:
                        part["first"] = seconds[0] if seconds else None
                    else:
                        part["seconds"].extend(seconds)
            _note_peaks(takers, f"block {k}")


def _note_peaks(libraries: list[Library], what: str) -> None:
    for library in libraries:
        library.row["memory"][what] = library.ask(what, peak)  # nothing where that work failed


def _compare_with_float64(libraries: list[Library]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "exact.npy")
        gradient = next(library for library in libraries if library.row["library"] == "a gradient")
        gradient.ask("exact", exact_products, file)
        for library in libraries:
            if library.row["library"] in LIBRARIES:
                library.row["error"] = library.ask("error", error, file)


def table(records: list[dict[str, Any]]) -> str:
    """The page: in short, then every size on every machine."""
    parts = [(record, size) for record in records for size in dict.fromkeys(row["size"] for row in record["rows"])]
    short = [
        "| machine | PredNet | as | what | gpulab, s | fastest peer, s | times as fast | of its memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for record, size in parts:
        rows = [row for row in record["rows"] if row["size"] == size]
        short += [f"| {_machine(record)} | {size}, {rows[0]['frames']} frames | {line} |" for line in _in_short(rows)]
    details = [_details(record, [row for row in record["rows"] if row["size"] == size]) for record, size in parts]
    return "\n".join(["# A Hessian's products and spectrum, beside other libraries", "", READING, *short, *details])


def _in_short(rows: list[dict[str, Any]]) -> list[str]:
    """What gpulab and the fastest peer of the same accuracy need for the same work."""
    operators = [row for row in rows if row["library"] in LIBRARIES]
    ours = [row for row in operators if issubclass(LIBRARIES[row["library"]], Gpulab) and row.get("error") is not None]
    lines = []
    for own in ours:
        peers = [row for row in operators if not issubclass(LIBRARIES[row["library"]], Gpulab)]
        peers = [row for row in peers if (row.get("error") or np.inf) <= ACCURATE * own["error"]]
        for what, cost in COSTS.items():
            mine = cost(own)
            others = [(*cost(row), row["library"]) for row in peers if cost(row)]
            if mine and others:
                seconds, memory, name = min(others)
                share = mine[1] / memory if memory else np.nan
                cells = f"{what} | {mine[0]:.3g} | {seconds:.3g} ({name}) | {seconds / mine[0]:.2f} | {share:.2f}"
                lines.append(f"{own['library']} | {cells}")
    return lines


def _one_at_a_time(row: dict[str, Any]) -> tuple[float, float] | None:
    """(seconds, peak bytes) of 100 products."""
    if not row.get("products"):
        return None
    return 100 * statistics.median(row["products"]), _peak(row, "products")


def _with_set_up(row: dict[str, Any]) -> tuple[float, float] | None:
    if not row.get("products"):
        return None
    return row["set_up"] + 99 * statistics.median(row["products"]), _peak(row, "products")


def _the_faster_way(row: dict[str, Any]) -> tuple[float, float] | None:
    """One at a time, or in blocks of the best size measured."""
    ways = [_one_at_a_time(row)] if row.get("products") else []
    for k, part in row.get("blocks", {}).items():
        if part["seconds"]:
            ways.append((100 / int(k) * statistics.median(part["seconds"]), _peak(row, f"block {k}")))
    return min(ways, default=None)


def _density(row: dict[str, Any]) -> tuple[float, float] | None:
    made = [found["seconds"] for found in row.get("densities", []) if found]
    return (statistics.median(made), _peak(row, "density")) if made else None


COSTS = {
    "100 products, one at a time": _one_at_a_time,
    "the same and the set-up": _with_set_up,
    "100 products, one at a time or in blocks": _the_faster_way,
    "a density": _density,
}


def _peak(row: dict[str, Any], what: str) -> float:
    memory = row["memory"].get(what) or {}
    return float(memory.get("allocated", memory.get("resident", np.nan)))


def _machine(record: dict[str, Any]) -> str:
    if record["device"] == "cuda":
        return record["passport"]["gpus"][0]["name"]
    return f"{record['passport']['cpu']['model']}, {record['rows'][0]['threads']} threads"


def _details(record: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    gradients = {row["library"]: row for row in rows if row["library"] in GRADIENTS}
    gradient = statistics.median(gradients["a gradient"]["products"])
    sizes = list(dict.fromkeys(k for row in rows for k in row.get("blocks", {})))
    steps = next((row["steps"] for row in rows if "steps" in row), 0)
    title = (
        f"PredNet of the {rows[0]['size']} profile, {rows[0]['frames']} frames, {rows[0]['parameters']:,} parameters"
    )
    heads = ["library", "set-up, s", "a product, ms", "of a gradient"]
    heads += [f"in blocks of {k}, ms each" for k in sizes]
    heads += [
        f"density, {steps} steps, s",
        "peak, MiB: products",
        "density",
        *[f"blocks of {k}" for k in sizes],
        "error",
    ]
    lines = [
        f"\n## {_machine(record)}: {title}",
        f"torch {record['passport']['software']['torch']}, `{record['command']}`",
    ]
    lines += ["", f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for row in rows:
        peaks = [
            _mebibytes(row, "products"),
            _mebibytes(row, "density"),
            *[_mebibytes(row, f"block {k}") for k in sizes],
        ]
        made = row.get("products") or []
        cells = [f"{row['library']} {row['version']}" if row["library"] in LIBRARIES else row["library"]]
        cells += [_number(row["set_up"]), _spread(made), f"{statistics.median(made) / gradient:.2f}" if made else ""]
        for k in sizes:
            part = row.get("blocks", {}).get(k, {"seconds": []})["seconds"]
            cells.append(_spread([seconds / int(k) for seconds in part]))
        cells += [_spread([found["seconds"] for found in row.get("densities", []) if found], 1)]
        lines.append(f"| {' | '.join([*cells, *peaks, _number(row.get('error'), '.1e')])} |")
    lines += ["", f"What the densities say (mean ± standard error over {PROBES} probes, each library's own):", ""]
    lines += ["| library | lowest | highest | mean eigenvalue | mean of its square |", "|---|---|---|---|---|"]
    for row in rows:
        for found in [found for found in row.get("densities", []) if found][:1]:
            means = [f"{found[name][0]:.4g} ± {found[name][1]:.1g}" for name in ("mean", "square")]
            lines.append(f"| {row['library']} | {found['lowest']:.5g} | {found['highest']:.5g} | {' | '.join(means)} |")
    failures = [f"{row['library']}, {what}: {why}" for row in rows for what, why in row["failed"].items()]
    return "\n".join(lines + [""] * bool(failures) + [f"- {failure}" for failure in failures])


def _spread(seconds: list[float], scale: float = 1000) -> str:
    """The median, and the quartiles where there are four values or more."""
    if not seconds:
        return ""
    middle = f"{scale * statistics.median(seconds):.3g}"
    if len(seconds) < 4:
        return middle
    low, _, high = statistics.quantiles(seconds, n=4)
    return f"{middle} ({scale * low:.3g} to {scale * high:.3g})"


def _number(value: float | None, form: str = ".3g") -> str:
    return "" if value is None else format(value, form)


def _mebibytes(row: dict[str, Any], what: str) -> str:
    """The peak, and on a GPU in brackets what was held for it."""
    memory = row["memory"].get(what)
    if not memory:
        return ""
    return " ".join(
        f"{size / 2**20:.0f}" if name != "reserved" else f"({size / 2**20:.0f})" for name, size in memory.items()
    )


def _checked(device: str, sizes: list[str], wanted: list[str]) -> list[str]:
    """The libraries to measure and the gradients to measure them by; leaves with a line if that cannot be."""
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        sys.exit(f"--device {device}: expected cpu, or cuda where there is a GPU of NVIDIA's")
    if unknown := set(sizes) - set(PROFILES):
        sys.exit(f"--size {unknown.pop()}: expected one of {', '.join(PROFILES)}")
    if unknown := set(wanted) - set(LIBRARIES):
        sys.exit(f"--only {unknown.pop()}: expected one of {'; '.join(LIBRARIES)}")
    if missing := [module for module in PIP if importlib.util.find_spec(module) is None]:
        sys.exit(f"{', '.join(missing)} cannot be imported: pip install {' '.join(PIP.values())}")
    return [*wanted, *(name for name in GRADIENTS if device == "cuda" or "CUDA" not in name)]


def _command(record: Path) -> str:
    """How this process was called, with the record where records are kept."""
    kept = str(Path("data") / RECORDS.name / record.name)
    return shlex.join(["python", *[kept if word == str(record) else word for word in sys.argv]])


def main(
    size: Annotated[list[str] | None, typer.Option(help="the PredNet of these profiles")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    frames: Annotated[int, typer.Option(help="frames in the window")] = 20,
    products: Annotated[int, typer.Option(help="products timed one at a time, of each library")] = 100,
    block: Annotated[list[int] | None, typer.Option(help="vectors multiplied at once")] = None,
    steps: Annotated[int, typer.Option(min=2, help="Lanczos steps of each of the density's ten probes")] = 30,
    rounds: Annotated[int, typer.Option(help="in how many turns the products are made")] = 10,
    densities: Annotated[int, typer.Option(help="how many densities of each library")] = 1,
    only: Annotated[list[str] | None, typer.Option(help="these libraries alone")] = None,
    record: Annotated[Path | None, typer.Option(help="measure, and keep it in this file")] = None,
    write: Annotated[Path | None, typer.Option(help="write the table of all records to this file")] = None,
) -> None:
    """Measure with `--record`; else print the table of what is recorded."""
    if record is not None:
        sizes = size or ["quick", "paper"]
        names = _checked(device, sizes, only or list(LIBRARIES))
        os.environ.update({**PATIENCE, **os.environ})
        rows: list[dict[str, Any]] = []
        for one in sizes:
            turns = {"products": min(rounds, products), "blocks": 5, "density": densities}
            rows += measure(one, frames, device, names, count=products, blocks=block or [10], steps=steps, rounds=turns)
            kept = {"format": 1, "command": _command(record), "device": device, "passport": passport(), "rows": rows}
            record.parent.mkdir(parents=True, exist_ok=True)
            record.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    files = sorted({file.resolve() for file in [*RECORDS.glob("*.json"), *([record] if record else [])]})
    text = table([json.loads(file.read_text(encoding="utf-8")) for file in files])
    print(text)
    if write is not None:
        write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
