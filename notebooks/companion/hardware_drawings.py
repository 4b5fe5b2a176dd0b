"""Drawings of notebook 01: what is inside a CPU and a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from matplotlib.patches import Rectangle

from companion.drawings import FRAME_COLOUR, _blank_axes, _draw_arrow, _draw_box, _label
from companion.hardware import name_quantity
from gpulab.plots import Picture
from gpulab.plots.theme import FAINT, INK, ON_CPU, ON_GPU

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Description = Mapping[str, Any]  # from `companion.hardware.describe_devices`
MAX_DRAWN_CORES = 16
CONTROL_COLOUR = "#E69F00"
CACHE_COLOUR = "#56B4E9"
ARITHMETIC_COLOUR = "#009E73"


def draw_devices(cpu: Description, gpu: Description) -> Picture:
    """Draw a CPU and a GPU side by side, with the numbers of their descriptions.

    Args:
        cpu: A description from `companion.hardware.describe_cpu`.
        gpu: A description from `companion.hardware.describe_gpu`.
    """
    figure, axes = _blank_axes(7.6, 5.0, (-0.1, 12.4), (-1.0, 7.6))
    cores = int(cpu["physical_cores"])
    sms = int(gpu["sms"])
    _draw_chip(axes, (0.0, 2.35), 4.9, 4.3, ON_CPU)
    _draw_chip(axes, (7.3, 2.35), 4.9, 4.3, ON_GPU)
    _label(axes, (0.0, 7.3), f"CPU: {cpu['name']}", ON_CPU, "left")
    _label(axes, (7.3, 7.3), f"GPU: {gpu['name']}", ON_GPU, "left")
    _draw_cores(axes, (0.15, 3.45), 4.6, 3.05, min(cores, MAX_DRAWN_CORES))
    _draw_multiprocessors(axes, (7.45, 3.45), 4.6, 3.05, sms)
    _draw_cache(axes, (0.15, 2.5), 4.6, _cache_words(cpu, "l3_cache_bytes", "L3 cache"))
    _draw_cache(axes, (7.45, 2.5), 4.6, _cache_words(gpu, "l2_cache_bytes", "L2 cache"))
    _draw_box(
        axes,
        (2.45, 1.1),
        4.9,
        0.9,
        f"memory, {name_quantity(cpu['memory_bytes'], 'b')}",
        FRAME_COLOUR,
    )
    memory = f"device memory, {name_quantity(gpu['memory_bytes'], 'b')}"
    _draw_box(axes, (9.75, 1.1), 4.9, 0.9, memory, FRAME_COLOUR)
    for x in (2.45, 9.75):
        _draw_arrow(axes, (x, 1.6), (x, 2.32), INK)
        _draw_arrow(axes, (x, 2.3), (x, 1.58), INK)
    _draw_arrow(axes, (5.0, 1.1), (7.25, 1.1), INK)
    _draw_arrow(axes, (7.2, 1.1), (4.95, 1.1), INK)
    _label(axes, (6.1, 1.45), _bus_words(gpu), INK, "center", "bottom")
    _draw_key(axes)
    cpu_words = f"{cores} cores" + _clock_words(cpu)
    gpu_words = f"{sms} SMs" + _clock_words(gpu)
    drawn = "" if cores <= MAX_DRAWN_CORES else f" ({MAX_DRAWN_CORES} are drawn)"
    _label(axes, (0.0, 6.9), f"{cpu_words}{drawn}", INK, "left")
    _label(axes, (7.3, 6.9), gpu_words, INK, "left")
    return Picture(
        figure,
        f"A CPU next to a GPU. The CPU, {cpu['name']}, has {cpu_words}: each is large, with a lot"
        f" of control logic and cache and few arithmetic units. The GPU, {gpu['name']}, has"
        f" {gpu_words}: each is small and consists mostly of arithmetic units. Each device has a"
        " shared cache and its own memory; a bus connects the two memories.",
    )


def _draw_chip(
    axes: Axes, corner: tuple[float, float], width: float, height: float, tint: str
) -> None:
    """Draw the outline of a chip."""
    axes.add_patch(Rectangle(corner, width, height, facecolor="white", edgecolor=tint, lw=2))


def _draw_cores(
    axes: Axes, corner: tuple[float, float], width: float, height: float, cores: int
) -> None:
    """Draw the cores of a CPU, each with control, cache and some arithmetic units."""
    columns = next(count for count in (1, 2, 4) if count * count >= cores or count == 4)
    rows = -(-cores // columns)
    for number in range(cores):
        x = corner[0] + (number % columns) * width / columns
        y = corner[1] + height - (number // columns + 1) * height / rows
        core_width = 0.94 * width / columns
        core_height = 0.92 * height / rows
        _fill(axes, x, y, core_width, core_height, "white")
        _fill(axes, x, y + 0.55 * core_height, 0.5 * core_width, 0.45 * core_height, CONTROL_COLOUR)
        _fill(axes, x, y, core_width, 0.5 * core_height, CACHE_COLOUR)
        for unit in range(4):
            left = x + (0.54 + 0.115 * unit) * core_width
            _fill(
                axes,
                left,
                y + 0.55 * core_height,
                0.1 * core_width,
                0.45 * core_height,
                ARITHMETIC_COLOUR,
            )


def _draw_multiprocessors(
    axes: Axes, corner: tuple[float, float], width: float, height: float, sms: int
) -> None:
    """Draw the SMs of a GPU, each with little control and cache and many arithmetic units."""
    columns = max(1, round((sms * width / height) ** 0.5))
    rows = -(-sms // columns)
    for number in range(sms):
        x = corner[0] + (number % columns) * width / columns
        y = corner[1] + height - (number // columns + 1) * height / rows
        sm_width = 0.88 * width / columns
        sm_height = 0.88 * height / rows
        _fill(axes, x, y, sm_width, sm_height, ARITHMETIC_COLOUR)
        _fill(axes, x, y, sm_width, 0.18 * sm_height, CACHE_COLOUR)
        _fill(axes, x, y + 0.86 * sm_height, sm_width, 0.14 * sm_height, CONTROL_COLOUR)


def _fill(axes: Axes, x: float, y: float, width: float, height: float, tint: str) -> None:
    """Draw a filled rectangle with a thin edge."""
    axes.add_patch(Rectangle((x, y), width, height, facecolor=tint, edgecolor=FAINT, lw=0.3))


def _draw_cache(axes: Axes, corner: tuple[float, float], width: float, words: str) -> None:
    """Draw the cache that all cores share."""
    _fill(axes, *corner, width, 0.7, CACHE_COLOUR)
    axes.text(corner[0] + width / 2, corner[1] + 0.35, words, ha="center", va="center", fontsize=9)


def _draw_key(axes: Axes) -> None:
    """Explain the colours of the drawing."""
    parts = [
        (CONTROL_COLOUR, "control"),
        (ARITHMETIC_COLOUR, "arithmetic"),
        (CACHE_COLOUR, "cache"),
    ]
    for number, (tint, words) in enumerate(parts):
        x = 2.6 + 2.7 * number
        _fill(axes, x, -0.7, 0.4, 0.4, tint)
        _label(axes, (x + 0.55, -0.5), words, INK, "left")


def _cache_words(device: Description, key: str, name: str) -> str:
    """Return the name of a cache, with its size if known."""
    return f"{name}, {name_quantity(device[key], 'b')}" if key in device else name


def _clock_words(device: Description) -> str:
    """Return the clock of a device, or an empty text if it is unknown."""
    return f" at {device['clock_hz'] / 1e9:.1f} GHz" if "clock_hz" in device else ""


def _bus_words(gpu: Description) -> str:
    """Return the name of the bus between host and GPU, with its generation and lanes if known."""
    if "pcie_generation" not in gpu or "pcie_lanes" not in gpu:
        return "bus"
    return f"PCIe {gpu['pcie_generation']:.0f},\n{gpu['pcie_lanes']:.0f} lanes"
