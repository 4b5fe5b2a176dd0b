"""Notebook 11: public questions about CPU and GPU differences, and what an audit answers first."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from companion.benchmarks import benchmark
from companion.cartpole import cartpole as learn_cartpole  # noqa: F401 (the module has the other name)

QUESTIONS = (  # of benchmarks/correctness/public_cases.py
    *(
        "times one",
        "long short term memory",
        "drawn in another type",
        "basis of equal singular values",
    ),
    *("reset gate before or after", "one buffer for every frame"),
)


def public_questions(names: Iterable[str] = QUESTIONS) -> pd.DataFrame:
    """The first line of the audit of public questions, beside the cause confirmed there."""
    cases = benchmark("correctness/public_cases")
    chosen_cases = [case for case in cases.CASES if case.name.replace("_", " ") in set(names)]
    first_lines = cases.run(chosen_cases).set_index("case").rename_axis("question")
    words = {"a": "setting", "b": "against", "at": "first at", "cause": "confirmed there"}
    return first_lines.rename(columns=words)[
        ["thread", "setting", "against", "said", "first at", "confirmed there"]
    ]
