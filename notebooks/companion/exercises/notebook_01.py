"""Checks of the exercises in `01_devices.ipynb`."""

from __future__ import annotations

from companion.exercises.answers import (
    Answer,
    choice,
    exercise,
    fields,
    near,
    need,
    number,
    pair,
    table,
)
from gpulab.device import recorded_rooflines


@exercise("01-1", "a number, in flop per byte")
def _intensity(answer: Answer) -> str:
    one, many = (
        2 * 784 * 128 * images / (4 * (784 * 128 + images * (784 + 128))) for images in (1, 64)
    )
    mistakes = {
        one: "this is the intensity for one image, not for 64",
        many / 2: (
            "this is half the right number. A multiplication and its addition count as two"
            " operations, and a float32 has 4 bytes"
        ),
        4 * many: "four times too large: count bytes, not numbers",
    }
    near(answer, many, mistakes)
    return (
        f"{many:.3g} flop per byte, {many / one:.0f} times that of one image, because the weights"
        " are read only once."
    )


@exercise(
    "01-2",
    "(table, 'memory') or (table, 'arithmetic'): both rooflines in one table, and the limit that"
    " drops more",
)
def _ceilings(answer: Answer) -> str:
    frame, falls_more = pair(answer)
    frame = table(frame, "setting", "kind", "gflops", "gigabytes_per_second")
    need(
        {"cpu", "cpu:threads=1"} <= set(frame.setting),
        "rows of cpu or of cpu:threads=1 are missing: use pd.concat",
    )
    memory = frame[frame.kind == "memory"].groupby("setting").gigabytes_per_second.max()
    arithmetic = frame[frame.kind == "matrix"].groupby("setting").gflops.max()
    of_memory, of_arithmetic = (
        speed["cpu"] / speed["cpu:threads=1"] for speed in (memory, arithmetic)
    )
    numbers = (
        f"with all threads, the memory limit is {of_memory:.2f} times and the arithmetic limit"
        f" {of_arithmetic:.2f} times that of one thread"
    )
    right = "memory" if of_memory > of_arithmetic else "arithmetic"
    need(choice(falls_more, "memory", "arithmetic") == right, f"in this table, {numbers}")
    return f"{numbers}. Cores compute independently but share the path to memory."


@exercise(
    "01-3",
    "{'cpu': {'gflops': …, 'watts': …}, 'cuda': {'gflops': …, 'watts': …}}, for the"
    " autoencoder's layer",
)
def _per_joule(answer: Answer) -> str:
    per_joule = []
    for device in ("cpu", "cuda"):
        row = fields(fields(answer, "cpu", "cuda")[device], "gflops", "watts")
        rate, watts = number(row["gflops"]), number(row["watts"])
        need(1 <= watts <= 2000, f"{device}: expected 1 to 2000 watts, got {watts:g}")
        per_joule.append(f"{rate / watts:.2g}")
    layer = recorded_rooflines().query("operation.str.startswith('autoencoder')").gflops.max()
    need(
        rate < 10 * layer,
        f"{rate:g} Gflop/s is near the GPU's peak, but this layer was recorded at {layer:.3g}",
    )
    return (
        f"Gflop per joule: {' on the CPU, '.join(per_joule)} on the GPU. The watts on a data sheet"
        " are for full load."
    )
