"""The twelve machines of the article and some newer GPUs, with their manufacturers' numbers.

Sources: Intel's product specifications (ark.intel.com), AMD's product pages, NVIDIA's product pages
and architecture white papers (Maxwell GM107 and GM204, Pascal GP104, Turing, Ampere GA102, Ada) and
data sheets (V100, A100, H100, H200, B200), AMD's page of the RX 7900 XTX, Intel's of the Arc A770
(float32 at 2.4 GHz). The list of machines is that of the article on arXiv 2109.01451.
"""

from __future__ import annotations

import pandas as pd

FLOP_PER_CYCLE = 32  # of a core with AVX2: 2 instructions of 8 multiplications and additions
FLOP_PER_CORE = 2  # per cycle of a CUDA core: one multiplication and one addition
# Name, year, cores, threads, base clock in GHz, memory bandwidth in GB/s.
PROCESSORS = [
    ("Intel i5-4590", 2014, 4, 4, 3.3, 25.6),
    ("Intel i7-6700K", 2015, 4, 8, 4.0, 34.1),
    ("Intel i7-6800K", 2016, 6, 12, 3.4, 76.8),
    ("Intel i5-7600K", 2017, 4, 4, 3.8, 38.4),
    ("Intel i7-7700K", 2017, 4, 8, 4.2, 38.4),
    ("Intel i7-9700", 2019, 8, 8, 3.0, 41.6),
    ("Intel i5-9400", 2019, 6, 6, 2.9, 41.6),
    ("AMD Ryzen 5 3600", 2019, 6, 12, 3.6, 51.2),
]
# Name, year, SMs, cores per SM, boost clock in GHz, memory bandwidth in GB/s, memory in GB.
GRAPHICS_CARDS = [
    ("GTX 750 Ti", 2014, 5, 128, 1.085, 86.4, 2),
    ("GTX 970", 2014, 13, 128, 1.178, 224.0, 4),
    ("GTX 1080", 2016, 20, 128, 1.733, 320.0, 8),
    ("GTX 1080 Ti", 2017, 28, 128, 1.582, 484.0, 11),
    ("RTX 2080 Ti", 2018, 68, 64, 1.545, 616.0, 11),
    ("Titan RTX", 2018, 72, 64, 1.770, 672.0, 24),
    ("RTX 2060 Super", 2019, 34, 64, 1.650, 448.0, 8),
    ("RTX 2070 Super", 2019, 40, 64, 1.770, 448.0, 8),
]
# The machines: CPU, number of threads used (0: not reported), and GPU, if any.
MACHINES = [
    ("Intel i5-4590", 4, ""),
    ("Intel i7-6800K", 1, ""),
    ("Intel i5-7600K", 4, ""),
    ("AMD Ryzen 5 3600", 6, ""),
    ("Intel i5-7600K", 0, "GTX 750 Ti"),
    ("Intel i5-7600K", 0, "GTX 970"),
    ("Intel i7-6700K", 0, "GTX 1080"),
    ("Intel i7-7700K", 0, "GTX 1080 Ti"),
    ("Intel i7-9700", 0, "RTX 2080 Ti"),
    ("Intel i5-7600K", 0, "RTX 2060 Super"),
    ("AMD Ryzen 5 3600", 0, "RTX 2070 Super"),
    ("Intel i5-9400", 0, "Titan RTX"),
]
# Name, year, GB/s, and Tflop/s in float32 and, on tensor cores, in float16 (dense matrices).
DATA_CENTRE_GPUS = [
    ("V100", 2017, 900, 15.7, 125.0),
    ("A100", 2020, 2039, 19.5, 312.0),
    ("H100", 2022, 3350, 67.0, 990.0),
    ("H200", 2024, 4800, 67.0, 990.0),
    ("B200", 2025, 8000, 75.0, 2250.0),
]
# Maker, name, year, GB/s, Tflop/s in float32, memory in GB, and the device in torch.
CONSUMER_GPUS = [
    ("NVIDIA", "RTX 3090", 2020, 936, 35.6, 24, "cuda"),
    ("NVIDIA", "RTX 4090", 2022, 1008, 82.6, 24, "cuda"),
    ("AMD", "RX 7900 XTX", 2022, 960, 61.4, 24, "cuda"),
    ("Intel", "Arc A770", 2022, 560, 19.7, 16, "xpu"),
]


def published_machines() -> pd.DataFrame:
    """List the article's twelve machines with the specifications of the device that trained.

    Returns:
        A data frame with a row for each machine: `machine`, `trained on` (`CPU` or `GPU`), `year`,
        `cores or SMs`, `threads used` (of a CPU, as reported by the article), `GB/s` of its memory,
        and `Gflop/s` in float32. For a CPU, the latter is cores × base clock × 32 (two AVX2
        instructions of eight multiplications and additions per cycle); for a GPU, it is cores ×
        boost clock × 2.

    Examples:
        >>> table = published_machines()
        >>> len(table), table["trained on"].value_counts().to_dict()
        (12, {'GPU': 8, 'CPU': 4})
    """
    processors = {row[0]: row for row in PROCESSORS}
    cards = {row[0]: row for row in GRAPHICS_CARDS}
    rows = []
    for processor, threads, card in MACHINES:
        if card:
            _, year, units, cores, clock, bandwidth, _ = cards[card]
            gflops = FLOP_PER_CORE * units * cores * clock
        else:
            _, year, units, _, clock, bandwidth = processors[processor]
            gflops = FLOP_PER_CYCLE * units * clock
        rows.append(
            {
                "machine": f"{processor} + {card}" if card else processor,
                "trained on": "GPU" if card else "CPU",
                "year": year,
                "cores or SMs": units,
                "threads used": threads or "",
                "GB/s": bandwidth,
                "Gflop/s": round(gflops),
            }
        )
    return pd.DataFrame(rows)


def gpu_generations() -> pd.DataFrame:
    """List NVIDIA's data-centre GPUs with the numbers of their data sheets, the newest last.

    Returns:
        A data frame with `card`, `year`, `GB/s`, `Gflop/s, float32` without tensor cores,
        `Gflop/s` of float16 products on tensor cores, and `ridge`, the number of flop per byte
        above which such a product is limited by arithmetic.

    Examples:
        >>> gpu_generations().card.tolist()
        ['V100', 'A100', 'H100', 'H200', 'B200']
    """
    names = ["card", "year", "GB/s", "Gflop/s, float32", "Gflop/s"]
    table = pd.DataFrame(DATA_CENTRE_GPUS, columns=names)
    table[["Gflop/s, float32", "Gflop/s"]] *= 1000
    return table.assign(ridge=table["Gflop/s"] / table["GB/s"])


def consumer_gpus() -> pd.DataFrame:
    """List cards for desktop computers with the numbers of their makers' data sheets.

    Returns:
        A data frame with `maker`, `card`, `year`, `GB/s`, `Gflop/s` in float32, `GB` of memory,
        the `device` of torch, and `ridge`, the number of flop per byte above which a float32
        product is limited by arithmetic.

    Examples:
        >>> consumer_gpus().card.tolist()
        ['RTX 3090', 'RTX 4090', 'RX 7900 XTX', 'Arc A770']
    """
    names = ["maker", "card", "year", "GB/s", "Gflop/s", "GB", "device"]
    table = pd.DataFrame(CONSUMER_GPUS, columns=names)
    table["Gflop/s"] *= 1000
    return table.assign(ridge=table["Gflop/s"] / table["GB/s"])
