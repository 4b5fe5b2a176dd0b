"""Public questions about CPU and GPU differences, with the first line of an audit (notebook 11)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pandas as pd
import torch

from companion.benchmarks import benchmark
from companion.cartpole import cartpole as learn_cartpole  # noqa: F401 (the module is named cartpole)

QUESTIONS = (  # from benchmarks/correctness/public_cases.py
    *(
        "times one",
        "long short term memory",
        "drawn in another type",
        "basis of equal singular values",
    ),
    *("reset gate before or after", "one buffer for every frame"),
)


def pitches_title(loudness: Mapping[str, torch.Tensor]) -> str:
    """Count the different pitches in each recording.

    Args:
        loudness: For each condition, the spectra (chunks, frequencies) of a recording. The pitch of
            a chunk is its loudest frequency.

    >>> rising, same = torch.eye(4), torch.eye(4)[[3, 3, 3, 3]]
    >>> print(pitches_title({"overwritten frames": same, "copied frames": rising}))
    Pitches heard: 1 with overwritten frames and 4 with copied frames
    """
    counts = [
        f"{len(spectra.argmax(dim=1).unique())} with {condition}"
        for condition, spectra in loudness.items()
    ]
    return f"Pitches heard: {' and '.join(counts)}"


def public_questions(names: Iterable[str] = QUESTIONS) -> pd.DataFrame:
    """Audit public questions: a table with the first line of each audit and the confirmed cause."""
    cases = benchmark("correctness/public_cases")
    chosen_cases = [case for case in cases.CASES if case.name.replace("_", " ") in set(names)]
    first_lines = cases.run(chosen_cases).set_index("case").rename_axis("question")
    # The causes are docstrings, some of which have line breaks.
    first_lines["cause"] = first_lines.cause.str.split().str.join(" ")
    words = {"a": "setting", "b": "against", "at": "first at", "cause": "confirmed there"}
    return first_lines.rename(columns=words)[
        ["thread", "setting", "against", "said", "first at", "confirmed there"]
    ]
