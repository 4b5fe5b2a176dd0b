"""Runs for others' atlases: what of a run may be shared, and what a file of shared runs is checked for.

A shared file is a file of packed runs, not compressed, in which each run holds what `SHARED` lists and nothing else:
nothing that names a place or a person. The file is sealed, which shows damage, not honesty: whoever makes up a file
seals it, too.
"""

from __future__ import annotations

import functools
import getpass
import hashlib
import itertools
import json
import math
import os
import platform
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, StringConstraints, conlist, with_config
from typing_extensions import TypedDict

from gpulab import files
from gpulab.errors import DataError, UsageError
from gpulab.settings import Setting
from gpulab.store import identities, listing, records, schemas
from gpulab.training.protocol import FACTORS, LAST_FIFTH, Specification, factors_of_run

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow

LARGEST, UNPACKED, MOST_RUNS = 1 << 24, 1 << 25, 5000  # bytes of a shared file, bytes of what is in it, its runs
EARLIEST = "2020-01-01T00:00:00Z"
OWN = [name for name, factor in FACTORS.items() if factor.of != "model"]  # factors that a run's record names
COLUMNS = {*records.PLAIN, *records.SUMMARY, *records.SHARED, "more", *(f"history_{name}" for name in records.HISTORY)}

# --- what may be in a shared run, and nothing else ---------------------------------------------------------

# Without slashes, tildes and the @ of an address: nothing that names a place or a person.
Words = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9 .,:=+()_-]| @ | w/ ){0,119}$")]
OwnData = Annotated[str, StringConstraints(pattern=r"^(jpeg:)?(digits|mnist|walk|moving-digits)$")]
Hex = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{8,64}$")]
Commit = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{7,40}(-dirty)?$")]
Version = Annotated[str, StringConstraints(pattern=r"^[0-9][0-9A-Za-z.+-]{0,39}$")]
Started = Annotated[str, StringConstraints(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]
Count = Annotated[int, Field(ge=0, lt=2**53)]
FromOne = Annotated[int, Field(ge=1, le=10**9)]
Positive = Annotated[float, Field(ge=0, lt=1e75, allow_inf_nan=False)]
Sizes = list[Annotated[int, Field(ge=1, le=1 << 16)]]
Empty = Annotated[dict[str, Any], Field(max_length=0)]


def _kinds(*rows: tuple[Any, str]) -> dict[str, Any]:
    """The kind of each field; of one inside another, by the names of both."""
    return {name: kind for kind, names in rows for name in names.split()}


def _closed(name: str, kinds: Mapping[str, Any], required: set[str]) -> Any:
    """A schema of these fields and no others."""
    fields = {field: kind if field in required else NotRequired[kind] for field, kind in kinds.items()}
    return with_config(ConfigDict(extra="forbid", strict=True))(TypedDict(name, fields))  # type: ignore[operator]


GPU = _kinds(
    (Words, "name kind"),
    (Version, "compute_capability driver"),
    (Count, "multiprocessors memory_bytes"),
)
SHARED = _kinds(
    (schemas.Name, "id"),
    (Words, "experiment profile setting gradients loader decoder draws"),
    (Literal["finished", "diverged"], "status"),
    (Started, "started"),
    (Hex, "code content summary.weights"),
    (Count, "seed rerun diverged_at resumed_at flip devices"),
    (bool, "fast captured shared"),
    (Positive, "summary.final_loss summary.heldout_loss summary.seconds summary.frames_per_second"),
    (OwnData, "configuration.data"),
    (Words, "configuration.model"),
    (FromOne, "configuration.frames configuration.window"),
    (Positive, "configuration.learning_rate configuration.data_options.speed"),
    (Empty, "configuration.model_options configuration.data_options arithmetic"),
    (Sizes, "configuration.model_options.size configuration.model_options.channels configuration.data_options.size"),
    (Sizes | Count, "configuration.model_options.hidden"),
    (Count, "configuration.model_options.code configuration.model_options.batch_size"),
    (Count, "configuration.model_options.kernel_size configuration.data_options.quality"),
    (Words, "configuration.model_options.covariance"),
    (Words, "configuration.model_options.truncation configuration.data_options.subsampling"),
    (Count, "configuration.data_options.frames configuration.data_options.images configuration.data_options.heldout"),
    (Count, "configuration.data_options.scene_seed arithmetic.threads passport.format passport.memory_bytes"),
    (Words, "arithmetic.cpu_capability arithmetic.matmul_fp32 arithmetic.convolution_fp32"),
    (bool, "arithmetic.deterministic arithmetic.cudnn arithmetic.cudnn_benchmark arithmetic.cudnn_deterministic"),
    (Words, "passport.cpu.model passport.cpu.architecture passport.software.blas passport.software.os"),
    (FromOne, "passport.cpu.physical_cores passport.cpu.logical_cores"),
    (list[Words], "passport.cpu.vector_extensions"),
    (conlist(_closed("SharedGpu", GPU, {"name"}), max_length=64), "passport.gpus"),
    (Version, "passport.software.torch passport.software.gpulab passport.software.python passport.software.cuda"),
    (Version, "passport.software.rocm passport.software.cudnn passport.software.onednn"),
    (Commit, "passport.software.commit"),
)
REQUIRED = {
    *("id", "experiment", "profile", "setting", "status", "started", "seed", "rerun", "summary.seconds"),
    *(f"configuration.{name}" for name in ("model", "data", "frames", "window", "learning_rate")),
    *("passport.cpu.model", "passport.gpus", "passport.software.torch", "passport.software.gpulab"),
}
SharedRun = _closed("SharedRun", SHARED, REQUIRED)


def _flat(document: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of a record, nested ones with dots in their names; without those that hold nothing."""
    for name, value in document.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{before}{name}.")
        elif value is not None:
            yield f"{before}{name}", value


def _allowed(record: Mapping[str, Any], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Of a record what may be shared; of what need not be there, only what fits."""
    nested: dict[str, Any] = {}
    for name, value in _flat(record):
        if name in kinds and (name in REQUIRED or schemas.fits(kinds[name], value)):
            *path, last = name.split(".")
            functools.reduce(lambda inside, step: inside.setdefault(step, {}), path, nested)[last] = value
    return nested


# --- sharing -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SharedRuns:
    """Runs with nothing private in them: `print` says all that `save` writes but the losses.

    Attributes:
        runs: Each a record, which holds what `SHARED` lists, and a history.
        left_out: How many other runs were chosen, by the reason why they are not in it.
    """

    runs: list[tuple[dict[str, Any], pyarrow.Table]]
    left_out: Mapping[str, int]

    def private(self) -> list[str]:
        """Of this machine's name, the user's and the home folder, what stands in a run all the same."""
        names = {platform.node(), platform.node().partition(".")[0], str(Path.home()), Path.home().name}
        with suppress(OSError, KeyError):  # a user without a name
            names.add(getpass.getuser())
        text = json.dumps([record for record, _ in self.runs])
        words = (name for name in names if len(name) > 2)
        return sorted(name for name in words if re.search(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", text))

    def save(self, file: str | Path) -> str:
        """Write the file whole or not at all, and return its SHA-256.

        Raises:
            UsageError: Where there are no runs, or too many.
            GpulabError: Where it cannot be written.
        """
        if not self.runs:
            why = "; ".join(f"{count} {reason}" for reason, count in self.left_out.items())
            raise UsageError(f"{file}: no runs to share{why and ': ' + why}")
        content = records.packed(self.runs, compressed=False)
        if len(content) > LARGEST or len(self.runs) > MOST_RUNS:
            raise UsageError(f"{file}: too large ({len(self.runs):,} runs); share fewer at a time")
        files.write(file, content)
        return hashlib.sha256(content).hexdigest()

    def __str__(self) -> str:
        passports = dict.fromkeys(json.dumps(record["passport"], indent=1) for record, _ in self.runs)
        seeds: dict[str, list[int]] = {}
        for record, _ in self.runs:
            factors = [f"{name}={record[name]}" for name in OWN if name in record]
            what = f"{record['experiment']} {record['profile']}, {record['configuration']['data']}"
            seeds.setdefault(", ".join([what, record["setting"], *factors]), []).append(record["seed"])
        fields = sorted({name for record, _ in self.runs for name, _ in _flat(record)})
        last = "Your name, this machine's, your home folder, paths and commands are not in it."
        if names := self.private():
            last = f"LOOK: {', '.join(names)}: this machine's or your name occurs in it."
        return "\n".join(
            [
                f"{len(self.runs)} runs with {len(passports)} passport(s):",
                *passports,
                "Runs:",
                *(f"  {what}: seeds {', '.join(map(str, sorted(each)))}" for what, each in sorted(seeds.items())),
                f"Of each run, beside its history: {', '.join(fields)}.",
                *(f"Left out: {count}: {why}." for why, count in self.left_out.items()),
                last,
            ]
        )


def shared_runs(frame: pd.DataFrame) -> SharedRuns:
    """What of some runs can be shared.

    Those of gpulab's own networks on its own data can: a training of your own, or a film, is told by names that only
    you have.

    Args:
        frame: From `gpulab.runs`, or some rows of it.

    Examples:
        >>> from gpulab import recorded_runs
        >>> print(len(shared_runs(recorded_runs()[:3]).runs))
        3
    """
    runs, left_out = [], Counter[str]()
    for row, full, history in listing.with_histories(frame):
        passport = {**full["passport"], "gpus": [_allowed(gpu, GPU) for gpu in full["passport"]["gpus"]]}
        system = str(passport["software"].get("os", "")).partition("-")[0]  # a kernel's name may be anything
        passport["software"] = {**passport["software"], "os": system}
        record = _allowed({"rerun": 0, **full, "passport": passport}, SHARED)
        try:
            _check(row.id, record, history)
            runs.append((record, history))
        except DataError as error:
            own = "source" in full["configuration"] or "digest" in full["configuration"].get("model_options", {})
            left_out["of a model or a function of your own" if own else str(error).partition(": ")[2]] += 1
    return SharedRuns(runs, left_out)


# --- merging -----------------------------------------------------------------------------------------------


def atlas_folder() -> Path:
    """Where others' runs are kept: `$GPULAB_ATLAS`, `data/atlas` of a checkout, or the folder `atlas` here."""
    checkout = records.recorded_folder("atlas")
    return Path(os.environ.get("GPULAB_ATLAS") or (checkout if records.DATA.name == "data" else "atlas"))


def merge(file: str | Path, folder: str | Path) -> int:
    """Add the runs of a shared file to a folder that `gpulab.runs` reads, all or none; returns how many.

    The folder gets one file of packed runs that this gpulab writes; nothing that the shared file names is opened.

    Raises:
        DataError: For a file that is damaged, oversized, not of shared runs, says what cannot be, or has runs that the
            folder has already; with the reason.
        GpulabError: Where the folder cannot be written.
    """
    file, content = Path(file), files.read(file, LARGEST)
    files.check_seal(file, content)
    _check_size(file, content)
    shared, histories = records.packed_runs(file), records.packed_histories(file)
    if not shared:
        raise DataError(f"{file}: no runs are in it")
    name, most = Counter(record["id"] for record in shared).most_common(1)[0]
    if most > 1:
        raise DataError(f"{file}: {name} is in it {most} times")
    for record in shared:
        _check(file, record, histories[record["id"]])
    present = set(listing.runs(folder).id)
    if known := [record["id"] for record in shared if record["id"] in present]:
        raise DataError(f"{file}: {len(known)} of {len(shared)} runs are in {folder} already, such as {known[0]}")
    digest = hashlib.sha256(content).hexdigest()
    packed = []
    for record in shared:
        more = {"command": Specification.from_record(record).command(), "contribution": digest}
        packed.append((record | more, histories[record["id"]]))
    return records.pack_runs(Path(folder) / f"contribution-{digest[:16]}.parquet", packed)


def remarks(file: str | Path, folder: str | Path) -> str:
    """What to say of the runs of a shared file that were added to a folder, behind their number; often nothing."""
    added, present = listing.runs(file), listing.runs(folder)
    others = present[~present.id.isin(added.id)].dropna(subset="weights")
    alike = added.weights.isin(others.weights).sum()
    text = ""
    if alike:
        machines = sorted(set(others[others.weights.isin(added.weights)].machine))
        text += f"; {alike} have the same weights, bit for bit, as runs that were there, of {', '.join(machines)}"
    if added.setting.nunique() == 1:
        text += f"; all are under {added.setting.iloc[0]}: what a setting changes is seen where there is another one"
    return text


def _check_size(file: Path, content: bytes) -> None:
    """Raise `DataError` for a file that unpacks to more than is allowed, whatever it says of its size.

    Where nothing is compressed, a page of the file cannot become larger; what repeats is counted as it is unpacked.
    """
    import pyarrow
    import pyarrow.parquet

    runs = unpacked = 0
    with (
        files.reading(file, "not a file of shared runs"),
        pyarrow.parquet.ParquetFile(pyarrow.BufferReader(content)) as opened,
    ):
        if unknown := set(opened.schema_arrow.names) - COLUMNS:
            raise DataError(f"{file}: {min(unknown)}: not a column of shared runs")
        groups = [opened.metadata.row_group(number) for number in range(opened.num_row_groups)]
        columns = (group.column(number) for group in groups for number in range(group.num_columns))
        if any(column.compression != "UNCOMPRESSED" for column in columns):
            raise DataError(f"{file}: compressed, which shared runs are not: `gpulab pack --share` writes them")
        for batch in opened.iter_batches(batch_size=8):
            runs, unpacked = runs + batch.num_rows, unpacked + batch.nbytes
            if unpacked > UNPACKED or runs > MOST_RUNS:
                raise DataError(f"{file}: too large: more than {MOST_RUNS:,} runs or {UNPACKED:,} bytes unpacked")


def _check(file: str | Path, record: dict[str, Any], history: pyarrow.Table) -> None:
    """Raise `DataError` for a run with anything that is not on the list, or that cannot have been."""
    schemas.check(SharedRun, dict(_flat(record)), file)
    for wrong in itertools.chain(_wrong_identity(record), _wrong_history(record, history.to_pydict())):
        raise DataError(f"{file}: {record['id']}: {wrong}")


def _wrong_identity(record: Mapping[str, Any]) -> Iterator[str]:
    """What of a run's name, setting, machine and time does not fit the rest, or cannot have been."""
    tomorrow = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 86400))
    try:
        setting = Setting.parse(record["setting"])
        factors_of_run(**{name: record[name] for name in OWN if name in record and FACTORS[name].of == "run"})
        Specification.from_record(record).command()
    except (UsageError, KeyError, TypeError) as error:
        yield f"not a run that gpulab makes: {error}"
        return
    if str(setting) != record["setting"] or record["configuration"]["model"] != record["experiment"]:
        yield "its setting or its model is not written as gpulab does"
    names = ("experiment", "profile", "setting", "seed", "rerun", "configuration", *OWN)
    identity = {name: record[name] for name in names if record.get(name) is not None}
    known = {name: record[name] for name in ("code", "content") if name in record}
    if record["id"] != identities.identified(identity, record["passport"], known).id:
        yield "its id is not that of what it says was run, on which chip, with which torch and gpulab"
    if setting.kind != "cpu" and not record["passport"]["gpus"]:
        yield f"ran under {setting}, on a machine without a GPU"
    if not EARLIEST <= record["started"] <= tomorrow:
        yield f"started {record['started']}"


def _wrong_history(record: Mapping[str, Any], history: Mapping[str, list[Any]]) -> Iterator[str]:
    """What of a run's losses, updates and times does not fit the rest."""
    summary, done, finished = record["summary"], record["configuration"], record["status"] == "finished"
    losses, steps, seconds = history["loss"], history["step"], history["seconds"]
    count, final, heldout = done["frames"] // done["window"], summary.get("final_loss"), summary.get("heldout_loss")
    if history["window"] != [*range(len(losses))]:
        yield "its history has rows missing"
    if len(losses) > count or (finished and (len(losses) != count or not losses)):
        yield f"its history has {len(losses)} windows, its {done['frames']} frames {count}"
    if steps != sorted(set(steps)) or (steps and not 0 < steps[0] <= steps[-1] <= done["frames"]):
        yield "its history counts updates that its frames do not make"
    if seconds != sorted(seconds) or (seconds and summary["seconds"] < 0.99 * seconds[-1]):
        yield "its history takes longer than the run"
    speed, frames = summary.get("frames_per_second"), len(losses) * done["window"]
    if speed and not math.isclose(speed * summary["seconds"], frames, rel_tol=0.02):
        yield "its speed is not that of its frames and seconds"
    if not finished and (final is not None or heldout is not None or record.get("diverged_at") is None):
        yield "it diverged, and has a final loss or no step at which it did"
    if finished and (final is None or heldout is None or not all(0 <= loss < 1e75 for loss in losses)):
        yield "it finished, and has a loss that is no number"
    if finished:
        last = losses[-max(1, count // LAST_FIFTH) :]
        if not math.isclose(final, math.fsum(last) / len(last), rel_tol=1e-6, abs_tol=1e-12):
            yield "its final loss is not the mean of the last fifth of its history"
