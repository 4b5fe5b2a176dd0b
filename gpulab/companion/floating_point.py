"""Which factor does it? Each one changed alone, from the same weights: one step of it, and the final loss.

A factor is anything that a device may do otherwise without being wrong. Each is compared with a base that
differs in nothing else. Factors of a GPU come from recordings where there is none.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from gpulab.data.jpeg import available_decoders, compare_decoders
from gpulab.diagnostics.operations import byte_round_trip, fused_share, repeatability
from gpulab.diagnostics.processes import measure
from gpulab.errors import DataError, GpulabError, UsageError
from gpulab.numerics.sums import bit_of, first_bit
from gpulab.passports import passport
from gpulab.records import recorded_folder
from gpulab.report import Report
from gpulab.settings import Setting, cpu_flags
from gpulab.stats.verdicts import DECISIONS, Verdict, verdict
from gpulab.training import store as stores
from gpulab.training.experiment import Experiment
from gpulab.training.growth import flipped
from gpulab.training.protocol import protocol
from gpulab.training.run import train
from gpulab.training.step import FirstWindow

FORMAT = 1
MEASURED = ("conversions", "repeatability", "fused", "decoders")
STEP_SEEDS = 3  # one step is cheap, but one seed proves nothing
MADE_HERE, RECORDED, NOT_RECORDED = "made here", "recorded", "not recorded"
UNITS = {"effect": "difference", "low": "low", "high": "high", "largest": "largest_difference"}


@dataclass(frozen=True)
class Factor:
    """One thing that is changed: options of `gpulab.train` before and after.

    `kind` is the device that it is changed on.
    """

    name: str
    base: dict[str, Any]
    change: dict[str, Any]
    kind: str = "cpu"

    @property
    def emulated(self) -> bool:
        """Whether the change is another chip's arithmetic, imitated."""
        return Setting.parse(self.change["setting"]).emulated

    @property
    def words(self) -> str:
        """The change in words: the option that differs."""
        return level(self.change)

    def runs_here(self) -> bool:
        """Whether this machine can do both."""
        decoder = (self.change.get("data_options") or {}).get("decoder")
        isa = Setting.parse(self.change["setting"]).isa
        if decoder and decoder not in available_decoders():
            return False
        if isa:  # the older instructions are another setting on a newer CPU only
            return {"avx2", "avx512f"} <= cpu_flags()
        try:
            for options in (self.base, self.change):
                Setting.parse(options["setting"]).check()
        except GpulabError:
            return False
        return True


def level(options: dict[str, Any]) -> str:
    """What makes a level, in words: the setting, and what is not as usual.

    >>> level({"setting": "cpu", "flip": 0})
    'cpu, flip 0'
    """
    given = options | (options.get("data_options") or {})
    words = [f"{name} {given[name]}" for name in ("decoder", "flip", "draws") if given.get(name) is not None]
    return ", ".join([options["setting"], *words])


CPU, GPU = "cpu:threads=1", "cuda:tf32=off,deterministic=on"


def _jpeg(setting: str, decoder: str) -> dict[str, Any]:
    return {"setting": setting, "data": "jpeg:walk", "data_options": {"decoder": decoder}}


def factors(net: str = "prednet", profile: str = "quick") -> list[Factor]:
    """The factors that are asked about: those of a CPU, then those of a GPU.

    >>> factors()[0].name
    'CPU threads'
    """
    on_cpu, on_gpu = {"setting": CPU}, {"setting": GPU}
    bit = {"flip": flipped(net, profile)}
    found = [
        Factor("CPU threads", on_cpu, {"setting": "cpu"}),
        Factor("CPU instruction set", on_cpu, {"setting": f"{CPU},isa=avx2"}),
        Factor("determinism", on_cpu, {"setting": f"{CPU},deterministic=on"}),
        Factor("order of summation", on_cpu, {"setting": f"{CPU},order=split-4"}),
        Factor("TF32", on_cpu, {"setting": f"{CPU},emulate=tf32"}),
        Factor("one bit of one weight", on_cpu, on_cpu | bit),
        Factor("image decoder", _jpeg(CPU, "pillow"), _jpeg(CPU, "av")),
        Factor("cuDNN", on_gpu, {"setting": "cuda:tf32=off,cudnn=off,deterministic=on"}, "cuda"),
        Factor("TF32", on_gpu, {"setting": "cuda:tf32=on,deterministic=on"}, "cuda"),
        Factor("determinism", on_gpu, {"setting": "cuda:tf32=off,deterministic=off"}, "cuda"),
        Factor("one bit of one weight", on_gpu, on_gpu | bit, "cuda"),
        Factor("image decoder", _jpeg(GPU, "pillow"), _jpeg(GPU, "nvjpeg"), "cuda"),
        Factor("who draws the weights", on_gpu, on_gpu | {"draws": "device"}, "cuda"),
        Factor("the device itself", on_gpu, {"setting": CPU}, "cuda"),
    ]
    return found if net == "prednet" else [factor for factor in found if factor.name != "image decoder"]


# --- one step --------------------------------------------------------------------------------------------


def first_step(
    setting: str, net: str, profile: str, seeds: int, file: str, options: dict[str, Any] | None = None
) -> None:
    """Write what the first step of each seed computes under a setting to a safetensors file.

    Per seed, `losses.SEED`, one a frame, and `gradient.SEED`, in a row.
    """
    from safetensors.torch import save_file

    made: dict[str, Tensor] = {}
    for seed in range(seeds):
        step = FirstWindow(net, seed=seed, profile=profile, setting=setting, **(options or {}))
        computed = step.gradient(setting)
        made[f"gradient.{seed}"] = torch.cat([g.reshape(-1) for _, g in sorted(computed.gradient.items())])
        made[f"losses.{seed}"] = computed.losses.float()
    save_file(made, file)


class _Steps:
    """First steps under several levels, each computed once."""

    def __init__(self, net: str, profile: str, seeds: int) -> None:
        self.net, self.profile, self.seeds = net, profile, seeds
        self.known: dict[str, dict[str, Tensor]] = {}

    def under(self, options: dict[str, Any]) -> dict[str, Tensor]:
        """The losses and gradients under a level."""
        from safetensors.torch import load_file

        key = json.dumps(options, sort_keys=True)
        if key not in self.known:
            own = {name: value for name, value in options.items() if name != "setting"}
            asked = {"net": self.net, "profile": self.profile, "seeds": self.seeds, "options": own}
            with tempfile.TemporaryDirectory() as scratch:
                file = str(Path(scratch) / "step.safetensors")
                measure(first_step, options["setting"], file=file, **asked)
                self.known[key] = load_file(file)
        return self.known[key]

    def compared(self, factor: Factor) -> dict[str, Any]:
        """One step of a factor, on the seed that it moves most: see `FactorTable`."""
        exact = self.under(factor.base | {"setting": "cpu:precision=float64"})
        base, other = self.under(factor.base), self.under(factor.change)
        moved, error, base_error, bits = [], [], [], []
        for seed in range(self.seeds):
            truth, a, b = (tensors[f"gradient.{seed}"] for tensors in (exact, base, other))
            moved.append(float((b - a).norm() / a.norm()))
            error.append(float((b - truth).norm() / truth.norm()))
            base_error.append(float((a - truth).norm() / truth.norm()))
            losses = zip(base[f"losses.{seed}"], other[f"losses.{seed}"], strict=True)
            bits += [first_bit(one, another) for one, another in losses]
        most = moved.index(max(moved))
        differing = [bit for bit in bits if bit is not None]
        return {
            "loss_bit": min(differing) if differing else None,
            "gradient_bit": bit_of(moved[most]),
            "step_moved": moved[most],
            "step_error": error[most],
            "base_error": base_error[most],
        }


# --- final losses ----------------------------------------------------------------------------------------


def _train(
    asked: list[Factor], net: str, profile: str, seeds: int, options: dict[str, Any], progress: bool
) -> pd.DataFrame:
    """The runs of all levels, those that share a setting in one process."""
    levels = [side for factor in asked for side in (factor.base, factor.change)]
    variants: dict[str, list[dict[str, Any]]] = {}
    for chosen in levels:
        own = {name: value for name, value in chosen.items() if name != "setting"}
        known = variants.setdefault(chosen["setting"], [])
        if own not in known:
            known.append(own)
    groups: dict[str, list[str]] = {}
    for setting, found in variants.items():
        groups.setdefault(json.dumps(found, sort_keys=True), []).append(setting)
    frames = []
    for shared, settings in groups.items():
        exp = Experiment(net, settings, seeds, profile, variants=json.loads(shared), **options)
        frames.append(_in_this_process(exp, progress) if exp.workers == 1 else exp.run(progress))
    return pd.concat(frames, ignore_index=True).drop_duplicates("id")


def _in_this_process(exp: Experiment, progress: bool) -> pd.DataFrame:
    """An experiment without the start of a process for each setting, where the settings allow it.

    Every flag is restored after a training, so that none leaks into the next.
    """
    needy = [setting for setting in exp.settings if Setting.parse(setting).isa]
    done = []
    if needy:
        done.append(replace(exp, settings=needy).run(progress))
    jobs = [job for job in exp.jobs() if job["setting"] not in needy]
    trained = [train(**job, progress=False) for job in tqdm(jobs, unit="run", leave=False, disable=not progress)]
    here = stores.runs(exp.folder)
    return pd.concat([*done, here[here.id.isin([run.record["id"] for run in trained])]], ignore_index=True)


def _of_level(frame: pd.DataFrame, options: dict[str, Any]) -> pd.DataFrame:
    """The runs of a frame that were made under a level."""
    own = options | (options.get("data_options") or {})
    data = frame.data.str.startswith("jpeg:") if "data" in own else ~frame.data.str.startswith("jpeg:")
    fits = (frame.setting == options["setting"]) & data & (frame.loader == "window") & (frame.rerun == 0)
    fits &= frame.draws == own.get("draws", "cpu")
    fits &= frame.flip == own["flip"] if "flip" in own else frame.flip.isna()
    if "decoder" in own:
        fits &= frame.decoder == own["decoder"]
    return frame[fits]


def _verdicts(frame: pd.DataFrame, asked: list[Factor]) -> dict[str, Verdict]:
    """A verdict for each base on all that is compared with it, so that Holm's correction sees all."""
    judged: dict[str, Verdict] = {}
    for base in {level(factor.base): factor.base for factor in asked}.values():
        changed = {level(f.change): f.change for f in asked if f.base == base}
        parts = [
            _of_level(frame, options).assign(change=name) for name, options in {level(base): base, **changed}.items()
        ]
        both = pd.concat(parts, ignore_index=True)
        if (both.change == level(base)).any() and both.change.nunique() > 1:
            judged[level(base)] = verdict(both, factor="change", reference=level(base))
    return judged


# --- the table -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class FactorTable(Report):
    """Factors, each changed alone; `table` has a row per factor and place where it was measured.

    `factor`; `change` (in words) and `base`; `source` (`made here`, `recorded` or `not recorded`), `emulated`,
    `machine`, `network` size (`profile`).
    One step, of a few seeds the one that moves most: `loss_bit` (the first bit of the fraction in which the loss of any
    frame differs on any of them, see `gpulab.first_bit`), `step_moved` (relative distance of the two
    gradients), `gradient_bit` (the bit that this reaches), `step_error` and `base_error` (relative distances
    to the gradient that the base has in float64). The final loss: `seeds`, `effect` (mean difference in
    standard deviations between seeds) with its interval `low`, `high`, `largest` (of any seed, in the same
    unit), `same_bits` (seeds whose trained weights are identical) and `decision`.

    `verdicts` holds the verdicts behind it, by source and base.
    """

    table: pd.DataFrame
    verdicts: dict[tuple[str, str], Verdict] = field(default_factory=dict)

    plots = "gpulab.companion.floating_point_figures"

    def finding(self, source: str | None = None) -> str:
        """What the verdicts allow one to say, in sentences; of one source if it is named."""
        return "\n".join(_sentences(self.table if source is None else self.table[self.table.source == source]))

    def __str__(self) -> str:
        return self.finding()

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        shown = _shown(self.table)
        return {"text/plain": shown.to_string(index=False), "text/html": shown.to_html(index=False)}, {}


def factor_table(
    net: str = "prednet",
    profile: str = "quick",
    seeds: int = 6,
    frames: int | None = None,
    store: str | Path | None = None,
    recorded: bool = True,
    progress: bool = True,
) -> FactorTable:
    """Change each factor alone, from the same weights, and say what it does to a step and to the final loss.

    On this machine everything that it can do is measured: one step of a few seeds, and `seeds` trainings per
    level, kept in `store` and resumed from there. `recorded` adds what other machines measured, kept in
    `data/factors`, and a row that says so for each factor of which nothing is known.
    The decisions are those of `gpulab.verdict`, paired by seed, a margin of a quarter of the standard
    deviation between seeds, corrected for the number of factors with the same base (Holm). The profile
    `smoke` takes a minute on two cores, `quick` several times that.

    >>> table = factor_table("autoencoder", "smoke", seeds=2, frames=40, recorded=False, progress=False).table
    >>> table.set_index("factor").loc["determinism", "same_bits"].item()
    2
    """
    here = [factor for factor in factors(net, profile) if factor.runs_here()]
    rows = _step_rows(here, net, profile, progress)
    options = {} if frames is None else {"frames": frames}
    runs = _train(here, net, profile, seeds, {"store": store, "options": options}, progress)
    whole, judged = _joined(rows, runs, here, {"source": MADE_HERE, "profile": profile}, passport())
    if recorded:
        for record in recorded_factors():
            more, theirs = _recorded_rows(record, net)
            whole += more
            judged |= theirs
        missing = [f for f in factors(net, profile) if f.name not in {row["factor"] for row in whole}]
        whole += [
            {
                "factor": f.name,
                "change": f.words,
                "base": level(f.base),
                "source": NOT_RECORDED,
                "decision": NOT_RECORDED,
            }
            for f in missing
        ]
    table = pd.DataFrame(whole)
    order = list(dict.fromkeys(factor.name for factor in factors(net, profile)))
    table = table.sort_values("factor", key=lambda names: names.map(order.index), kind="stable", ignore_index=True)
    return FactorTable(_typed(table), judged)


def _typed(table: pd.DataFrame) -> pd.DataFrame:
    counts = dict.fromkeys(("loss_bit", "gradient_bit", "seeds", "same_bits"), "Int64")
    return table.astype({name: kind for name, kind in counts.items() if name in table})


def _step_rows(asked: list[Factor], net: str, profile: str, progress: bool) -> list[dict[str, Any]]:
    steps = _Steps(net, profile, STEP_SEEDS)
    rows = []
    for factor in tqdm(asked, unit="factor", leave=False, disable=not progress):
        try:
            seen = steps.compared(factor)
        except RuntimeError as error:  # torch's: a device lacks an operation under this setting
            warnings.warn(f"{factor.name}, {factor.words}: cannot be done here: {error}", stacklevel=3)
            continue
        words = {"factor": factor.name, "change": factor.words, "base": level(factor.base)}
        rows.append({**words, "emulated": factor.emulated, **seen})
    return rows


def _joined(
    rows: list[dict[str, Any]], runs: pd.DataFrame, asked: list[Factor], common: dict[str, Any], here: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[tuple[str, str], Verdict]]:
    """Rows of one step with the verdicts on the final loss."""
    judged = _verdicts(runs, asked)
    whole = []
    for row in rows:
        on_gpu = row["base"].startswith("cuda")
        machine = here["gpus"][0]["name"] if on_gpu else here["cpu"]["model"]
        effect = _effect(judged.get(row["base"]), row["change"])
        whole.append({**common, "machine": machine, **row, **effect})
    return whole, {(common["source"], base): seen for base, seen in judged.items()}


def _effect(seen: Verdict | None, change: str) -> dict[str, Any]:
    if seen is None or change not in set(seen.table.change):
        return {"seeds": 0, "decision": NOT_RECORDED}
    row = seen.table.set_index("change").loc[change]
    unit = seen.between_seeds or math.nan
    scaled = {name: float(row[column]) / unit for name, column in UNITS.items()}
    return {"seeds": int(row.seeds), **scaled, "same_bits": int(row.same_bits), "decision": row.decision}


# --- what other machines recorded ------------------------------------------------------------------------


def record_factors(
    file: str | Path,
    store: str | Path,
    net: str = "prednet",
    profile: str = "quick",
    seeds: int = 10,
    frames: int | None = None,
    workers: int = 1,
    kind: str = "cpu",
    command: str | None = None,
    progress: bool = True,
) -> None:
    """Measure on this machine what `factor_table` shows of it elsewhere: runs go to `store`, the rest to `file`.

    `kind`, `cpu` or `cuda`, is the device that the factors are changed on. The file is JSON: the passport
    and the command, one step of each factor, and how this machine converts bytes, repeats itself, fuses, and
    decodes JPEG. Raises `UsageError` where there is no such device.
    """
    from gpulab.data.datasets import load

    here = [factor for factor in factors(net, profile) if factor.kind == kind and factor.runs_here()]
    if not here:
        raise UsageError(f"kind {kind!r}: expected cpu, or cuda on a machine with such a GPU")
    base = here[0].base["setting"]
    settings = (base, "cuda:tf32=off,deterministic=off") if kind == "cuda" else (base, "cpu")
    tables = {
        "conversions": byte_round_trip(kind),
        "repeatability": repeatability(settings),
        "decoders": compare_decoders(next(load("walk", frames=20, size=(48, 64)).windows(20)).frames),
    }
    record = {
        "format": FORMAT,
        "network": net,
        "profile": profile,
        "frames": protocol(net, profile).frames if frames is None else frames,
        "kind": kind,
        "passport": dict(passport()),
        "command": command,
        "recorded": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "steps": _step_rows(here, net, profile, progress),
        "fused": fused_share(base, 100_000),
        **{name: json.loads(table.to_json(orient="records")) for name, table in tables.items()},
    }
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    options = {} if frames is None else {"frames": frames}  # last: an interruption leaves what is quickly done
    _train(here, net, profile, seeds, {"store": store, "workers": workers, "options": options}, progress)


def recorded_factors() -> list[dict[str, Any]]:
    """What other machines measured of factors, as `record_factors` wrote it; a damaged file is a `DataError`.

    >>> all(record["format"] == 1 for record in recorded_factors())
    True
    """
    records = []
    for file in sorted(recorded_folder("factors").glob("*.json")):
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{file}: cannot be read: {error}") from None
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise DataError(f"{file}: not of format {FORMAT}, which this gpulab reads")
        records.append(record)
    return records


def recorded_measurements(name: str) -> pd.DataFrame:
    """One of the tables that other machines recorded, with the columns `machine` and `torch`.

    `name` is `conversions`, `repeatability`, `fused` or `decoders`: see `byte_round_trip`, `repeatability`,
    `fused_operations` and `compare_decoders`.

    >>> "machine" in recorded_measurements("conversions")
    True
    """
    if name not in MEASURED:
        raise UsageError(f"measurement {name!r}: expected one of {', '.join(MEASURED)}")
    parts = []
    for record in recorded_factors():
        here = record["passport"]
        parts.append(pd.DataFrame(record[name]).assign(machine=_machine(record), torch=here["software"]["torch"]))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["machine", "torch"])


def _machine(record: dict[str, Any]) -> str:
    here = record["passport"]
    return here["gpus"][0]["name"] if record["kind"] == "cuda" else here["cpu"]["model"]


def _recorded_rows(record: dict[str, Any], net: str) -> tuple[list[dict[str, Any]], dict[tuple[str, str], Verdict]]:
    """A recording's steps, with the verdicts on the recorded runs of the same machine."""
    if record["network"] != net:
        return [], {}
    here = record["passport"]
    runs = stores.runs(recorded_folder("factors")).assign(recorded=True)
    gpus = ", ".join(gpu["name"] for gpu in here["gpus"])
    same = (runs.cpu == here["cpu"]["model"]) & (runs.torch == here["software"]["torch"])
    same &= (runs.gpu.fillna("") == gpus) & (runs.profile == record["profile"]) & (runs.experiment == net)
    same &= runs.frames == record["frames"]
    asked = [
        f
        for f in factors(net, record["profile"])
        if (f.words, level(f.base)) in {(s["change"], s["base"]) for s in record["steps"]}
    ]
    common = {"source": RECORDED, "profile": record["profile"]}
    return _joined(record["steps"], runs[same], asked, common, here)


# --- words -----------------------------------------------------------------------------------------------


def _sentences(table: pd.DataFrame) -> Iterator[str]:
    """A paragraph for each machine: which factors came to which decision, and how far they moved a seed."""
    known = table[table.source != NOT_RECORDED]
    for (source, machine, profile), rows in known.groupby(["source", "machine", "profile"], sort=False):
        seeds = ", ".join(str(n) for n in sorted(set(rows.seeds)))
        yield f"{source} on {machine}, {profile} size, {seeds} seeds; in standard deviations between seeds:"
        same = rows[(rows.seeds > 0) & (rows.same_bits == rows.seeds)]
        if len(same):
            yield f"  the same bits on every seed: {'; '.join(same.factor)}."
        others = rows.drop(same.index)
        for decision in (*DECISIONS[::-1], NOT_RECORDED):
            some = others[others.decision == decision]
            if len(some):
                yield f"  {decision}: {'; '.join(_in_words(row) for row in some.to_dict('records'))}."
    if lost := sorted(set(table.factor[table.source == NOT_RECORDED])):
        yield f"Not recorded: {', '.join(lost)}."


def _in_words(row: dict[str, Any]) -> str:
    name = f"{row['factor']}{' (emulated)' if row['emulated'] else ''}"
    if not row["seeds"]:
        return name
    return f"{name} {row['effect']:+.1g} [{row['low']:.1g}, {row['high']:.1g}]"


def _shown(table: pd.DataFrame) -> pd.DataFrame:
    """The table as a reader wants it: few columns, few digits."""

    def bit(value: Any) -> str:
        return "same" if pd.isna(value) else f"bit {value}"

    known = table.source != NOT_RECORDED
    shown = pd.DataFrame(
        {
            "factor": table.factor,
            "change": table.change,
            "source": [f"{s}, emulated" if e is True else s for s, e in zip(table.source, table.emulated, strict=True)],
            "first bit, loss": table.loss_bit.map(bit).where(known, ""),
            "first bit, gradient": table.gradient_bit.map(bit).where(known, ""),
            "error of one step": table.step_error.map("{:.1e}".format).where(known, ""),
            "of the base": table.base_error.map("{:.1e}".format).where(known, ""),
            "effect on the loss (sd)": table.effect.map("{:+.1g}".format).where(table.seeds > 0, ""),
            "seeds": table.seeds.where(known),
            "same bits": table.same_bits.where(table.seeds > 0),
            "verdict": table.decision,
        }
    )
    return shown.astype(object).where(shown.notna(), "")
