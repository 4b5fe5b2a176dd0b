"""Hardware properties of CPUs and GPUs: cores, caches, memory, clock (notebook 01)."""

from __future__ import annotations

import csv
import io
import re
import subprocess
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import torch

from companion.microbenchmarks import count_cores
from gpulab.passports import passport

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
SIZE_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
# Device properties of torch, and their names here. Older versions of torch lack some.
GPU_PROPERTIES = {
    "name": "name",
    "multi_processor_count": "sms",
    "warp_size": "threads_per_warp",
    "max_threads_per_multi_processor": "threads_per_sm",
    "regs_per_multiprocessor": "registers_per_sm",
    "shared_memory_per_multiprocessor": "shared_memory_per_sm_bytes",
    "L2_cache_size": "l2_cache_bytes",
    "total_memory": "memory_bytes",
    "memory_bus_width": "memory_bus_bits",
}
# Fields of nvidia-smi: their names here, and the factor that converts to the unit in the name.
NVIDIA_SMI_FIELDS = {
    "clocks.max.sm": ("clock_hz", 1e6),
    "clocks.max.mem": ("memory_clock_hz", 1e6),
    "pcie.link.gen.max": ("pcie_generation", 1),
    "pcie.link.width.max": ("pcie_lanes", 1),
    "power.limit": ("power_limit_watts", 1),
}


def describe_devices() -> dict[str, dict[str, Any]]:
    """Describe the CPU, and the current NVIDIA or AMD GPU if there is one.

    Returns:
        A dictionary with the description `cpu`, and `cuda` if there is an NVIDIA or AMD GPU.
        Unknown properties are left out.

    Examples:
        >>> describe_devices()["cpu"]["logical_cores"] >= 1
        True
    """
    found = {"cpu": describe_cpu()}
    if torch.cuda.is_available():
        found["cuda"] = describe_gpu()
    return found


def describe_cpu() -> dict[str, Any]:
    """Describe the CPU: model, cores, usable cores, clock, caches and memory."""
    processor = passport()["cpu"]
    assert isinstance(processor, dict)
    found = {
        "name": processor["model"],
        "physical_cores": processor["physical_cores"],
        "logical_cores": processor["logical_cores"],
        "usable_cores": count_cores(),
        "numbers_per_instruction": count_vector_lanes(list(processor["vector_extensions"])),
        "clock_hz": read_cpu_clock(),
        "memory_bytes": psutil.virtual_memory().total,
        **read_cpu_caches(),
    }
    return {name: value for name, value in found.items() if value}


def count_vector_lanes(extensions: list[str]) -> int | None:
    """Return how many float32 numbers an instruction handles, by the vector extensions of a CPU.

    Examples:
        >>> count_vector_lanes(["avx", "avx2", "avx512f"]), count_vector_lanes(["neon"])
        (16, 4)
    """
    widths = {"avx512f": 16, "avx2": 8, "avx": 8, "neon": 4, "asimd": 4, "sse4_1": 4, "vsx": 4}
    return max((widths.get(name, 0) for name in extensions), default=0) or None


def read_cpu_clock() -> float | None:
    """Return the maximum clock of a core in Hz, or the current clock if the maximum is unknown.

    In a virtual machine, this is often the nominal clock.
    """
    frequency = psutil.cpu_freq()
    megahertz = (frequency.max or frequency.current) if frequency else None
    return 1e6 * megahertz if megahertz else None


def read_cpu_caches(folder: Path = CACHES) -> dict[str, int]:
    """Return the sizes of the first core's caches in bytes, as Linux reports them.

    `l3_sharing_cores` is the number of logical cores that share the L3 cache.
    """
    found = {}
    for index in sorted(folder.glob("index*")):
        level, kind, size = (
            (index / name).read_text(encoding="utf-8").strip() for name in ("level", "type", "size")
        )
        if kind == "Instruction":
            continue
        found[f"l{level}_cache_bytes"] = parse_size(size)
        shared = index / "shared_cpu_list"
        if level == "3" and shared.is_file():
            found["l3_sharing_cores"] = count_listed(shared.read_text(encoding="utf-8"))
    return found


def parse_size(text: str) -> int:
    """Convert a size such as `32K` to bytes.

    Examples:
        >>> parse_size("32K"), parse_size("1M")
        (32768, 1048576)
    """
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    if match is None:
        raise ValueError(f"expected a size such as 32K, got {text!r}")
    return int(match[1]) * SIZE_UNITS[match[2]]


def count_listed(text: str) -> int:
    """Count the numbers in a list such as `0-3,8`.

    Examples:
        >>> count_listed("0-3,8")
        5
    """
    count = 0
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        count += int(last or first) - int(first) + 1
    return count


def describe_gpu() -> dict[str, Any]:
    """Describe the current GPU: SMs, threads, registers, caches, memory, clock and bus."""
    number = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(number)
    found = {name: getattr(properties, key, None) for key, name in GPU_PROPERTIES.items()}
    found["compute_capability"] = f"{properties.major}.{properties.minor}"
    found |= read_nvidia_smi(number)
    return {name: value for name, value in found.items() if value}


def read_nvidia_smi(number: int) -> dict[str, float]:
    """Read clock, bus and power limit of a GPU from nvidia-smi; an empty dict without it."""
    query = [f"--query-gpu={','.join(NVIDIA_SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--id={number}", *query],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return parse_nvidia_smi(answer)


def parse_nvidia_smi(answer: str) -> dict[str, float]:
    """Parse one line of output from nvidia-smi; fields without a number are left out.

    Examples:
        >>> parse_nvidia_smi("1980, 3201, 5, 16, [N/A]")["clock_hz"]
        1980000000.0
    """
    found = {}
    values = next(csv.reader(io.StringIO(answer), skipinitialspace=True), [])
    for (name, factor), value in zip(NVIDIA_SMI_FIELDS.values(), values, strict=False):
        try:
            found[name] = float(value) * factor
        except ValueError:
            continue
    return found


# --- a table --------------------------------------------------------------------------------------

ROWS = {  # label: key of a description, and unit (b: bytes, g: GHz, n: a number)
    "cores (CPU)": ("physical_cores", "n"),
    "float32 numbers per instruction (CPU)": ("numbers_per_instruction", "n"),
    "SMs (GPU)": ("sms", "n"),
    "threads per warp (GPU)": ("threads_per_warp", "n"),
    "largest number of threads on an SM (GPU)": ("threads_per_sm", "n"),
    "registers per SM, 4 bytes each (GPU)": ("registers_per_sm", "n"),
    "clock": ("clock_hz", "g"),
    "L1 cache per core": ("l1_cache_bytes", "b"),
    "L1 cache and shared memory per SM": ("shared_memory_per_sm_bytes", "b"),
    "L2 cache": ("l2_cache_bytes", "b"),
    "L3 cache": ("l3_cache_bytes", "b"),
    "memory": ("memory_bytes", "b"),
    "width of the memory bus (bits)": ("memory_bus_bits", "n"),
    "PCI Express lanes to the host": ("pcie_lanes", "n"),
    "power limit (W)": ("power_limit_watts", "n"),
}


def hardware_table(devices: dict[str, dict[str, Any]]) -> pd.DataFrame:
    """Make a table of hardware properties, with a column for each device.

    Args:
        devices: Descriptions from `describe_devices`, by the heading of their column.

    Returns:
        A data frame of texts with a row for each property that is known for at least one device.
        The text is empty if a property is unknown for a device or does not apply to it.

    Examples:
        >>> hardware_table({"mine": {"physical_cores": 2, "l1_cache_bytes": 32768}})[
        ...     "mine"
        ... ].tolist()
        ['2', '32 KiB']
    """
    table = {
        heading: {
            row: name_quantity(description[key], unit)
            for row, (key, unit) in ROWS.items()
            if key in description
        }
        for heading, description in devices.items()
    }
    rows = [row for row in ROWS if any(row in column for column in table.values())]
    return pd.DataFrame(table, index=rows).fillna("")


def name_quantity(value: float, unit: str) -> str:
    """Format a number of a description: bytes (`b`), a clock rate (`g`) or a count (`n`).

    Examples:
        >>> name_quantity(50 * 2**20, "b"), name_quantity(1.98e9, "g"), name_quantity(65536, "n")
        ('50 MiB', '1.98 GHz', '65,536')
    """
    if unit == "g":
        return f"{value / 1e9:.2f} GHz"
    if unit == "n":
        return f"{value:,.0f}"
    for name, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if value >= factor:
            return f"{value / factor:.0f} {name}"
    return f"{value / 2**10:.0f} KiB"
