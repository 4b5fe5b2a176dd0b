"""The networks of notebook 07, and its measurements from `benchmarks/`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

import gpulab as gl
from companion.benchmarks import benchmark
from gpulab.training._profiles import PROFILES

NETWORKS = ("resnet18", "LSTM", "Transformer")
IMAGES = {"smoke": (2, 32), "quick": (8, 64), "paper": (32, 224)}  # how many, and their edge
# how many, words, width
TEXTS = {
    "smoke": (4, 16, 32),
    "quick": (16, 64, 128),
    "paper": (32, 128, 512),
}
VOCABULARY = 4096  # words are numbered by a hash
REPEATS = {"smoke": 2, "quick": 3, "paper": 5}


class Row(NamedTuple):
    """One measured number, or the reason why there is none."""

    what: str
    way: str = ""
    value: float | None = None
    unit: str = ""
    spread: float | None = None  # the interquartile range over the median
    seed: int | None = None
    note: str = ""


class TextNet(nn.Module):
    """Score texts by class: embedded words, an LSTM or a Transformer encoder, and their mean."""

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
        """Compute the scores; the word number 0 is padding."""
        is_word, vectors = (words > 0).unsqueeze(-1), self.words(words)
        if isinstance(self.reader, nn.LSTM):
            read = self.reader(vectors)[0]
        else:
            read = self.reader(vectors, src_key_padding_mask=words == 0)
        return self.scores((read * is_word).sum(1) / is_word.sum(1))


def workload(name: str, size: str = "quick") -> gl.Step:
    """A training step of `resnet18`, an `LSTM` or a `Transformer` encoder on random input."""
    if name not in NETWORKS or size not in PROFILES:
        raise gl.UsageError(
            f"expected name in {{{', '.join(NETWORKS)}}} and size in {{{', '.join(PROFILES)}}}, got"
            f" {name!r} and {size!r}"
        )
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name == "resnet18":
            from torchvision.models import resnet18

            count, edge = IMAGES[size]
            model, inputs = (
                resnet18(num_classes=10),
                torch.randn(count, 3, edge, edge, generator=generator),
            )
        else:
            count, length, width = TEXTS[size]
            model, inputs = (
                TextNet(name, 10, width),
                torch.randint(1, VOCABULARY, (count, length), generator=generator),
            )
    return gl.Step(
        model, (inputs, torch.randint(10, (count,), generator=generator)), F.cross_entropy
    )


SCRIPTS = {  # of benchmarks/
    "libraries": "peers/frameworks",
    "trees": "speed/boosted_trees",
    "text": "speed/text_classifier",
}
PARTS = (*SCRIPTS,)


def measure_speed(
    part: str, settings: Iterable[gl.Setting | str] = ("cpu",), size: str = "quick"
) -> pd.DataFrame:
    """Measure one of `PARTS` under each setting, at the size of a profile.

    The table has a row for each number, with the columns `part`, `what`, `way`, `value`, `unit`,
    `spread` (the interquartile range over the median), `seed`, `note` (why there is no number),
    `size`, `setting`, `machine` (this machine), and `recorded`, which is False.
    """
    if part not in PARTS or size not in PROFILES:
        raise gl.UsageError(
            f"expected part in {{{', '.join(PARTS)}}} and size in {{{', '.join(PROFILES)}}}, got"
            f" {part!r} and {size!r}"
        )
    measure, frames = getattr(benchmark(SCRIPTS[part]), part), []
    for setting in map(gl.Setting.parse, settings):
        with setting.apply(), torch.random.fork_rng(devices=[]):
            frame = pd.DataFrame(measure(setting, size), columns=Row._fields)
        frames.append(frame.assign(size=size, setting=str(setting), machine="this machine"))
    rows = pd.concat(frames, ignore_index=True)
    rows.insert(0, "part", part)
    return rows.assign(recorded=False).astype({"value": float, "spread": float, "seed": "Int64"})


def clocked(setting: gl.Setting, work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds until the device is done with `work`, and the result."""
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
