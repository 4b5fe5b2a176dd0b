"""gpulab's Hessian beside curvlinops, hessian-eigenthings and PyHessian: time, memory and accuracy.

    pip install curvlinops-for-pytorch==3.0.1 hessian-eigenthings==1.0.0a5 PyHessian==0.1
    python benchmarks/hessian_speed.py --size quick --record data/measured/hessian_speed-my-cpu.json
    python benchmarks/hessian_speed.py --device cuda --steps 10 --record data/measured/hessian_speed-my-gpu.json
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
import multiprocessing
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
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
from gpulab.store import records
from gpulab.training.protocol import PROFILES, protocol

RECORDS = Path(__file__).parent.parent / "data" / "measured"
# Only this benchmark needs them: they are no dependency of gpulab, and imported by name.
PIP = {  # distribution -> module, version
    "curvlinops-for-pytorch": ("curvlinops", "3.0.1"),
    "hessian-eigenthings": ("hessian_eigenthings", "1.0.0a5"),
    "PyHessian": ("pyhessian", "0.1"),
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

    def __init__(self, net: gl.models.PredNet) -> None:
        super().__init__()
        self.net = net

    def forward(self, frames: Tensor) -> Tensor:
        return self.net(frames)[0]


class WindowLoss(nn.Module):
    """The loss of `PredNet.training_loss`, from the predictions and the frames that came."""

    reduction = "sum"  # curvlinops asks: the sum over the window, nothing to average

    def forward(self, predictions: Tensor, frames: Tensor) -> Tensor:
        return (predictions - frames).square().flatten(1).mean(1).sum()


def window_loss(net: gl.models.PredNet, window: Tensor) -> Tensor:
    return net.training_loss(window, None)[0]


class Operator:
    """A library's Hessian: made of a network and a window; `blocks` says whether it multiplies many vectors at once."""

    distribution: str
    blocks = False
    H: Any

    def product(self, vectors: Tensor) -> Any:
        return self.H @ vectors


class Gpulab(Operator):
    """The operator of this project."""

    distribution = "gpulab"
    blocks = True

    def __init__(self, net: gl.models.PredNet, window: Tensor, at_once: int | None = None) -> None:
        self.H = gl.hessian(net, lambda: window_loss(net, window), at_once=at_once)

    def density(self, probes: int, steps: int) -> Quadratures:
        spectrum = gl.saddles.spectral_density(self.H, probes=probes, steps=steps, seed=0, progress=False)
        return spectrum.nodes, spectrum.weights


class Curvlinops(Operator):
    """https://curvlinops.readthedocs.io: `jvp` of `jacrev`, under `vmap` for many vectors."""

    distribution = "curvlinops-for-pytorch"
    blocks = True

    def __init__(self, net: gl.models.PredNet, window: Tensor) -> None:
        self.library = importlib.import_module("curvlinops")
        model, parameters, data = Predictions(net), list(net.parameters()), [(window[:-1], window[1:])]
        # Its check that two products are the same is left out: it would make the set-up longer.
        self.H = self.library.HessianLinearOperator(model, WindowLoss(), parameters, data, check_deterministic=False)

    def density(self, probes: int, steps: int) -> Quadratures:
        # Boundaries are for its grid only; found by itself they would take products of their own.
        lanczos = self.library.LanczosApproximateSpectrumCached(self.H, steps, boundaries=(-1.0, 1.0))
        lanczos.approximate_spectrum(num_repeats=probes)
        nodes, vectors = zip(*lanczos._lanczos_iters, strict=True)
        return torch.stack(nodes).cpu().numpy(), torch.stack(vectors)[:, 0].square().cpu().numpy()


class HessianEigenthings(Operator):
    """https://noahgolmant.github.io/pytorch-hessian-eigenthings: both backward passes anew for each product.

    Its other method, finite differences: the difference of two gradients, with its own step.
    """

    distribution = "hessian-eigenthings"

    def __init__(self, net: gl.models.PredNet, window: Tensor, method: str = "autograd") -> None:
        self.library = importlib.import_module("hessian_eigenthings")
        self.H = self.library.HessianOperator(net, [window], window_loss, method=method)

    def density(self, probes: int, steps: int) -> Quadratures:
        spectrum = self.library.spectral_density(self.H, num_runs=probes, lanczos_steps=steps, seed=0)
        return spectrum.raw_eigenvalues.cpu().numpy(), spectrum.raw_weights.cpu().numpy()


class PyHessian(Operator):
    """https://github.com/amirgholami/PyHessian: each product goes back through the kept graph of one gradient."""

    distribution = "PyHessian"

    def __init__(self, net: gl.models.PredNet, window: Tensor) -> None:
        self.library = importlib.import_module("pyhessian")
        torch.eig = _removed_eig  # it calls what torch no longer has, for a matrix that is symmetric
        data = window[:-1], window[1:]
        self.H = self.library.hessian(Predictions(net), WindowLoss(), data=data, cuda=window.is_cuda)

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


class Gradient(Operator):
    """One gradient, to measure products by; also captured in a CUDA graph and replayed."""

    distribution = "torch"

    def __init__(self, net: gl.models.PredNet, window: Tensor, graphed: bool = False) -> None:
        self.net, self.window, self.graph = net, window, torch.cuda.CUDAGraph() if graphed else None
        if self.graph is not None:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self.gradient()
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(self.graph, capture_error_mode="relaxed"):
                self.captured = self.gradient()

    def gradient(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(window_loss(self.net, self.window), list(self.net.parameters()))

    def product(self, _: Tensor) -> tuple[Tensor, ...]:
        if self.graph is None:
            return self.gradient()
        self.graph.replay()
        return self.captured


LIBRARIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpulab": (Gpulab, {}),
    "gpulab, three at once": (Gpulab, {"at_once": 3}),
    "gpulab, one at once": (Gpulab, {"at_once": 1}),  # in as little memory as it can
    "curvlinops": (Curvlinops, {}),
    "hessian-eigenthings": (HessianEigenthings, {}),
    "hessian-eigenthings, finite differences": (HessianEigenthings, {"method": "finite_difference"}),
    "PyHessian": (PyHessian, {}),
}
GRADIENTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "a gradient": (Gradient, {}),
    "a gradient in a CUDA graph": (Gradient, {"graphed": True}),
}


# What follows, up to `measure`, runs in the process of one library.

HERE = SimpleNamespace()


def start(library: str, size: str, frames: int, device: str, vectors: int) -> dict[str, Any]:
    """Make the network, the window and the vectors, the same in every process."""
    warnings.simplefilter("ignore")
    setting = contextlib.ExitStack()
    atexit.register(setting.close)  # which also keeps it: a setting that is forgotten is left
    setting.enter_context(gl.setting("cuda:tf32=off" if device == "cuda" else "cpu"))
    plan = protocol("prednet", size)
    net = gl.models.PredNet(channels=plan.model["channels"], size=plan.size).to(device)
    film = next(gl.load("walk", frames=frames + 1, size=plan.size).windows(frames, 0)).frames
    HERE.net, HERE.device = net, device
    HERE.window = torch.from_numpy(film / np.float32(255))[:, None].to(device)
    n = sum(p.numel() for p in net.parameters())
    # Of length one, as Lanczos multiplies: a finite difference goes as far as they are long.
    HERE.vectors = torch.randn(vectors, n, generator=torch.Generator().manual_seed(0))
    HERE.vectors = HERE.vectors.div_(HERE.vectors.norm(dim=1, keepdim=True)).to(device)  # nothing left over to count
    HERE.turn = itertools.cycle(range(vectors))
    HERE.operator, HERE.options = (LIBRARIES | GRADIENTS)[library]
    distribution = HERE.operator.distribution
    if distribution in PIP:
        importlib.import_module(PIP[distribution][0])
    # A small product, so that the code that torch loads at first use is not counted as a library's memory.
    tiny, window = (
        gl.models.PredNet(channels=(3, 4, 4), size=(8, 8)).to(device),
        torch.rand(3, 1, 3, 8, 8, device=device),
    )
    gradients = torch.autograd.grad(window_loss(tiny, window), list(tiny.parameters()), create_graph=True)
    torch.autograd.grad(sum(g.sum() for g in gradients), list(tiny.parameters()))
    del tiny, window, gradients
    HERE.baseline = _memory(reset=True)
    # gpulab may run from its folder, without having been installed.
    version = gl.__version__ if distribution == "gpulab" else importlib.metadata.version(distribution)
    return {"parameters": n, "version": version, "threads": torch.get_num_threads()}


def set_up() -> float:
    """Seconds until the first product is there."""

    def first() -> None:
        HERE.library = HERE.operator(HERE.net, HERE.window, **HERE.options)
        HERE.library.product(HERE.vectors[0])

    return _seconds(first)


def products(count: int) -> list[float]:
    return [_seconds(HERE.library.product, HERE.vectors[next(HERE.turn)]) for _ in range(count)]


def block(count: int) -> float:
    """Seconds of one product with `count` vectors at once."""
    return _seconds(HERE.library.product, HERE.vectors[:count].T.contiguous())


def density(probes: int, steps: int) -> dict[str, Any]:
    """The seconds of one density, and what it says of the spectrum."""
    torch.manual_seed(0)
    quadratures: list[Quadratures] = []
    seconds = _seconds(lambda: quadratures.append(HERE.library.density(probes, steps)))
    nodes, weights = (np.asarray(part, dtype=np.float64) for part in quadratures[0])
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
    parameters, exact = list(net.parameters()), []
    for vector in HERE.vectors[:CHECKED].double():
        parts = vector.split([p.numel() for p in parameters])
        gradients = torch.autograd.grad(window_loss(net, window), parameters, create_graph=True)
        inner = sum((g * part.view_as(g)).sum() for g, part in zip(gradients, parts, strict=True))
        exact.append(_flat(torch.autograd.grad(inner, parameters)))
    np.save(file, torch.stack(exact).cpu().numpy(), allow_pickle=False)


def error(file: str) -> float:
    """The largest relative error ‖Hv − exact‖ / ‖exact‖ of the first products."""
    exact = torch.from_numpy(np.load(file, allow_pickle=False)).to(HERE.device)
    made = torch.stack([_flat(HERE.library.product(v)).double() for v in HERE.vectors[:CHECKED]])
    return float(((made - exact).norm(dim=1) / exact.norm(dim=1)).max())


def _flat(result: Tensor | Sequence[Tensor]) -> Tensor:
    return result if isinstance(result, Tensor) else torch.cat([part.reshape(-1) for part in result])


def _seconds(work: Callable[..., object], *arguments: Any) -> float:
    wait = torch.cuda.synchronize if HERE.device == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    work(*arguments)
    wait()
    return time.perf_counter() - started


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
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "exact.npy")
            next(library for library in libraries if library.row["library"] == "a gradient").ask(
                "exact", exact_products, file
            )
            for library in libraries:
                if library.row["library"] in LIBRARIES:
                    library.row["error"] = library.ask("error", error, file)
    finally:
        for library in libraries:
            library.process.shutdown(cancel_futures=True)
    return [library.row for library in libraries]


def _in_turns(libraries: list[Library], count: int, blocks: list[int], steps: int, rounds: dict) -> None:
    operators = [library for library in libraries if library.row["library"] in LIBRARIES]
    takers = [library for library in operators if LIBRARIES[library.row["library"]][0].blocks]
    turns = len(libraries) * (1 + rounds["products"]) + len(operators) * rounds["density"]
    bar = tqdm(total=turns + len(takers) * len(blocks) * (1 + rounds["blocks"]), unit="turn")

    def taking_turns(which: list[Library], times: int, peak_of: str = "") -> Iterator[Library]:
        for number in range(times):
            first = number % max(1, len(which))
            for library in which[first:] + which[:first]:
                bar.set_postfix_str(f"{library.row['size']}, {library.row['library']}")
                yield library
                bar.update()
        for library in which if peak_of else []:
            library.row["memory"][peak_of] = library.ask(peak_of, peak)  # nothing where that work failed

    with bar:
        for library in taking_turns(libraries, 1):
            library.row["set_up"] = library.ask("set_up", set_up)
            library.ask("products", products, 1)
        for library in taking_turns(libraries, rounds["products"], "products"):
            seconds = library.ask("products", products, max(1, count // rounds["products"]))
            library.row.setdefault("products", []).extend(seconds or [])
        for library in taking_turns(operators, rounds["density"], "density"):
            library.row.setdefault("densities", []).append(library.ask("density", density, PROBES, steps))
            library.row["steps"] = steps
        for k in blocks:
            for library in taking_turns(takers, 1):
                first = library.ask(f"block {k}", block, k)
                library.row.setdefault("blocks", {})[str(k)] = {"first": first, "seconds": []}
            for library in taking_turns(takers, rounds["blocks"], f"block {k}"):
                if (seconds := library.ask(f"block {k}", block, k)) is not None:
                    library.row["blocks"][str(k)]["seconds"].append(seconds)


def table(records: list[dict[str, Any]]) -> str:
    """The page: in short, then every size on every machine."""
    short, details = [], []
    for record in records:
        for size in dict.fromkeys(row["size"] for row in record["rows"]):
            rows = [row for row in record["rows"] if row["size"] == size]
            place = f"{_machine(record)} | {size}, {rows[0]['frames']} frames"
            short += [f"| {place} | {line} |" for line in _in_short(rows)]
            details += _details(record, rows)
    heads = "machine | PredNet | as | what | gpulab, s | fastest peer, s | times as fast | of its memory"
    title = "# A Hessian's products and spectrum, beside other libraries"
    return "\n".join([title, "", READING, *_heads(heads.split(" | ")), *short, *details])


def _heads(names: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]


def _in_short(rows: list[dict[str, Any]]) -> list[str]:
    """What gpulab and the fastest peer of the same accuracy need for the same work."""
    own = [row for row in rows if row["library"].startswith("gpulab") and row.get("error") is not None]
    others = [row for row in rows if row["library"] in LIBRARIES and not row["library"].startswith("gpulab")]
    lines = []
    for row in own:
        peers = [peer for peer in others if (peer.get("error") or np.inf) <= ACCURATE * row["error"]]
        costs_of_peers = [(_costs(peer), peer["library"]) for peer in peers]
        for what, (seconds, memory) in _costs(row).items():
            if all_costs := [(*costs[what], name) for costs, name in costs_of_peers if what in costs]:
                least, its_memory, name = min(all_costs)
                share = memory / its_memory if its_memory else np.nan
                cells = f"{what} | {seconds:.3g} | {least:.3g} ({name}) | {least / seconds:.2f} | {share:.2f}"
                lines.append(f"{row['library']} | {cells}")
    return lines


def _costs(row: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """(seconds, peak bytes) of each kind of work that was measured."""

    def cost(seconds: float, work: str) -> tuple[float, float]:
        memory = row["memory"].get(work) or {}
        return seconds, float(memory.get("allocated", memory.get("resident", np.nan)))

    costs = {}
    ways = [
        cost(100 / int(k) * statistics.median(part["seconds"]), f"block {k}")
        for k, part in row.get("blocks", {}).items()
        if part["seconds"]
    ]
    if row.get("products"):
        each = statistics.median(row["products"])
        costs["100 products, one at a time"] = cost(100 * each, "products")
        costs["the same and the set-up"] = cost(row["set_up"] + 99 * each, "products")
        ways.insert(0, costs["100 products, one at a time"])
    if ways:
        costs["100 products, one at a time or in blocks"] = min(ways)
    if densities := _densities(row):
        costs["a density"] = cost(statistics.median(made["seconds"] for made in densities), "density")
    return costs


def _densities(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [made for made in row.get("densities", []) if made]


def _machine(record: dict[str, Any]) -> str:
    if record["device"] == "cuda":
        return record["passport"]["gpus"][0]["name"]
    return f"{record['passport']['cpu']['model']}, {record['rows'][0]['threads']} threads"


def _details(record: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    gradient = next(statistics.median(row["products"]) for row in rows if row["library"] == "a gradient")
    sizes = list(dict.fromkeys(k for row in rows for k in row.get("blocks", {})))
    steps = next((row["steps"] for row in rows if "steps" in row), 0)
    of = f"{rows[0]['size']} profile, {rows[0]['frames']} frames, {rows[0]['parameters']:,} parameters"
    heads = ["library", "set-up, s", "a product, ms", "of a gradient"]
    heads += [f"in blocks of {k}, ms each" for k in sizes]
    heads += [f"density, {steps} steps, s", "peak, MiB: products", "density", *[f"blocks of {k}" for k in sizes]]
    lines = [
        f"\n## {_machine(record)}: PredNet of the {of}",
        f"torch {record['passport']['software']['torch']}, `{record['command']}`",
        "",
        *_heads([*heads, "error"]),
    ]
    for row in rows:
        made = row.get("products") or []
        cells = [f"{row['library']} {row['version']}" if row["library"] in LIBRARIES else row["library"]]
        cells += [_number(row["set_up"]), _spread(made), f"{statistics.median(made) / gradient:.2f}" if made else ""]
        for k in sizes:
            part = row.get("blocks", {}).get(k, {"seconds": []})["seconds"]
            cells.append(_spread([seconds / int(k) for seconds in part]))
        cells.append(_spread([density["seconds"] for density in _densities(row)], 1))
        cells += [_mebibytes(row, what) for what in ("products", "density", *[f"block {k}" for k in sizes])]
        lines.append(f"| {' | '.join([*cells, _number(row.get('error'), '.1e')])} |")
    lines += ["", f"What the densities say (mean ± standard error over {PROBES} probes, each library's own):", ""]
    lines += _heads(["library", "lowest", "highest", "mean eigenvalue", "mean of its square"])
    for row in rows:
        for made in _densities(row)[:1]:
            means = [f"{made[name][0]:.4g} ± {made[name][1]:.1g}" for name in ("mean", "square")]
            lines.append(f"| {row['library']} | {made['lowest']:.5g} | {made['highest']:.5g} | {' | '.join(means)} |")
    failures = [f"- {row['library']}, {what}: {why}" for row in rows for what, why in row["failed"].items()]
    return lines + [""] * bool(failures) + failures


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
    sizes = {name: f"{size / 2**20:.0f}" for name, size in (row["memory"].get(what) or {}).items()}
    return " ".join(f"({size})" if name == "reserved" else size for name, size in sizes.items())


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
        sizes, wanted = size or ["quick", "paper"], only or list(LIBRARIES)
        if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
            sys.exit(f"--device {device}: expected cpu, or cuda where there is a GPU of NVIDIA's")
        if unknown := set(sizes) - set(PROFILES):
            sys.exit(f"--size {unknown.pop()}: expected one of {', '.join(PROFILES)}")
        if unknown := set(wanted) - set(LIBRARIES):
            sys.exit(f"--only {unknown.pop()}: expected one of {'; '.join(LIBRARIES)}")
        needed = PIP.keys() & {LIBRARIES[name][0].distribution for name in wanted}
        if missing := sorted(name for name in needed if importlib.util.find_spec(PIP[name][0]) is None):
            pip = " ".join(f"{name}=={PIP[name][1]}" for name in missing)
            sys.exit(f"{', '.join(missing)} cannot be imported: pip install {pip}")
        names = [*wanted, *(name for name in GRADIENTS if device == "cuda" or "CUDA" not in name)]
        turns = {"products": min(rounds, products), "blocks": 5, "density": densities}
        rows: list[dict[str, Any]] = []
        for one in sizes:
            rows += measure(one, frames, device, names, count=products, blocks=block or [10], steps=steps, rounds=turns)
            records.write_json(record, records.measured(device, device=device, rows=rows))
    kept = RECORDS.glob("hessian_speed-*.json")
    files = sorted({file.resolve() for file in [*kept, *([record] if record else [])]})
    text = table([records.read_json(file) for file in files])
    print(text)
    if write is not None:
        write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
