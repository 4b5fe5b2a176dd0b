"""The work that notebook 07 measures on any device: a short function a section, with a setting and a size.

Three sections lie in `benchmarks/`, for they need other libraries, or a training of their own.
"""

from __future__ import annotations

import copy
import functools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

import gpulab as gl
from companion.benchmarks import benchmark
from gpulab.device.placements import place
from gpulab.device.rooflines import timed
from gpulab.passports import machine
from gpulab.training.spec import PROFILES

NETWORKS = ("resnet18", "LSTM", "Transformer")
IMAGES = {"smoke": (2, 32), "quick": (8, 64), "paper": (32, 224)}  # how many, and their edge
TEXTS = {"smoke": (4, 16, 32), "quick": (16, 64, 128), "paper": (32, 128, 512)}  # how many, words, width
VOCABULARY = 4096  # words are numbered by a hash
WIDTHS = {"smoke": (16, 64, 256), "quick": (16, 64, 256, 1024), "paper": (16, 64, 256, 1024, 4096)}
REPEATS = {"smoke": 2, "quick": 3, "paper": 5}


class Row(NamedTuple):
    """One measured number, or why there is none."""

    what: str
    way: str = ""
    value: float | None = None
    unit: str = ""
    spread: float | None = None  # the interquartile range over the median
    seed: int | None = None
    note: str = ""


class TextNet(nn.Module):
    """Scores of texts for each class: words are embedded, read by an LSTM or a Transformer encoder, and averaged."""

    def __init__(self, kind: str, classes: int, width: int, layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width, padding_idx=0)
        if kind == "LSTM":
            self.reader: nn.Module = nn.LSTM(width, width, layers, batch_first=True)
        else:
            layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
            self.reader = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.scores = nn.Linear(width, classes)

    def forward(self, words: Int[Tensor, "b t"]) -> Float[Tensor, "b c"]:
        """Scores; 0 is no word."""
        is_word, vectors = (words > 0).unsqueeze(-1), self.words(words)
        if isinstance(self.reader, nn.LSTM):
            read = self.reader(vectors)[0]
        else:
            read = self.reader(vectors, src_key_padding_mask=words == 0)
        return self.scores((read * is_word).sum(1) / is_word.sum(1))


def workload(name: str, size: str = "quick") -> gl.Step:
    """A training step of `resnet18`, of an `LSTM` or of a `Transformer` encoder, on random input."""
    if name not in NETWORKS or size not in PROFILES:
        raise gl.UsageError(f"{name!r}, {size!r}: expected one of {', '.join(NETWORKS)}, and of {', '.join(PROFILES)}")
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name == "resnet18":
            from torchvision.models import resnet18

            count, edge = IMAGES[size]
            model, inputs = resnet18(num_classes=10), torch.randn(count, 3, edge, edge, generator=generator)
        else:
            count, length, width = TEXTS[size]
            model, inputs = TextNet(name, 10, width), torch.randint(1, VOCABULARY, (count, length), generator=generator)
    return gl.Step(model, (inputs, torch.randint(10, (count,), generator=generator)), F.cross_entropy)


def step(setting: gl.Setting, size: str) -> Iterator[Row]:
    """What forward pass, backpropagation and update of each network take."""
    for name in NETWORKS:
        work = workload(name, size)
        model, (inputs, targets) = work.model.to(setting.device), (tensor.to(setting.device) for tensor in work.batch)
        optimizer = torch.optim.Adam(model.parameters())
        forward = functools.partial(_loss, model, inputs, targets)
        times: list[tuple[float, float, float]] = []
        for _ in range(2 + REPEATS[size]):
            optimizer.zero_grad()
            seconds, loss = clocked(setting, forward)
            times.append((seconds, clocked(setting, loss.backward)[0], clocked(setting, optimizer.step)[0]))
        for phase, phase_seconds in zip(("forward", "backward", "update"), zip(*times[2:], strict=True), strict=True):
            yield Row(name, phase, *summary(phase_seconds))


def inference(setting: gl.Setting, size: str) -> Iterator[Row]:
    """Images a second through resnet18: a copy on each of several GPUs, or for each of several CPU cores."""
    work, threads, cores = workload("resnet18", size), torch.get_num_threads(), setting.kind == "cpu"
    numbered = setting.kind not in ("cpu", "mps")  # of which there may be several
    most_copies, calls = (threads, 3) if cores else (1, 20)
    if numbered:
        most_copies = getattr(torch, setting.kind).device_count()

    def serve(model: nn.Module, images: Tensor) -> None:
        with torch.no_grad():
            for _ in range(calls):
                answer = model(images)
            answer.cpu()  # when it is done

    for count in sorted({1, 2, 4, 8, most_copies} & {*range(1, most_copies + 1)}):
        devices = [f"{setting.kind}:{n}" if numbered else setting.kind for n in range(count)]
        models = [copy.deepcopy(work.model).eval().to(device) for device in devices]
        images = [work.batch[0].to(device) for device in devices]
        # In each worker: of those that compute for a thread.
        set_threads = functools.partial(torch.set_num_threads, 1 if cores else threads)
        with ThreadPoolExecutor(count, initializer=set_threads) as pool:
            work_all = functools.partial(_run_all, pool, serve, models, images)
            seconds = [clocked(setting, work_all)[0] for _ in range(1 + REPEATS[size])]
        torch.set_num_threads(threads)
        middle, _, spread = summary(seconds[1:])
        way = f"{count} {'core' if cores else 'device'}{'s' * (count > 1)}"
        yield Row("resnet18", way, count * calls * len(images[0]) / middle, "images/s", spread)


def transfer(setting: gl.Setting, size: str) -> Iterator[Row]:
    """Batches of images for resnet18: there already, moved from either kind of memory first, or moved meanwhile."""
    if setting.kind == "cpu":
        yield Row("images", note="a CPU computes in the host's own memory: there is nothing to move")
        return
    work = workload("resnet18", size)
    model, host_images = work.model.to(setting.device).eval(), work.batch[0]
    device_images = host_images.to(setting.device)
    with torch.no_grad():
        yield Row("images", "there already", *_repeated(setting, size, lambda: model(device_images)))
        for memory in ("pageable", "pinned") if setting.kind == "cuda" else ("pageable",):
            source = host_images.pin_memory() if memory == "pinned" else host_images
            move = functools.partial(source.to, setting.device, non_blocking=memory == "pinned")
            seconds, _, spread = _repeated(setting, size, move)
            yield Row("copy", memory, host_images.numel() * host_images.itemsize / seconds / 1e9, "GB/s", spread)
            yield Row("images", memory, *_repeated(setting, size, lambda move=move: model(move())))  # type: ignore[misc]
        if setting.kind != "cuda":
            reason = f"pinned memory and a second stream are used on cuda, not {setting.kind}"
            yield Row("images", "overlapped", note=reason)
            return
        copy_stream, next_images = torch.cuda.Stream(), [move()]

        def overlapped() -> None:
            with torch.cuda.stream(copy_stream):
                next_images.append(move())
            model(next_images.pop(0))
            torch.cuda.current_stream().wait_stream(copy_stream)
            next_images[0].record_stream(torch.cuda.current_stream())

        yield Row("images", "overlapped", *_repeated(setting, size, overlapped))


def small(setting: gl.Setting, size: str) -> Iterator[Row]:
    """An update of a network of three layers on 32 examples, from narrow to wide."""
    for width in WIDTHS[size]:
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(3))).to(setting.device)
        inputs, optimizer = torch.randn(32, width, device=setting.device), torch.optim.SGD(model.parameters(), 1e-3)

        def update(model: nn.Module = model, inputs: Tensor = inputs, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

        yield Row("three layers", str(width), *_repeated(setting, size, update))


@functools.cache
def ceilings(setting: str) -> pd.DataFrame:
    """The roofline of a setting, `gpulab.roofline`'s, measured once a process."""
    return gl.roofline(setting, repeats=3, progress=False)


def roof(setting: gl.Setting, size: str) -> Iterator[Row]:
    """Where a step of each network stands under the roofline of its device."""
    for name in NETWORKS:
        placement = place(workload(name, size), ceilings(str(setting)), REPEATS[size])
        if placement.unknown:
            yield Row(name, note=f"torch has no formula for the FLOP of {', '.join(placement.unknown)}")
            continue
        numbers = {"flop/byte": placement.intensity, "Gflop/s": placement.gflops, "of the roof": placement.reached}
        for unit, value in (numbers | {"of the time launches": placement.launch_share}).items():
            yield Row(name, placement.bound, value, unit)


SECTIONS: dict[str, Callable[[gl.Setting, str], Iterator[Row]]] = {
    section.__name__: section for section in (step, roof, small, transfer, inference)
}
IN_BENCHMARKS = {"libraries": "frameworks", "trees": "boosted_trees", "text": "text_classifier"}  # and their scripts
PARTS = (*SECTIONS, *IN_BENCHMARKS)


def measure_speed(part: str, settings: Iterable[gl.Setting | str] = ("cpu",), size: str = "quick") -> pd.DataFrame:
    """Measure one section of notebook 07, one of `PARTS`, under each setting, at the size of a profile.

    A row a number: `part`, `what`, `way`, `value`, `unit`, `spread` (the interquartile range over the median), `seed`,
    `note` (why there is no number), `size`, `setting`, `machine`, and `recorded`, which is False.
    """
    if part not in PARTS or size not in PROFILES:
        raise gl.UsageError(f"{part!r}, {size!r}: expected one of {', '.join(PARTS)}, and of {', '.join(PROFILES)}")
    section = SECTIONS[part] if part in SECTIONS else getattr(benchmark(IN_BENCHMARKS[part]), part)
    passport, frames = gl.passport(), []
    for setting in map(gl.Setting.parse, settings):
        with setting.apply(), torch.random.fork_rng(devices=[]):
            frame = pd.DataFrame(section(setting, size), columns=Row._fields)
        frames.append(frame.assign(size=size, setting=str(setting), machine=machine(passport, setting.kind)))
    rows = pd.concat(frames, ignore_index=True)
    rows.insert(0, "part", part)
    return rows.assign(recorded=False).astype({"value": float, "spread": float, "seed": "Int64"})


def _repeated(setting: gl.Setting, size: str, work: Callable[[], Any]) -> tuple[float, str, float]:
    """The median seconds of one call, the unit and the spread."""
    seconds, spread = timed(setting, work, REPEATS[size])
    return seconds, "s", spread


def _loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs), targets)


def _run_all(pool: ThreadPoolExecutor, work: Callable[..., Any], *arguments: Iterable[Any]) -> None:
    for _ in pool.map(work, *arguments):
        pass


def clocked(setting: gl.Setting, work: Callable[[], Any]) -> tuple[float, Any]:
    """How long it takes until the device is done, and what it gives."""
    wait = getattr(torch, setting.kind).synchronize
    wait()
    started = time.perf_counter()
    result = work()
    wait()
    return time.perf_counter() - started, result


def summary(times: Sequence[float]) -> tuple[float, str, float]:
    """Median, unit and spread."""
    first, middle, third = statistics.quantiles(times, n=4)
    return middle, "s", (third - first) / middle
