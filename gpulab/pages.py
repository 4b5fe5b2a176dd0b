"""What the pages of audits and verdicts share: tables, badges, and the lines below the title."""

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
    """A header of the table, above one column or more."""

    text: str | Markup
    is_number: bool = False
    columns: int = 1
    rows: int = 1


@dataclass(frozen=True)
class Cell:
    """A cell of the table, and the classes of `result.css` that it has."""

    text: str | Markup
    css_class: str = ""


@dataclass(frozen=True)
class Rows:
    """A table of the page: its title, how to read it, two header rows, and the sorted rows."""

    title: str
    note: str
    heads: list[list[Head]]
    rows: list[list[Cell]]


def style() -> Markup:
    """The style of such a page as an element, which a notebook needs with each output."""
    return Markup("<style>\n{}</style>\n").format(report.render("result.css"))


def number_cell(text: str | Markup, is_large: bool = False) -> Cell:
    """A cell with a number."""
    return Cell(text, "ga-number ga-strong" if is_large else "ga-number")


def badge(rank: str, text: str) -> Markup:
    """A text on a ground whose colour shows its rank: `fault`, `note`, `ok` or `open`."""
    return Markup('<span class="ga-badge ga-{}">{}</span>').format(rank, text)


def time_text() -> str:
    """The date and the time."""
    local_time = datetime.datetime.now().astimezone()
    return f"{local_time.day} {local_time:%B %Y, %H:%M}"


def machine_text(passport: Mapping[str, JSON], kind: str) -> str:
    """The name of the CPU or of the GPUs; a passport from elsewhere may be incomplete."""
    try:
        return str(machine(passport, kind))
    except (KeyError, TypeError):
        return "unknown machine"


def versions_text(passport: Mapping[str, JSON]) -> str:
    """The versions of gpulab and torch in a passport.

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
    """A name, such as a setting, that may wrap after its commas, dots and underscores.

    >>> str(breakable("cpu:threads=1,order=pairwise"))
    'cpu:threads=1,<wbr>order=pairwise'
    """
    return Markup("<wbr>").join(re.split(r"(?<=[,._])", name))
