"""A text classifier, trained in every precision: a section of notebook 07.

    python benchmarks/recording/record.py speed cpu:threads=1 --parts text --write
    data/measured/speed-my-cpu.json

The texts are the docstrings of Python's standard library, and the classes are the packages that
contain them.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional as F

from benchmarks.measuring import joules
from companion.workloads import VOCABULARY, Row, TextNet, clocked
from gpulab.device._roofline import time_calls
from gpulab.errors import describe_error
from gpulab.settings import Setting

# Packages of the standard library that every supported Python has, each with more than a hundred
# docstrings.
PACKAGES = (
    "asyncio",
    "email",
    "http",
    "importlib",
    "logging",
    "multiprocessing",
    "unittest",
    "xml",
)
# epochs, words, width
TRAINING = {
    "smoke": (1, 16, 32),
    "quick": (2, 32, 64),
    "paper": (8, 64, 128),
}
SEEDS = 6
CORPUS = "docstrings"  # its name in the rows
BATCH = 32
SLOW = 4.0  # a format is skipped if its products take this many times as long as float32's


@functools.cache
def docstrings() -> tuple[list[str], list[str]]:
    """Return the docstrings of the standard library, each once, and the packages they belong to.

    They are read from the source, which is not executed.

    Examples:
        >>> texts, packages = docstrings()
        >>> (
        ...     len(texts) == len(set(texts)) == len(packages),
        ...     sorted(set(packages)) == sorted(PACKAGES),
        ... )
        (True, True)
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, str] = {}
    for package in PACKAGES:
        for file in sorted((library / package).rglob("*.py")):
            if {"test", "tests"} & set(file.relative_to(library).parts):
                continue
            for node in ast.walk(ast.parse(file.read_bytes())):
                if isinstance(
                    node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
                ):
                    text = ast.get_docstring(node) or ""
                    if len(text.split()) >= 5:
                        found.setdefault(text, package)
    return list(found), list(found.values())


def as_words(texts: Iterable[str], length: int) -> Int[Tensor, "b t"]:
    """Return the first words of each text as numbers from 1, by a fixed hash, padded with 0.

    Examples:
        >>> as_words(["a b", "a"], 3).tolist()[1]
        [2728, 0, 0]
    """
    numbers = np.zeros((len(texts := list(texts)), length), np.int64)
    for row, text in enumerate(texts):
        words = re.findall(r"[a-z]+", text.lower())[:length] or ["none"]
        numbers[row, : len(words)] = [
            1 + zlib.crc32(word.encode()) % (VOCABULARY - 1) for word in words
        ]
    return torch.from_numpy(numbers)


def split(length: int, every: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return words and classes for training, and those of every fifth text, which are held out."""
    texts, names = (part[::every] for part in docstrings())
    labels = torch.from_numpy(np.unique(names, return_inverse=True)[1])
    words, held = as_words(texts, length), torch.arange(len(texts)) % 5 == 0
    return words[~held], labels[~held], words[held], labels[held]


# --- training -------------------------------------------------------------------------------------


def text(setting: Setting, size: str) -> Iterator[Row]:
    """Train a Transformer that predicts a docstring's package, in each precision.

    All precisions start from the same seeds. For each training it yields the seconds, the joules if
    the device counts them, the mean loss of the last epoch, and the accuracy on held-out texts.
    """
    texts = split(TRAINING[size][1], every=2 if size == "smoke" else 1)
    yield Row(
        CORPUS,
        "most frequent class",
        float((texts[3] == texts[1].mode().values).float().mean()),
        "accuracy",
    )
    against = precisions(setting)
    for seed, (precision, why_not) in itertools.product(range(SEEDS), against.items()):
        if not why_not:
            for value, unit in trained(setting, size, texts, precision, seed):
                yield Row(CORPUS, precision, value, unit, seed=seed)
    yield from (
        Row(CORPUS, precision, note=why_not) for precision, why_not in against.items() if why_not
    )
    for precision in ("float32", "bfloat16"):
        way = f"{precision}, compiled"
        if size != "paper":
            yield Row(
                CORPUS,
                way,
                note="compiling takes longer than such a short run: only at the paper size",
            )
            continue
        try:
            for value, unit in trained(setting, size, texts, precision, 0, compiled=True):
                yield Row(CORPUS, way, value, unit, seed=0)
        except Exception as error:  # a missing compiler may raise any error
            yield Row(CORPUS, way, note=f"cannot be compiled here: {describe_error(error)[:120]}")


def precisions(setting: Setting) -> dict[str, str]:
    """Return the precisions, each with the reason why this device skips it, or an empty text.

    Examples:
        >>> precisions(Setting.parse("cpu"))["float32"]
        ''
    """
    ampere = (
        setting.kind == "cuda"
        and not torch.version.hip
        and torch.cuda.get_device_capability() >= (8, 0)
    )
    found = {
        "float32": "",
        "tf32": "" if ampere else "not on this device: NVIDIA GPUs have TF32 from Ampere on",
    }
    seconds = {}
    for name in ("float32", "bfloat16", "float16"):
        factor = torch.randn(256, 256).to(setting.device, getattr(torch, name))
        seconds[name] = time_calls(setting, functools.partial(torch.mm, factor, factor), 2)[0]
        slower = seconds[name] / seconds["float32"]
        found[name] = (
            f"products take {slower:.0f} times as long here as in float32" if slower > SLOW else ""
        )
    return found


def trained(
    setting: Setting,
    size: str,
    texts: tuple[Tensor, ...],
    precision: str,
    seed: int,
    compiled: bool = False,
) -> Iterator[tuple[float, str]]:
    """Yield the numbers of one training with their units."""
    words, labels, held_words, held_labels = (part.to(setting.device) for part in texts)
    torch.manual_seed(seed)
    model = TextNet("Transformer", int(labels.max()) + 1, TRAINING[size][2]).to(setting.device)
    read, optimizer = (
        torch.compile(model) if compiled else model,
        torch.optim.Adam(model.parameters(), 2e-3),
    )
    order, half = torch.Generator().manual_seed(seed), precision.endswith("float16")
    dtype = getattr(torch, precision) if half else torch.bfloat16
    cast = functools.partial(torch.autocast, setting.kind, dtype, enabled=half)
    # Without scaling, small gradients would become zero.
    scaler = torch.amp.GradScaler(setting.kind, enabled=precision == "float16")

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

    with (
        replace(setting, tf32=precision == "tf32") if setting.kind == "cuda" else setting
    ).apply():
        first = torch.linspace(0, len(words) - 1, BATCH, device=setting.device).long()
        yield clocked(setting, lambda: update(first))[0], "s until the first update"
        before = joules(setting)
        seconds, losses = clocked(setting, train)
        after = joules(setting)
        yield seconds, "s"
        if before is not None and after is not None:
            yield after - before, "J"
        yield float(torch.stack(losses).float().mean()), "loss"
        with torch.no_grad(), cast():
            found = torch.cat([model(part).argmax(1) for part in held_words.split(256)])
        yield float((found == held_labels).float().mean()), "accuracy"
