"""Contributions: runs for others' atlases in one file with nothing private in it, and what such a file is checked for.

A contribution is gzipped JSON. `schemas.SharedRun` names every field that may be in it, for those who write and those
who read; a run that cannot do with these is left out. The file is sealed, and each run has a checksum. Both show
damage, not honesty: whoever makes up a file makes up its checksums, too.
"""

from __future__ import annotations

import getpass
import gzip
import hashlib
import json
import math
import os
import platform
import re
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpulab import files, records, schemas
from gpulab.errors import DataError, UsageError
from gpulab.settings import Setting
from gpulab.training import folders, store
from gpulab.training.protocol import FACTORS, Specification
from gpulab.training.step import LAST_FIFTH

if TYPE_CHECKING:
    import pandas as pd

KIND = "gpulab contribution"
LARGEST, UNPACKED = 1 << 24, 1 << 25  # bytes, of the file and of what is in it
IDENTITY = ("experiment", "profile", "setting", "seed", "rerun", "configuration")
OWN = [name for name, factor in FACTORS.items() if factor.of != "model"]  # factors that a run's record names
EARLIEST = "2020-01-01T00:00:00Z"


@dataclass(frozen=True)
class Contribution:
    """Runs with nothing private in them: `print` says all that `save` writes.

    Attributes:
        runs: As `schemas.SharedRun` has them.
        left_out: How many other runs were chosen, by the reason why they are not in it.
    """

    runs: list[dict[str, Any]]
    left_out: Mapping[str, int]

    def private(self) -> list[str]:
        """Of this machine's name, the user's and the home folder, what stands in a run all the same."""
        names = {platform.node(), platform.node().partition(".")[0], str(Path.home()), Path.home().name}
        with suppress(OSError, KeyError):  # a user without a name
            names.add(getpass.getuser())
        text = json.dumps(self.runs)
        words = (name for name in names if len(name) > 2)
        return sorted(name for name in words if re.search(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", text))

    def save(self, file: str | Path, overwrite: bool = False) -> str:
        """Write the file whole or not at all, and return its SHA-256.

        Raises:
            UsageError: Where there is a file already, unless it may be overwritten; where there are no runs.
            GpulabError: Where it cannot be written, or would be too large.
        """
        if not self.runs:
            why = "; ".join(f"{count} {reason}" for reason, count in self.left_out.items())
            raise UsageError(f"{file}: no runs to contribute{why and ': ' + why}")
        if os.path.lexists(file) and not overwrite:
            raise UsageError(f"{file}: is there already; name another file, or let it be overwritten")
        document = bytes(records.as_json({"kind": KIND, "runs": self.runs}))
        content = gzip.compress(document, mtime=0)
        if len(document) > UNPACKED or len(content) > LARGEST:
            raise UsageError(f"{file}: too large ({len(document):,} bytes); contribute fewer runs at a time")
        _read(file, content)
        files.write(file, content)
        return hashlib.sha256(content).hexdigest()

    def __str__(self) -> str:
        passports = dict.fromkeys("\n".join(_lines(run["passport"])) for run in self.runs)
        seeds: dict[str, list[int]] = {}
        for run in self.runs:
            named = [f"{name}={run[name]}" for name in OWN if name in run]
            what = f"{run['experiment']} {run['profile']}, {run['configuration']['data']}"
            seeds.setdefault(", ".join([what, run["setting"], *named]), []).append(run["seed"])
        found = self.private()
        fields = [name for name in schemas.SharedRun.__annotations__ if any(name in run for run in self.runs)]
        return "\n".join(
            [
                f"{len(self.runs)} runs with {len(passports)} passport(s):",
                "\n\n".join(passports),
                "Runs:",
                *(f"  {what}: seeds {', '.join(map(str, sorted(some)))}" for what, some in sorted(seeds.items())),
                f"Of each run: {', '.join(fields)}.",
                *(f"Left out: {count}: {why}." for why, count in self.left_out.items()),
                f"LOOK: {', '.join(found)}: this machine's or your name occurs in it."
                if found
                else "Your name, this machine's, your home folder, paths and commands are not in it.",
            ]
        )


def _lines(document: Any, name: str = " ") -> Iterator[str]:
    """A document for reading, a line a value."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield from _lines(value, f"{name} {key}")
    elif isinstance(document, list) and any(isinstance(value, dict) for value in document):
        for number, value in enumerate(document):
            yield from _lines(value, f"{name} {number}")
    else:
        yield f"{name}: {', '.join(document) if isinstance(document, list) else document}"


def contribution(frame: pd.DataFrame) -> Contribution:
    """What of some runs can be shared.

    Those of gpulab's own networks on its own data can: a training of your own, or a film, is told by names that only
    you have.

    Args:
        frame: From `gpulab.runs`, or some rows of it.

    Examples:
        >>> from gpulab import recorded_runs
        >>> print(len(contribution(recorded_runs()[:3]).runs))
        3
    """
    runs, left_out = [], Counter[str]()
    for row, record, history in store.with_histories(frame):
        run = _shared(record, history.to_pydict())
        try:
            schemas.check(schemas.SharedRun, run, row.id)
            _check(run)
            runs.append(run)
        except DataError as error:
            own = "source" in record["configuration"] or "digest" in record["configuration"].get("model_options", {})
            left_out["of a model or a function of your own" if own else str(error).partition(": ")[2]] += 1
    return Contribution(runs, left_out)


def _shared(record: dict[str, Any], history: dict[str, list[Any]]) -> dict[str, Any]:
    losses = [loss if math.isfinite(loss) else None for loss in history["loss"]]
    passport = record["passport"]
    system = str(passport["software"].get("os", "")).partition("-")[0]  # a kernel's name may be anything
    passport = {**passport, "software": {**passport["software"], "os": system}}
    full = {"rerun": 0, **record, "passport": passport, "history": {**history, "loss": losses}}
    run = schemas.sift(schemas.SharedRun, full)
    return {**run, "checksum": _checksum(run)}


def _checksum(run: Mapping[str, Any]) -> str:
    return folders.digest({name: value for name, value in run.items() if name != "checksum"})


# --- reading -------------------------------------------------------------------------------------------------


def atlas_folder() -> Path:
    """Where contributed runs are kept: `$GPULAB_ATLAS`, `data/atlas` of a checkout, or the folder `atlas` here."""
    checkout = records.recorded_folder("atlas")
    return Path(os.environ.get("GPULAB_ATLAS") or (checkout if records.DATA.name == "data" else "atlas"))


def merge(file: str | Path, folder: str | Path) -> int:
    """Add the runs of a contribution to a folder that `gpulab.runs` reads, all or none; returns how many.

    The folder gets one file of packed runs that this gpulab writes; nothing that the contribution names is opened.

    Raises:
        DataError: For a file that is damaged, oversized, no contribution, says what cannot be, or has runs that the
            folder has already; with the reason.
        GpulabError: Where the folder cannot be written.
    """
    import pyarrow

    content = files.read(file, LARGEST)
    runs = _read(file, content)
    there = set(store.runs(folder).id)
    if known := [run["id"] for run in runs if run["id"] in there]:
        raise DataError(f"{file}: {len(known)} of {len(runs)} runs are in {folder} already, such as {known[0]}")
    digest = hashlib.sha256(content).hexdigest()
    packed = []
    for run in runs:
        # To JSON 1 and 1.0 are one number; to a table they are not.
        rows = {**run["history"], "seconds": [*map(float, run["history"]["seconds"])]}
        rows["loss"] = [math.nan if loss is None else float(loss) for loss in run["history"]["loss"]]
        summary = {name: float(value) if isinstance(value, int) else value for name, value in run["summary"].items()}
        history = records.check_history(file, pyarrow.table(rows))
        record = {name: value for name, value in run.items() if name != "history"} | {"summary": summary}
        command = Specification.from_record(run).command()
        packed.append(({**record, "format": records.FORMAT, "command": command, "contribution": digest}, history))
    return records.pack_runs(Path(folder) / f"contribution-{digest[:16]}.parquet", packed)


def _read(file: str | Path, content: bytes) -> list[dict[str, Any]]:
    """The runs in a contribution, checked; `DataError` for anything else."""
    document = files.read_json(file, text := _unpacked(file, content))
    if not (isinstance(document, dict) and document.get("kind") == KIND):
        raise DataError(f"{file}: not a contribution of gpulab's")
    if document.get("format") != records.FORMAT:
        raise DataError(f"{file}: format {str(document.get('format'))[:20]!r}; this gpulab reads {records.FORMAT}")
    files.check_seal(file, text)
    schemas.check(schemas.Contribution, document, file)
    for run in document["runs"]:
        if run["checksum"] != _checksum(run):
            raise DataError(f"{file}: {run['id']}: its checksum is that of another run")
        try:
            _check(run)
        except (DataError, UsageError) as error:
            raise DataError(f"{file}: {error}") from None
    name, most = Counter(run["id"] for run in document["runs"]).most_common(1)[0]
    if most > 1:
        raise DataError(f"{file}: {name} is in it {most} times")
    return document["runs"]


def _unpacked(file: str | Path, content: bytes) -> bytes:
    """Gunzipped, never more than is allowed, whatever the file says of its size."""
    unpacker = zlib.decompressobj(wbits=31)
    try:
        text = unpacker.decompress(content, UNPACKED + 1)
    except zlib.error as error:
        raise DataError(f"{file}: not a contribution of gpulab's, or damaged: {error}") from None
    if len(text) > UNPACKED:
        raise DataError(f"{file}: too large: unpacks to more than {UNPACKED:,} bytes")
    if not unpacker.eof or unpacker.unused_data:
        raise DataError(f"{file}: {'more behind its end' if unpacker.eof else 'cut short'}")
    return text


def _check(run: dict[str, Any]) -> None:
    """Raise `DataError` for a run whose parts do not fit each other, or that cannot have been."""
    for wrong in _wrong(run):
        raise DataError(f"{run['id']}: {wrong}")


def _wrong(run: dict[str, Any]) -> Iterator[str]:
    history, summary, done = run["history"], run["summary"], run["configuration"]
    losses, steps, seconds = history["loss"], history["step"], history["seconds"]
    count, finished = done["frames"] // done["window"], run["status"] == "finished"
    try:
        setting = Setting.parse(run["setting"])
        Specification.from_record(run).command()
    except (UsageError, KeyError, TypeError) as error:
        yield f"not a run that gpulab makes: {error}"
        return
    if str(setting) != run["setting"] or done["model"] != run["experiment"]:
        yield "its setting or its model is not written as gpulab does"
    if run["id"] != _name(run):
        yield "its id is not that of what it says was run, on which chip, with which torch and gpulab"
    if setting.kind != "cpu" and not run["passport"]["gpus"]:
        yield f"ran under {setting}, on a machine without a GPU"
    if not EARLIEST <= run["started"] <= time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 86400)):
        yield f"started {run['started']}"
    if len({len(history[name]) for name in records.HISTORY}) != 1 or history["window"] != [*range(len(losses))]:
        yield "its history has rows missing"
    elif len(losses) > count or (finished and (len(losses) != count or not losses)):
        yield f"its history has {len(losses)} windows, its {done['frames']} frames {count}"
    elif steps != sorted(set(steps)) or (steps and not 0 < steps[0] <= steps[-1] <= done["frames"]):
        yield "its history counts updates that its frames do not make"
    elif seconds != sorted(seconds) or (seconds and summary["seconds"] < 0.99 * seconds[-1]):
        yield "its history takes longer than the run"
    elif (speed := summary.get("frames_per_second")) and not math.isclose(
        speed * summary["seconds"], len(losses) * done["window"], rel_tol=0.02
    ):
        yield "its speed is not that of its frames and seconds"
    elif not finished:
        if summary["final_loss"] is not None or summary["heldout_loss"] is not None or run.get("diverged_at") is None:
            yield "it diverged, and has a final loss or no step at which it did"
    elif None in (*losses, summary["final_loss"], summary["heldout_loss"]):
        yield "it finished, and has a loss that is no number"
    else:
        last = losses[-max(1, count // LAST_FIFTH) :]
        if not math.isclose(summary["final_loss"], math.fsum(last) / len(last), rel_tol=1e-6, abs_tol=1e-12):
            yield "its final loss is not the mean of the last fifth of its history"


def _name(run: Mapping[str, Any]) -> str:
    """What gpulab calls a run that is as it says."""
    identity = {name: run[name] for name in (*IDENTITY, *OWN) if name in run}
    known = {name: run[name] for name in ("code", "content") if name in run}
    return folders.identified(identity, run["passport"], known).id
