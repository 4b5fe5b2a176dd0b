"""Checks of the exercises in `11_in_the_wild.ipynb`."""

from __future__ import annotations

from companion.exercises.answers import Answer, exercise, fields, need, number, pair, shown
from gpulab.guards import Guard


@exercise(
    "11-1",
    "(overwritten, copied): how many of five batches are different, with torch.as_tensor and with"
    " torch.tensor",
)
def _two_buffers(answer: Answer) -> str:
    overwritten, copied = map(number, pair(answer))
    need(overwritten != 5, "each batch is in one of two buffers: which holds the third?")
    need(
        overwritten == 2,
        f"{overwritten:g} is wrong: there are two buffers, and each holds one batch at a time",
    )
    need(copied == 5, f"{copied:g} is wrong: a copy does not change")
    return (
        "two buffers hold two batches, however many are kept. Code that never keeps more than two"
        " appears to be correct."
    )


@exercise(
    "11-2",
    "(wrong, fixed): the reports of two guards with reads='any'; the one that finds something"
    " comes first",
)
def _found_and_mended(answer: Answer) -> str:
    wrong, mended = pair(answer)
    for report in (wrong, mended):
        need(
            isinstance(report, Guard),
            f"{shown(report)} is not a report: `with gl.guard(…) as report:` gives one",
        )
    need(
        wrong.findings,
        "the first guard found nothing. Was the array filled again, and a tensor read after that?",
    )
    causes = {finding.cause for finding in wrong.findings}
    need(
        "together" in causes,
        f"the first guard found {', '.join(sorted(causes))}: read the three in one operation",
    )
    need(
        not mended.findings,
        "the second guard also found something: is there another line that keeps the array?",
    )
    return f"found: {wrong.findings[0].explanation}. After the fix, nothing is found."


@exercise(
    "11-3", "{'library': …, 'shares': True or False, 'evidence': a line of code that shows it}"
)
def _library(answer: Answer) -> str:
    entry = fields(answer, "library", "shares", "evidence")
    need(
        isinstance(entry["shares"], bool),
        f"expected shares to be True or False, got {shown(entry['shares'])}",
    )
    evidence = entry["evidence"]
    need(
        isinstance(evidence, str) and len(evidence) > 10,
        f"expected evidence to be a line and what it printed, got {shown(evidence)}",
    )
    advice = (
        "code that keeps the array has to copy it"
        if entry["shares"]
        else "the array can be kept, as long as this does not change"
    )
    return f"{entry['library']}: {advice}. You can write a test that checks this in other releases."
