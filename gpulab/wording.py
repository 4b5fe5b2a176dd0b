"""Settings, metrics and other levels of factors in words, for figures, tables and sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from gpulab.errors import UsageError
from gpulab.settings import Setting

# A level of a factor is a cell in a user's table: a string, a number, a date or anything else that
# pandas can group by.
Level = Hashable
# A string for each level. The type of the keys is not `Level`, because mypy does not accept a
# `dict[str, str]` as a `Mapping[Level, str]`.
TextByLevel = Mapping[Any, str]

OWN_MEMORY = "own memory"
SHARED_MEMORY = "shared memory"
# The two conditions of the anomaly.
COPIED = "copied frames"
OVERWRITTEN = "overwritten frames"
LOADERS = {"copied": COPIED, "window": COPIED, "reused": OVERWRITTEN, "imitated": OVERWRITTEN}
DEVICES = {"cpu": "CPU", "cuda": "GPU", "mps": "Apple GPU", "xpu": "Intel GPU"}
ISA = {"sse4": "SSE4", "avx2": "AVX2", "avx512": "AVX-512"}
EMULATED = {"tf32": "TF32", "ampere": "an Ampere card", "hopper": "a Hopper card"}
SWITCHES = {
    "tf32": {True: "TF32", False: "no TF32"},
    "cudnn": {True: "cuDNN", False: "no cuDNN"},
    "denormals": {True: "denormals kept", False: "denormals flushed to zero"},
    "deterministic": {True: "deterministic", False: "any order of sums"},
}
OPTIMIZERS = {"sgd": "SGD", "momentum": "SGD with momentum", "rmsprop": "RMSprop", "adam": "Adam"}
RERUN_SUFFIX = " again"  # at the end of a setting that was run a second time
METRICS = {"index_fraction": "share of directions that lead down", "heldout_loss": "held-out loss"}
# The unit to which the loss of each network refers: it is an error per frame or per image.
UNITS = {
    "prednet": "frame",
    "autoencoder": "image",
    "whitener": "image",
}


def setting_words(setting: str | Setting) -> str:
    """Describe a setting in words.

    A string that is not a setting is returned unchanged.

    >>> (
    ...     setting_words("cpu:threads=1"),
    ...     setting_words("cuda:tf32=on"),
    ...     setting_words("cuda:tf32=off again"),
    ... )
    ('CPU, one thread', 'GPU, TF32', 'GPU, no TF32, again')
    >>> (
    ...     setting_words("cpu:threads=3,denormals=off"),
    ...     setting_words("cpu:isa=avx512,precision=float64"),
    ... )
    ('CPU, 3 threads, denormals flushed to zero', 'CPU, AVX-512, float64')
    >>> setting_words("cuda:1:tf32=off,cudnn=off,deterministic=on"), setting_words("mine")
    ('GPU 1, no TF32, no cuDNN, deterministic', 'mine')
    >>> setting_words("cuda:deterministic=on")
    'GPU, TF32 in convolutions, deterministic'
    >>> setting_words("cpu:emulate=tf32,order=pairwise")
    'CPU, emulating TF32, sums pairwise'
    >>> setting_words("cpu:compile=inductor,autocast=bfloat16")
    'CPU, compiled with inductor, mixed precision with bfloat16'
    """
    text = str(setting)
    if text.endswith(RERUN_SUFFIX):
        return f"{setting_words(text.removesuffix(RERUN_SUFFIX))},{RERUN_SUFFIX}"
    try:
        parsed = Setting.parse(text)
    except UsageError:  # a level in a user's own table, which is not one of gpulab's settings
        return text
    device, _, number = parsed.device.partition(":")
    words = [f"{DEVICES[device]} {number}".rstrip()]
    if parsed.threads:
        words.append("one thread" if parsed.threads == 1 else f"{parsed.threads} threads")
    if parsed.isa:
        words.append(ISA.get(parsed.isa, parsed.isa))
    if _uses_default_tf32(parsed) and parsed.deterministic:
        # The setting differs from `cuda:tf32=off` in two ways, so the label names both.
        words.append("TF32 in convolutions")
    for name, value_words in SWITCHES.items():
        value = getattr(parsed, name)
        if value is not None:
            words.append(value_words[value])
    if parsed.precision:
        words.append(parsed.precision)
    if parsed.emulate:
        words.append(f"emulating {EMULATED.get(parsed.emulate, parsed.emulate)}")
    if parsed.order:
        words.append(f"sums {parsed.order}")
    if parsed.compile:
        words.append(f"compiled with {parsed.compile}")
    if parsed.autocast:
        words.append(f"mixed precision with {parsed.autocast}")
    return ", ".join(words)


def _uses_default_tf32(setting: Setting) -> bool:
    """Return whether a setting keeps torch's default for TF32: on in the convolutions of cuDNN.

    >>> _uses_default_tf32(Setting.parse("cuda:deterministic=on"))
    True
    >>> _uses_default_tf32(Setting.parse("cuda:deterministic=on,cudnn=off"))
    False
    """
    computes_in_float32 = setting.precision in (None, "float32")
    has_default = setting.tf32 is None and setting.cudnn is not False
    return setting.kind == "cuda" and computes_in_float32 and has_default


def condition_words(loader: str, setting: str) -> str:
    """Return the condition in words: whether frames are copied or overwritten.

    The condition depends on the loader and the device: on a GPU, the loader `reused`, which is that
    of the published code, also copies frames.

    >>> condition_words("reused", "cpu"), condition_words("reused", "cuda:tf32=off")
    ('overwritten frames', 'copied frames')
    """
    copies = loader == "reused" and not setting.startswith("cpu")
    return COPIED if copies else LOADERS[loader]


def optimizer_words(optimizer: str) -> str:
    """Return the name of an optimiser with its usual spelling.

    >>> optimizer_words("adam(eps=0.0001)")
    'Adam (eps=0.0001)'
    """
    name, bracket, options = optimizer.partition("(")
    return f"{OPTIMIZERS.get(name, name)} {bracket}{options}".rstrip()


def label_levels(levels: Iterable[Level], factor: str = "setting") -> dict[Level, str]:
    """Return the display name of each level of a factor; ambiguous levels keep their exact names.

    >>> label_levels(["copied", "reused"], "loader")
    {'copied': 'copied frames', 'reused': 'overwritten frames'}
    >>> label_levels(["copied", "window"], "loader")
    {'copied': 'copied', 'window': 'window'}
    >>> label_levels(["cpu:threads=1", "cpu: threads=1"])
    {'cpu:threads=1': 'cpu:threads=1', 'cpu: threads=1': 'cpu: threads=1'}
    >>> label_levels(["cpu", 3], "width")
    {'cpu': 'cpu', 3: '3'}
    """
    level_names = {level: _level_words(level, factor) for level in levels}
    counts = Counter(level_names.values())
    return {
        level: words if counts[words] == 1 else level_text(level, factor)
        for level, words in level_names.items()
    }


def _level_words(level: Level, factor: str) -> str:
    """Describe a level: a setting or a loader in words, any other level as text."""
    text = str(level)
    if factor == "setting":
        return setting_words(text)
    if factor == "loader":
        return LOADERS.get(text, text)
    return level_text(level, factor)


def level_text(level: Level, factor: str) -> str:
    """Return a level as named in a sentence: a Boolean with its factor, any other as text.

    >>> import numpy as np
    >>> level_text(np.True_, "amp"), level_text("false", "amp"), level_text(np.float64(0.5), "rate")
    ('amp=True', 'amp=False', '0.5')
    """
    text = str(level)
    return f"{factor}={text.capitalize()}" if text.lower() in ("true", "false") else text


def metric_label(metric: str, experiments: Iterable[str] = ()) -> str:
    """Describe a metric for the label of an axis.

    The unit of a loss is added if all experiments use networks of gpulab with the same unit.

    >>> (
    ...     metric_label("final_loss", ["prednet"]),
    ...     metric_label("heldout_loss", ["autoencoder", "autoencoder"]),
    ... )
    ('final loss (mean squared error per frame)', 'held-out loss (mean squared error per image)')
    >>> (
    ...     metric_label("final_loss"),
    ...     metric_label("final_loss", ["prednet", "mine"]),
    ...     metric_label("index_fraction"),
    ... )
    ('final loss', 'final loss', 'share of directions that lead down')
    """
    words = METRICS.get(metric, metric.replace("_", " "))
    units = {UNITS.get(name) for name in experiments}
    if not metric.endswith("loss") or None in units or len(units) != 1:
        return words
    return f"{words} (mean squared error per {units.pop()})"
