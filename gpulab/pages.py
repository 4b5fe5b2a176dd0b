"""Common parts of the HTML pages of audits and verdicts: tables, badges and lines below titles.

The CSS classes are defined in `templates/result.css`.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from dataclasses import dataclass

from markupsafe import Markup

from gpulab import report
from gpulab.files import JSON
from gpulab.passports import machine


@dataclass(frozen=True)
class Head:
    """A header cell of the table.

    Attributes:
        text: Its text.
        is_number: Whether it is aligned like numbers.
        columns: The number of columns that it spans.
        rows: The number of header rows that it spans.
    """

    text: str | Markup
    is_number: bool = False
    columns: int = 1
    rows: int = 1


@dataclass(frozen=True)
class Cell:
    """A cell of the table: its text and its CSS classes."""

    text: str | Markup
    css_class: str = ""


@dataclass(frozen=True)
class Rows:
    """A table of the page.

    Attributes:
        title: Its title.
        note: Sentences that explain the columns and the order of the rows.
        heads: Two header rows.
        rows: The rows, sorted.
    """

    title: str
    note: str
    heads: list[list[Head]]
    rows: list[list[Cell]]


def style() -> Markup:
    """Return the style sheet as an HTML element, which a notebook needs with each output."""
    return Markup("<style>\n{}</style>\n").format(report.render("result.css"))


def number_cell(text: str | Markup, is_large: bool = False) -> Cell:
    """Make a cell that is aligned as a number; a large number is emphasised."""
    return Cell(text, "ga-number ga-strong" if is_large else "ga-number")


def badge(rank: str, text: str) -> Markup:
    """Return a text as a badge, whose colour shows its rank: `fault`, `note`, `ok` or `open`."""
    return Markup('<span class="ga-badge ga-{}">{}</span>').format(rank, text)


def time_text() -> str:
    """Return the local date and time as a text."""
    local_time = datetime.datetime.now().astimezone()
    return f"{local_time.day} {local_time:%B %Y, %H:%M}"


def machine_text(passport: Mapping[str, JSON], kind: str) -> str:
    """Return the names of the GPUs in a passport, or the name of its CPU.

    A passport that was read from a file may be incomplete. The result is then `unknown machine`.

    Args:
        passport: The passport, as `gpulab.passports.passport` returns it.
        kind: `cpu` for the name of the CPU, or the kind of a GPU, such as `cuda`, for the names of
            the GPUs. If it is empty, these are the names of the GPUs if there are any.

    >>> machine_text({"cpu": {"model": "EPYC"}, "gpus": [{"name": "H200"}]}, kind="cpu")
    'EPYC'
    >>> machine_text({}, kind="cpu")
    'unknown machine'
    """
    try:
        return str(machine(passport, kind))
    except (KeyError, TypeError):
        return "unknown machine"


def versions_text(passport: Mapping[str, JSON]) -> str:
    """Return the versions of gpulab and torch in a passport as a text.

    >>> versions_text({"software": {"gpulab": "1.0", "torch": "2.11"}}), versions_text({})
    ('gpulab 1.0, torch 2.11', 'unknown versions')
    """
    software = passport.get("software")
    versions = software if isinstance(software, Mapping) else {}
    return (
        ", ".join(f"{name} {versions[name]}" for name in ("gpulab", "torch") if versions.get(name))
        or "unknown versions"
    )


def breakable(name: str) -> Markup:
    """Return a name as HTML that may wrap after commas, dots and underscores.

    >>> str(breakable("cpu:threads=1,order=pairwise"))
    'cpu:threads=1,<wbr>order=pairwise'
    """
    return Markup("<wbr>").join(re.split(r"(?<=[,._])", name))
