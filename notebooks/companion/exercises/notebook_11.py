"""Checks of the exercises in `11_in_the_wild.ipynb`."""

from __future__ import annotations

from companion.exercises.answers import Answer, exercise, fields, need, number, pair, shown
from gpulab.guards import Guard


@exercise(
    "11-1",
    "(overwritten, copied): how many different batches of five, by torch.as_tensor and by"
    " torch.tensor",
)
def _two_buffers(answer: Answer) -> str:
    overwritten, copied = map(number, pair(answer))
    need(overwritten != 5, "each batch lies in one of two buffers: which holds the third?")
    need(
        overwritten == 2,
        f"{overwritten:g}: there are two buffers, and each holds one batch at a time",
    )
    need(copied == 5, f"{copied:g}: a copy stays what it was")
    return (
        "two buffers are two batches, however many are kept. Code that never keeps more than two"
        " seems right."
    )


@exercise(
    "11-2",
    "(wrong, mended): the reports of two guards with reads='any', the one that finds something"
    " first",
)
def _found_and_mended(answer: Answer) -> str:
    wrong, mended = pair(answer)
    for report in (wrong, mended):
        need(
            isinstance(report, Guard),
            f"{shown(report)} is no report: `with gl.guard(…) as report:` gives it",
        )
    need(
        wrong.findings,
        "the first guard found nothing. Was the array filled again, and read after that?",
    )
    causes = {finding.cause for finding in wrong.findings}
    need(
        "together" in causes,
        f"the first guard found {', '.join(sorted(causes))}: read the three in one operation",
    )
    need(
        not mended.findings,
        "the second guard found something, too: is there another line that keeps the array?",
    )
    return f"found: {wrong.findings[0].explanation}. After one line was changed nothing is found."


@exercise(
    "11-3", "{'library': …, 'shares': True or False, 'evidence': a line of code that shows it}"
)
def _library(answer: Answer) -> str:
    entry = fields(answer, "library", "shares", "evidence")
    need(isinstance(entry["shares"], bool), f"shares {shown(entry['shares'])}: True or False")
    evidence = entry["evidence"]
    need(
        isinstance(evidence, str) and len(evidence) > 10,
        f"evidence {shown(evidence)}: a line, and what it printed",
    )
    advice = (
        "whoever keeps it has to copy"
        if entry["shares"]
        else "it may be kept, as long as that stays so"
    )
    return (
        f"{entry['library']}: {advice}. Would another release do the same? A test of yours can ask."
    )
