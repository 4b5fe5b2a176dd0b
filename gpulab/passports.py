"""Passports: the hardware and software on which something ran, as one versioned JSON document."""

from __future__ import annotations

import contextlib
import functools
import html
import importlib.metadata
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NotRequired, TypedDict

from gpulab import __version__
from gpulab.files import JSON

PASSPORT_FORMAT = 1
# The first four run the published network. The others are further frameworks for training
# (`benchmarks/peers/frameworks.py`).
OTHER_PACKAGES = [
    "chainer",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "numpy",
    "jax",
    "jaxlib",
    "keras",
    "tensorflow",
    "tensorflow-cpu",
]
GPU_DETAIL_FORMATS = {
    "name": "{}",
    "compute_capability": "compute capability {}",
    "multiprocessors": "{} multiprocessors",
}
GPU_DETAIL_FORMATS |= {"memory": "{} GiB", "driver": "driver {}"}  # of a GPU, in this order
VECTOR_EXTENSIONS = re.compile(r"(sse4_[12]|avx.*|fma|f16c|amx.*|neon|asimd|sve2?|bf16|vsx)")


class CPUDescription(TypedDict):
    """The system's description of a CPU, part of which is in a passport."""

    model: str
    flags: list[str]


class CPU(TypedDict):
    """The CPU in a passport."""

    model: str
    architecture: str
    physical_cores: int
    logical_cores: int
    vector_extensions: list[str]


class GPU(TypedDict):
    """A GPU in a passport; keys that torch does not know on every system may be missing."""

    kind: str
    name: str
    compute_capability: NotRequired[str]
    multiprocessors: NotRequired[int]
    memory_bytes: NotRequired[int]
    driver: NotRequired[str | None]


Software = dict[str, str | None]  # versions by name; None where there is no such software


class Passport(dict[str, JSON]):
    """The description of a machine that `gpulab.passport` returns, a JSON-ready dictionary.

    `print` shows it as lines of text, and a notebook as a table.
    """

    def rows(self) -> list[tuple[str, str]]:
        """Return the passport as pairs of a label and a value, for a table."""
        cpu: CPU = self["cpu"]
        gpus: list[GPU] = self["gpus"]
        software: Software = self["software"]
        families = dict.fromkeys(
            re.sub(r"(avx512|amx).*", r"\1", name) for name in cpu["vector_extensions"]
        )
        rows = [
            ("CPU", cpu["model"]),
            ("cores", f"{cpu['physical_cores']} physical, {cpu['logical_cores']} logical"),
            ("vector extensions", ", ".join(families) or "none reported"),
            ("memory", f"{self['memory_bytes'] / 2**30:.1f} GiB"),
        ]
        for index, gpu in enumerate(gpus):
            details_known = {**gpu, "memory": f"{gpu.get('memory_bytes', 0) / 2**30:.0f}"}
            details = [
                words.format(details_known[key])
                for key, words in GPU_DETAIL_FORMATS.items()
                if details_known.get(key) not in (None, "0")
            ]
            rows.append((f"GPU {index}", ", ".join(details)))
        if not gpus:
            rows.append(("GPU", "none"))
        rows += [
            (name, version)
            for name, version in software.items()
            if version and name not in ("gpulab", "commit")
        ]
        commit = f" ({software['commit'][:10]})" if software["commit"] else ""
        return [*rows, ("gpulab", f"{software['gpulab']}{commit}")]

    def summary(self) -> str:
        """Return one line with the names of the GPUs, or of the CPU, and the version of torch."""
        return f"{machine(self)}, torch {self['software']['torch']}"

    def _repr_html_(self) -> str:
        row = "<tr><th style='text-align:left'>{}</th><td style='text-align:left'>{}</td></tr>"
        return (
            f"<table>{''.join(row.format(*map(html.escape, pair)) for pair in self.rows())}</table>"
        )

    def __str__(self) -> str:
        return "\n".join(f"{label:18} {value}" for label, value in self.rows())


def machine(passport: Mapping[str, JSON], kind: str = "") -> str:
    """Return the names of a machine's GPUs, or the name of its CPU.

    The name of the CPU is returned if `kind` is `cpu`, or if `kind` is empty and there is no GPU.
    """
    if kind == "cpu" or not (kind or passport["gpus"]):
        return passport["cpu"]["model"]
    return ", ".join(dict.fromkeys(gpu["name"] for gpu in passport["gpus"]))


def passport() -> Passport:
    """Describe this machine: its CPU, its GPUs, and the versions of torch and other software.

    The first call takes about a second.

    Returns:
        A `Passport`, a dictionary that JSON can represent. `print` shows it as several lines, and
        `summary()` returns one line. Its keys are:

        - `format`: The version of this layout.
        - `cpu`: `model`, `architecture`, `physical_cores`, `logical_cores`, and `vector_extensions`
          (a list of names such as `avx2`).
        - `memory_bytes`: The machine's memory.
        - `gpus`: A list with a dictionary for each GPU that torch can use: `kind` (`cuda`, `mps` or
          `xpu`), `name`, and those of `compute_capability`, `multiprocessors`, `memory_bytes` and
          `driver` that torch reports.
        - `software`: The versions of `torch`, `cuda`, `rocm`, `cudnn`, `blas`, `onednn`, `python`,
          `os` and `gpulab`, each None where there is none; the `commit` of the checkout that gpulab
          runs from; and the versions of NumPy, and of JAX, Keras, TensorFlow and Chainer where they
          are installed.

    Examples:
        >>> import gpulab as gl
        >>> here = gl.passport()
        >>> sorted(here)
        ['cpu', 'format', 'gpus', 'memory_bytes', 'software']
        >>> here["cpu"]["logical_cores"] >= 1
        True
    """
    import psutil

    cpu = cpu_description()
    return Passport(
        format=PASSPORT_FORMAT,
        cpu={
            "model": cpu["model"],
            "architecture": platform.machine(),
            "physical_cores": psutil.cpu_count(logical=False) or psutil.cpu_count(),
            "logical_cores": psutil.cpu_count(),
            "vector_extensions": [
                flag for flag in cpu["flags"] if VECTOR_EXTENSIONS.fullmatch(flag)
            ],
        },
        memory_bytes=psutil.virtual_memory().total,
        gpus=_gpus(),
        software=_software(),
    )


@functools.cache
def cpu_description() -> CPUDescription:
    """Return the CPU's model name and its sorted feature flags.

    On Linux they are read from `/proc/cpuinfo`. The ids of runs depend on this model name, so it
    has to come from the same source each time. On other systems py-cpuinfo finds them, which takes
    about a second.
    """
    with contextlib.suppress(OSError, UnicodeDecodeError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        model, flags = (
            re.search(rf"^{name}\s*: (.+)$", text, re.MULTILINE) for name in ("model name", "flags")
        )
        if model and flags:
            return {"model": model[1].strip(), "flags": sorted(flags[1].split())}
    import cpuinfo

    # The first call may return nothing, because its child process may be killed.
    info = cpuinfo.get_cpu_info() or cpuinfo.get_cpu_info()
    model_name = info.get("brand_raw") or platform.processor() or platform.machine()
    return {"model": model_name, "flags": sorted(info.get("flags", []))}


def _gpus() -> list[GPU]:
    """Describe each GPU that torch can use."""
    import torch

    gpus: list[GPU] = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(
            {
                "kind": "cuda",
                "name": properties.name,
                "compute_capability": f"{properties.major}.{properties.minor}",
                "multiprocessors": properties.multi_processor_count,
                "memory_bytes": properties.total_memory,
                "driver": _nvidia_driver(),
            }
        )
    if torch.backends.mps.is_available():
        gpus.append(
            {"kind": "mps", "name": f"Apple GPU ({platform.processor() or platform.machine()})"}
        )
    xpu_count = torch.xpu.device_count() if torch.xpu.is_available() else 0
    for index in range(xpu_count):
        xpu = torch.xpu.get_device_properties(index)
        gpus.append({"kind": "xpu", "name": xpu.name, "memory_bytes": xpu.total_memory})
    return gpus


def _run_command(*command: str) -> str | None:
    """Run a program and return its output; None if it does not exist, fails or prints nothing."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.strip() or None


@functools.cache
def _nvidia_driver() -> str | None:
    """Return the version of NVIDIA's driver; None if there is none, as with AMD GPUs."""
    versions = _run_command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return versions.split("\n")[0].strip() if versions else None


def _software() -> Software:
    """List the versions of torch, of its libraries and of other software."""
    import torch

    def built_with(pattern: str) -> str | None:
        """Return the first group of a pattern in the description of torch's build, or None."""
        match = re.search(pattern, torch.__config__.show())
        return match and match[1]

    blas = (
        built_with(r"BLAS_INFO=(\w+)"),
        built_with(r"oneAPI Math Kernel Library Version ([\w.-]+)"),
    )
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return {
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "cudnn": str(cudnn) if cudnn else None,
        "blas": " ".join(filter(None, blas)) or None,
        "onednn": built_with(r"MKL-DNN v([\w.]+)"),
        "torch": torch.__version__,
        **_other_versions(),
        "python": platform.python_version(),
        "os": platform.platform(),
        "gpulab": __version__,
        "commit": _commit(),
    }


@functools.cache
def _other_versions() -> dict[str, str]:
    """Return the versions of those packages in `OTHER_PACKAGES` that are installed."""
    versions = {}
    for name in OTHER_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


@functools.cache
def _commit() -> str | None:
    """Return the commit of the checkout that gpulab runs from; None without a checkout."""
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():
        return None
    return _run_command(
        "git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"
    )
