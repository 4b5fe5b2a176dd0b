"""Assert that two training steps compute the same function."""

from __future__ import annotations

import math
from collections.abc import Callable

from gpulab.audits._audit import Audit, audit
from gpulab.audits._comparison import Result
from gpulab.audits._findings import FAULTS, Finding, describe
from gpulab.settings import Setting
from gpulab.testing._failure import Message, fail

# Kinds of findings that leave open whether two steps compute the same results.
UNDECIDED = ("different random numbers", "cannot be told")
MAX_LISTED = 3  # results and findings in a message


def assert_same(
    step_a: Callable[..., object],
    step_b: Callable[..., object],
    *,
    setting: str | Setting = "cpu",
    msg: Message = None,
) -> None:
    """Assert that two training steps give the same results, up to what rounding explains.

    Use it to test a change that must not change the results: a different attention kernel,
    checkpointing, accumulated gradients, another implementation of an optimizer, a step after a
    resume. Both steps are audited (`gpulab.audit`): everything that they return, every gradient,
    and every updated parameter, buffer and optimizer state is compared in float64, so that no
    tolerance has to be chosen.

    The assertion fails:

    - on every finding that is a fault (`gpulab.audits.Audit.faulty`), such as a mismatch or
      overwritten memory;
    - if only one step has a result, such as a gradient that the other step does not compute;
    - if only one step computes in a format shorter than float32;
    - if the audit is inconclusive, because the steps drew different random numbers or have no
      float64 reference.

    It does not fail if an operation does not repeat its results bit for bit, or if several answers
    are correct.

    Args:
        step_a: A `Step`, or a function that does one training step, as for `gpulab.record`.
        step_b: The step to compare with it.
        setting: The setting under which both are executed.
        msg: The failure message, or a function that makes it from the default message, as in
            `torch.testing.assert_close`.

    Raises:
        AssertionError: If the steps do not give the same results. The message names the results,
            the ratios of their differences to what rounding explains, and the line where the steps
            begin to differ.
        UsageError: If `step_a` or `step_b` is not a step, or if it fails.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> from torch.nn.functional import cross_entropy
        >>> x, labels = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
        >>> weight = torch.randn(4, 3, requires_grad=True)
        >>> def whole_batch():
        ...     cross_entropy(x @ weight, labels).backward()
        >>> def accumulated(sizes=(4, 2)):
        ...     for x_part, labels_part in zip(x.split(sizes), labels.split(sizes)):
        ...         share = len(x_part) / len(x)
        ...         (share * cross_entropy(x_part @ weight, labels_part)).backward()
        >>> gl.testing.assert_same(whole_batch, accumulated)
        >>> def mean_of_means():
        ...     for x_part, labels_part in zip(x.split(4), labels.split(4)):
        ...         (cross_entropy(x_part @ weight, labels_part) / 2).backward()
        >>> gl.testing.assert_same(whole_batch, mean_of_means)
        Traceback (most recent call last):
        AssertionError: mean_of_means does not compute what whole_batch computes...
    """
    __tracebackhide__ = True
    report = audit(step_a, step_b, setting=setting, progress=False)
    assert isinstance(report, Audit)
    reasons = _describe_failures(report)
    if reasons:
        fail("\n".join(reasons), msg)


def _describe_failures(report: Audit) -> list[str]:
    """Return the lines of the message; empty if the steps compute the same results."""
    comparison = report.comparison
    findings = [f for f in report.findings if f.kind in (*FAULTS, *UNDECIDED)]
    findings += _one_sided_precision(report)
    name_a = comparison.a.step or "the step"
    name_b = comparison.b.step or "the step"
    only_one = [
        f"{describe(result.representative)}: only {name_b if result.b else name_a} computes it"
        for result in comparison.unpaired_results
    ]
    if not any(result.a and result.b for result in comparison.results):
        summary = f"{name_b} and {name_a} have no result in common, so nothing was compared."
        return [summary, *only_one]
    if not findings and not only_one:
        return []
    kinds = {finding.kind for finding in findings}
    verb = "does not compute"
    if kinds and kinds <= {*UNDECIDED}:
        verb = "cannot be shown to compute"
    elif kinds == {"reduced precision"}:
        verb = "computes in another number format"
    differing = [result for result in comparison.differing_results if result.a and result.b]
    differing.sort(key=lambda result: -result.gap)
    lines = [f"{name_b} {verb} what {name_a} computes."]
    lines += [_describe_difference(report, result) for result in differing[:MAX_LISTED]]
    if len(differing) > MAX_LISTED:
        lines.append(f"{len(differing) - MAX_LISTED} more results differ")
    return [*lines, *only_one, *map(str, findings[:MAX_LISTED])]


def _one_sided_precision(report: Audit) -> list[Finding]:
    """Return the findings of reduced precision if only one side has any."""
    findings = [finding for finding in report.findings if finding.kind == "reduced precision"]
    settings = {finding.setting for finding in findings}
    is_shared = any(finding.under_both for finding in findings)
    return findings if len(settings) == 1 and not is_shared else []


def _describe_difference(report: Audit, result: Result) -> str:
    """Describe the difference of a result between the two steps, in units of rounding."""
    comparison = report.comparison
    values = [*comparison.values(result.a), *comparison.values(result.b)]
    deviation = max((value.deviation for value in values), default=math.nan)
    difference = f"{describe(result.representative)} differs by {result.gap:.1e} (relative)"
    if not deviation or not math.isfinite(deviation):
        return difference
    return (
        f"{difference}, {result.gap / deviation:.3g} times the rounding errors of the two steps"
        f" ({deviation:.1e})"
    )
