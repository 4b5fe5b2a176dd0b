"""Checks of the exercises in `03_autoencoder.ipynb`."""

from __future__ import annotations

from companion.exercises.answers import (
    Answer,
    decisions,
    exercise,
    fields,
    judged,
    near,
    need,
    recorded,
)
from gpulab.stats import verdict


@exercise("03-1", "a number of settings out of the five")
def _enough_to_matter(answer: Answer) -> str:
    quick = recorded("autoencoder", "quick", loader="window")
    narrow, usual = (
        list(verdict(quick, reference="cpu", margin=m).decisions.values()) for m in ("0.02sd", None)
    )
    mistakes = {
        narrow.count("equivalent"): "the number of equivalent settings, not of different ones",
        usual.count(
            "different"
        ): "the number with the usual margin of a quarter of the sd: pass margin='0.02sd'",
    }
    near(answer, narrow.count("different"), mistakes, rel=1e-6)
    return (
        "the differences are the same, but the margin is smaller. Decide what matters before you"
        " look; no run can decide it for you."
    )


@exercise("03-2", "a verdict on at least six seeds, with cpu:precision=bfloat16 among the settings")
def _in_bfloat16(answer: Answer) -> str:
    by_setting = judged(answer, "setting")
    levels = ", ".join(map(str, by_setting.decisions))
    need(
        "emulate=bfloat16" not in levels,
        "emulate=bfloat16 rounds only factors of products: use precision=bfloat16",
    )
    need(
        "precision=bfloat16" in levels,
        f"bfloat16 is not among the settings that are compared with the reference: {levels}",
    )
    return f"{decisions(by_setting)}, with {int(by_setting.table.seeds.min())} seeds."


@exercise(
    "03-3", "{1: verdict, 32: verdict}, by images per update, each comparing TF32 with float32"
)
def _batches_of_32(answer: Answer) -> str:
    one, many = (judged(fields(answer, 1, 32)[images], "setting", seeds=3) for images in (1, 32))
    for by_setting in (one, many):
        levels = [str(by_setting.reference), *map(str, by_setting.decisions)]
        rounded = ["tf32=on" in level or "emulate=" in level for level in levels]
        need(
            any(rounded) and not all(rounded),
            f"TF32 and float32 are not both among {', '.join(levels)}",
        )
    same = set(one.runs.protocol) & set(many.runs.protocol)
    need(
        not same,
        "both verdicts have the same protocol: model_options={'batch_size': 32} had no effect",
    )
    outcomes = [
        f"{v.table.same_bits.iloc[-1]:.0f} of {v.table.seeds.iloc[-1]} seeds" for v in (one, many)
    ]
    return f"{outcomes[0]} have the same bits with one image per update, {outcomes[1]} with 32."
