"""The work that notebook 07 measures on any device: a short function a section, with a setting and a size."""

from __future__ import annotations

import copy
import ctypes
import functools
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpulab.companion.frameworks import LIBRARIES, TORCH, library_speeds
from gpulab.companion.texts import VOCABULARY, TextNet, split
from gpulab.device.memory import memory_watch
from gpulab.device.placements import place
from gpulab.device.rooflines import roofline, timed
from gpulab.diagnostics.steps import Step
from gpulab.errors import GpulabError, UsageError, in_one_line
from gpulab.passports import passport
from gpulab.records import machine
from gpulab.settings import Setting
from gpulab.training.accumulation import GradientAccumulation
from gpulab.training.protocol import PROFILES

NETWORKS = ("resnet18", "LSTM", "Transformer")
IMAGES = {"smoke": (2, 32), "quick": (8, 64), "paper": (32, 224)}  # how many, and their edge
TEXTS = {"smoke": (4, 16, 32), "quick": (16, 64, 128), "paper": (32, 128, 512)}  # how many, words, width
TRAINING = {"smoke": (1, 16, 32), "quick": (2, 32, 64), "paper": (8, 64, 128)}  # epochs, words, width
SEEDS = 6
WIDTHS = {"smoke": (16, 64, 256), "quick": (16, 64, 256, 1024), "paper": (16, 64, 256, 1024, 4096)}
TABLE_ROWS = {"smoke": 2_000, "quick": 50_000, "paper": 1_000_000}
REPEATS = {"smoke": 2, "quick": 3, "paper": 5}
BATCH = 32  # of trainings on texts
SLOW = 4.0  # a format whose products take this much longer than float32's is not trained in


class Row(NamedTuple):
    """One measured number, or why there is none."""

    what: str
    way: str = ""
    value: float | None = None
    unit: str = ""
    spread: float | None = None  # the interquartile range over the median
    seed: int | None = None
    note: str = ""


def workload(name: str, size: str = "quick") -> Step:
    """A training step of `resnet18`, of an `LSTM` or of a `Transformer` encoder, on random input.

    Raises:
        UsageError: For another network or size.

    Examples:
        >>> workload("LSTM", "smoke")(Setting.parse("cpu")).shape
        torch.Size([])
    """
    if name not in NETWORKS or size not in PROFILES:
        raise UsageError(f"{name!r}, {size!r}: expected one of {', '.join(NETWORKS)}, and of {', '.join(PROFILES)}")
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
    return Step(model, (inputs, torch.randint(10, (count,), generator=generator)), F.cross_entropy)


# --- sections --------------------------------------------------------------------------------------------


def step(setting: Setting, size: str) -> Iterator[Row]:
    """What forward pass, backpropagation and update of each network take."""
    for name in NETWORKS:
        work = workload(name, size)
        model, (inputs, targets) = work.model.to(setting.device), (part.to(setting.device) for part in work.batch)
        optimizer = torch.optim.Adam(model.parameters())
        times: dict[str, list[float]] = {"forward": [], "backward": [], "update": []}
        for _ in range(2 + REPEATS[size]):
            optimizer.zero_grad()
            forward, loss = _clocked(setting, functools.partial(_loss, model, inputs, targets))
            times["forward"].append(forward)
            times["backward"].append(_clocked(setting, loss.backward)[0])
            times["update"].append(_clocked(setting, optimizer.step)[0])
        for way, seconds in times.items():
            yield Row(name, way, *_summary(seconds[2:]))


def text(setting: Setting, size: str, corpus: str = "docstrings") -> Iterator[Row]:
    """A Transformer trained to name the package of a docstring, in each precision, from the same seeds.

    Of each training the seconds, the joules where the device counts them, the mean loss of the last epoch, and the
    accuracy on texts held out.
    """
    texts = split(corpus, TRAINING[size][1], every=2 if size == "smoke" else 1)
    yield Row(corpus, "most frequent class", float((texts[3] == texts[1].mode().values).float().mean()), "accuracy")
    against = precisions(setting)
    for seed, (precision, why_not) in itertools.product(range(SEEDS), against.items()):
        if not why_not:
            for value, unit in _trained(setting, size, texts, precision, seed):
                yield Row(corpus, precision, value, unit, seed=seed)
    yield from (Row(corpus, precision, note=why_not) for precision, why_not in against.items() if why_not)
    for precision in ("float32", "bfloat16"):
        way = f"{precision}, compiled"
        if size != "paper":
            yield Row(corpus, way, note="compiling takes longer than so short a training: at the paper size only")
            continue
        try:
            for value, unit in _trained(setting, size, texts, precision, 0, compiled=True):
                yield Row(corpus, way, value, unit, seed=0)
        except Exception as error:  # whatever the lack of a compiler raises
            yield Row(corpus, way, note=f"cannot be compiled here: {in_one_line(error)[:120]}")


def precisions(setting: Setting) -> dict[str, str]:
    """The precisions that one may train in, each with what speaks against it on this device, or nothing.

    Examples:
        >>> precisions(Setting.parse("cpu"))["float32"]
        ''
    """
    ampere = setting.kind == "cuda" and not torch.version.hip and torch.cuda.get_device_capability() >= (8, 0)
    found = {"float32": "", "tf32": "" if ampere else "not on this device: NVIDIA's GPUs have TF32, from Ampere on"}
    seconds = {}
    for name in ("float32", "bfloat16", "float16"):
        factor = torch.randn(256, 256).to(setting.device, getattr(torch, name))
        seconds[name] = timed(setting, functools.partial(torch.mm, factor, factor), 2)[0]
        slower = seconds[name] / seconds["float32"]
        found[name] = f"products take {slower:.0f} times as long as in float32 here" if slower > SLOW else ""
    return found


def _trained(
    setting: Setting, size: str, texts: tuple[Tensor, ...], precision: str, seed: int, compiled: bool = False
) -> Iterator[tuple[float, str]]:
    """Numbers with their units, of one training."""
    words, labels, held_words, held_labels = (part.to(setting.device) for part in texts)
    torch.manual_seed(seed)
    model = TextNet("Transformer", int(labels.max()) + 1, TRAINING[size][2]).to(setting.device)
    read, optimizer = torch.compile(model) if compiled else model, torch.optim.Adam(model.parameters(), 2e-3)
    order, half = torch.Generator().manual_seed(seed), precision.endswith("float16")
    dtype = getattr(torch, precision) if half else torch.bfloat16
    cast = functools.partial(torch.autocast, setting.kind, dtype, enabled=half)
    scaler = torch.amp.GradScaler(setting.kind, enabled=precision == "float16")  # small gradients would become zero

    def update(rows: Tensor) -> Tensor:
        optimizer.zero_grad()
        with cast():
            loss = F.cross_entropy(read(words[rows]), labels[rows])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    def train() -> list[Tensor]:
        losses: list[Tensor] = []
        for _ in range(TRAINING[size][0]):
            batches = torch.randperm(len(words), generator=order).to(setting.device).split(BATCH)
            losses = [update(rows) for rows in batches if len(rows) == BATCH]
        return losses

    with (replace(setting, tf32=precision == "tf32") if setting.kind == "cuda" else setting).apply():
        first = torch.linspace(0, len(words) - 1, BATCH, device=setting.device).long()
        yield _clocked(setting, lambda: update(first))[0], "s until the first update"
        before = joules(setting)
        seconds, losses = _clocked(setting, train)
        after = joules(setting)
        yield seconds, "s"
        if before is not None and after is not None:
            yield after - before, "J"
        yield float(torch.stack(losses).float().mean()), "loss"
        with torch.no_grad(), cast():
            found = torch.cat([model(part).argmax(1) for part in held_words.split(256)])
        yield float((found == held_labels).float().mean()), "accuracy"


def trees(setting: Setting, size: str) -> Iterator[Row]:
    """Fifty gradient-boosted trees (XGBoost) on a table of random numbers, from the table in the host's memory."""
    try:
        import xgboost
    except ImportError:
        yield Row("XGBoost", note="XGBoost is not installed: pip install 'gpulab[trees]'")
        return
    draw = np.random.default_rng(0)
    table = draw.standard_normal((TABLE_ROWS[size], 50), np.float32)
    target = np.sin(3 * table[:, 0]) * table[:, 1] + table[:, 2] ** 2
    options = {"device": setting.device, "nthread": torch.get_num_threads(), "max_depth": 6}

    def train() -> None:
        xgboost.train(options, xgboost.DMatrix(table, target, nthread=options["nthread"]), 50)

    if setting.kind == "cuda" and not xgboost.build_info()["USE_CUDA"]:
        yield Row("XGBoost", note="this XGBoost was built without CUDA: pip install xgboost, not xgboost-cpu")
    elif setting.kind not in ("cpu", "cuda"):
        yield Row("XGBoost", note=f"XGBoost computes on cpu and cuda, not on {setting.kind}")
    else:
        times = [_clocked(setting, train)[0] for _ in range(1 + REPEATS[size])]
        yield Row("XGBoost", "fifty trees", *_summary(times[1:]))


def inference(setting: Setting, size: str) -> Iterator[Row]:
    """Images a second through resnet18: a copy on each of several GPUs, or for each of several CPU cores."""
    work, threads, cores = workload("resnet18", size), torch.get_num_threads(), setting.kind == "cpu"
    most, calls = (threads, 3) if cores else (device_count(setting), 20)

    def serve(model: nn.Module, images: Tensor) -> None:
        with torch.no_grad():
            for _ in range(calls):
                answer = model(images)
            answer.cpu()  # when it is done

    for count in sorted({1, 2, 4, 8, most} & {*range(1, most + 1)}):
        devices = [setting.kind if setting.kind in ("cpu", "mps") else f"{setting.kind}:{n}" for n in range(count)]
        models = [copy.deepcopy(work.model).eval().to(device) for device in devices]
        images = [work.batch[0].to(device) for device in devices]
        alone = functools.partial(torch.set_num_threads, 1 if cores else threads)  # of those that compute for a thread
        with ThreadPoolExecutor(count, initializer=alone) as pool:
            work_all = functools.partial(_all_of, pool, serve, models, images)
            seconds = [_clocked(setting, work_all)[0] for _ in range(1 + REPEATS[size])]
        torch.set_num_threads(threads)
        middle, _, spread = _summary(seconds[1:])
        way = f"{count} {'core' if cores else 'device'}{'s' * (count > 1)}"
        yield Row("resnet18", way, count * calls * len(images[0]) / middle, "images/s", spread)


def transfer(setting: Setting, size: str) -> Iterator[Row]:
    """Batches of images for resnet18: there already, moved from either kind of memory first, or moved meanwhile."""
    if setting.kind == "cpu":
        yield Row("images", note="a CPU computes in the host's own memory: there is nothing to move")
        return
    work = workload("resnet18", size)
    model, here = work.model.to(setting.device).eval(), work.batch[0]
    there = here.to(setting.device)
    with torch.no_grad():
        yield Row("images", "there already", *_repeated(setting, size, lambda: model(there)))
        for memory in ("pageable", "pinned") if setting.kind == "cuda" else ("pageable",):
            source = here.pin_memory() if memory == "pinned" else here
            move = functools.partial(source.to, setting.device, non_blocking=memory == "pinned")
            seconds, _, spread = _repeated(setting, size, move)
            yield Row("copy", memory, here.numel() * here.itemsize / seconds / 1e9, "GB/s", spread)
            yield Row("images", memory, *_repeated(setting, size, lambda move=move: model(move())))  # type: ignore[misc]
        if setting.kind != "cuda":
            yield Row(
                "images", "overlapped", note=f"pinned memory and a second stream are used on cuda, not {setting.kind}"
            )
            return
        aside, coming = torch.cuda.Stream(), [move()]

        def overlapped() -> None:
            with torch.cuda.stream(aside):
                coming.append(move())
            model(coming.pop(0))
            torch.cuda.current_stream().wait_stream(aside)
            coming[0].record_stream(torch.cuda.current_stream())

        yield Row("images", "overlapped", *_repeated(setting, size, overlapped))


def small(setting: Setting, size: str) -> Iterator[Row]:
    """An update of a network of three layers on 32 examples, from narrow to wide."""
    for width in WIDTHS[size]:
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(3))).to(setting.device)
        inputs, optimizer = torch.randn(32, width, device=setting.device), torch.optim.SGD(model.parameters(), 1e-3)

        def update(model: nn.Module = model, inputs: Tensor = inputs, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

        yield Row("three layers", str(width), *_repeated(setting, size, update))


def memory(setting: Setting, size: str) -> Iterator[Row]:
    """What a batch holds at its peak and how long it takes, as a whole and in parts; and one that does not fit."""
    work = workload("Transformer", "quick" if size == "smoke" else size)  # so large that it is not all parameters
    model, batch = work.model.to(setting.device), tuple(part.to(setting.device) for part in work.batch)
    count, whole = len(batch[0]), None

    def gradient(backward: GradientAccumulation) -> Tensor:
        model.zero_grad()
        backward(batch)
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    for parts in (1, 2, 4):
        way, backward = f"{parts} part{'s' * (parts > 1)}", GradientAccumulation(model, F.cross_entropy, count // parts)
        found = gradient(backward)
        whole = found if whole is None else whole
        yield Row("Transformer", way, float((found - whole).norm() / whole.norm()), "off the gradient")
        del found
        yield Row("Transformer", way, *_repeated(setting, size, functools.partial(gradient, backward)))
        if setting.kind in ("cpu", "cuda"):
            with memory_watch(setting) as watch:
                gradient(backward)
                watch.step()
            yield Row("Transformer", way, watch.peak_bytes / 1e6, "MB")
        else:
            yield Row("Transformer", way, note=f"memory is watched on cpu and cuda, not on {setting.kind}")
    if setting.kind != "cuda":
        yield Row("Transformer", "limited", note="torch limits the memory of a CUDA device only")
        return
    total = torch.cuda.get_device_properties().total_memory
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_reserved()
    gradient(GradientAccumulation(model, F.cross_entropy, count))
    peak = torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((held + 0.6 * (peak - held)) / total)
    try:
        gradient(backward := GradientAccumulation(model, F.cross_entropy, "auto"))
        fitted = count if backward.batch == "auto" else backward.batch
        yield Row("Transformer", "limited", float(fitted), f"of {count} at a time")
    except (GpulabError, RuntimeError) as error:
        yield Row("Transformer", "limited", note=in_one_line(error)[:120])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def libraries(setting: Setting, size: str) -> Iterator[Row]:
    """Images a second of the autoencoder's training, one image a batch, in PyTorch, JAX and Keras."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take most of a GPU's memory
    for library in (TORCH, *LIBRARIES) if size != "paper" else ():  # one image is one image
        try:
            table = library_speeds("autoencoder", str(setting), size, [library], REPEATS[size], windows=6)
            yield Row("autoencoder", library, float(table.frames_per_second.median()), "images/s")
        except GpulabError as error:
            yield Row("autoencoder", library, note=str(error))


@functools.cache
def ceilings(setting: str) -> pd.DataFrame:
    """The roofline of a setting, `gpulab.roofline`'s, measured once a process.

    Examples:
        >>> ceilings("cpu") is ceilings("cpu")
        True
    """
    return roofline(setting, repeats=3, progress=False)


def roof(setting: Setting, size: str) -> Iterator[Row]:
    """Where a step of each network stands under the roofline of its device."""
    for name in NETWORKS:
        found = place(workload(name, size), ceilings(str(setting)), REPEATS[size])
        if found.unknown:
            yield Row(name, note=f"torch has no formula for the FLOP of {', '.join(found.unknown)}")
            continue
        numbers = {"flop/byte": found.intensity, "Gflop/s": found.gflops, "of the roof": found.reached}
        for unit, value in (numbers | {"of the time launches": found.launch_share}).items():
            yield Row(name, found.bound, value, unit)


SECTIONS = (step, roof, small, transfer, memory, inference, libraries, trees, text)
PARTS: dict[str, Callable[[Setting, str], Iterator[Row]]] = {part.__name__: part for part in SECTIONS}


def measure_speed(part: str, settings: Iterable[Setting | str] = ("cpu",), size: str = "quick") -> pd.DataFrame:
    """Measure one section of notebook 07 under each setting.

    Args:
        part: One of `PARTS`.
        settings: Where to compute.
        size: A profile.

    Returns:
        A row a number: `part`, `what`, `way`, `value`, `unit`, `spread` (the interquartile range over the median),
        `seed`, `note` (why there is no number), `size`, `setting`, `machine`, and `recorded`, which is False.

    Raises:
        UsageError: For an unknown part or size.
        GpulabError: For a setting that cannot run here.
    """
    if part not in PARTS or size not in PROFILES:
        raise UsageError(f"{part!r}, {size!r}: expected one of {', '.join(PARTS)}, and of {', '.join(PROFILES)}")
    here, frames = passport(), []
    for setting in map(Setting.parse, settings):
        with setting.apply(), torch.random.fork_rng(devices=[]):
            frame = pd.DataFrame(PARTS[part](setting, size), columns=Row._fields)
        frames.append(frame.assign(size=size, setting=str(setting), machine=machine(here, setting.kind)))
    rows = pd.concat(frames, ignore_index=True)
    rows.insert(0, "part", part)
    return rows.assign(recorded=False).astype({"value": float, "spread": float, "seed": "Int64"})


def device_count(setting: Setting) -> int:
    """How many devices of the setting's kind there are."""
    return 1 if setting.kind in ("cpu", "mps") else getattr(torch, setting.kind).device_count()


def joules(setting: Setting) -> float | None:
    """The energy that a GPU has used since its driver was loaded, by NVML's counter; None where nobody counts.

    Examples:
        >>> joules(Setting.parse("cpu")) is None
        True
    """
    if setting.kind != "cuda" or torch.version.hip:
        return None
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle, used = ctypes.c_void_p(), ctypes.c_ulonglong()
    uuid = f"GPU-{torch.cuda.get_device_properties(setting.device).uuid}".encode()
    failed = nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle))
    failed = failed or nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(used))
    return None if failed else used.value / 1000


def _repeated(setting: Setting, size: str, work: Callable[[], Any]) -> tuple[float, str, float]:
    """The median seconds of one call, the unit and the spread."""
    seconds, spread = timed(setting, work, REPEATS[size])
    return seconds, "s", spread


def _loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs), targets)


def _all_of(pool: ThreadPoolExecutor, work: Callable[..., Any], *arguments: Iterable[Any]) -> None:
    for _ in pool.map(work, *arguments):
        pass


def _clocked(setting: Setting, work: Callable[[], Any]) -> tuple[float, Any]:
    """How long it takes until the device is done, and what it gives."""
    wait = getattr(torch, setting.kind).synchronize
    wait()
    started = time.perf_counter()
    found = work()
    wait()
    return time.perf_counter() - started, found


def _summary(times: list[float]) -> tuple[float, str, float]:
    """Median, unit and spread."""
    first, middle, third = statistics.quantiles(times, n=4)
    return middle, "s", (third - first) / middle
