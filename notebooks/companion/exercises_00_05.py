"""The checks of the exercises of notebooks 00 to 05; see `exercises`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from companion.answers import (
    choice,
    decisions,
    exercise,
    fields,
    judged,
    near,
    need,
    number,
    pair,
    recorded,
    shown,
    table,
)
from companion.findings import setting_in_text
from companion.learning import missing_colour_losses
from gpulab.audits.audits import Audit
from gpulab.device.rooflines import UNDER_THE_ROOF, recorded_rooflines
from gpulab.stats.verdicts import verdict
from gpulab.training.run import Run

# --- 00: does the device change what a network learns? ---------------------------------------------------


@exercise("00-1", "a number of seeds")
def _fewest_seeds(answer: Any) -> str:
    mistakes = {7: "half a chance is missing: all may agree upwards, or downwards", 6: "the fewest for 5 %, not 1 %"}
    near(answer, 8, mistakes, rel=1e-6)
    return f"by luck alone 8 seeds agree with a probability of 2 in 256, {2 / 256:.3g}."


@exercise("00-2", "(calm, busy), two tables of runs from two stores")
def _under_load(answer: Any) -> str:
    calm, busy = (table(runs, "protocol", "setting", "seed", "weights", "path", "seconds") for runs in pair(answer))
    need(not set(calm.path) & set(busy.path), "both tables are of the same runs: a store gives back what it has")
    pairs = calm.merge(busy, on=["protocol", "setting", "seed"])
    need(pairs.seed.nunique() >= 3, f"{pairs.seed.nunique()} seeds are in both, under the same setting: take three")
    same, slower = (pairs.weights_x == pairs.weights_y).sum(), pairs.seconds_y.sum() / pairs.seconds_x.sum()
    return f"{same} of {len(pairs)} trainings have the same bits; under load they took {slower:.2g} times as long."


@exercise("00-3", "a table of runs, of two settings and three seeds at least, each with reruns")
def _reruns(answer: Any) -> str:
    runs = table(answer, "setting", "seed", "rerun", "weights").groupby(["setting", "seed"])
    need((runs["rerun"].nunique() >= 2).all(), "some seed was run once only: ask for reruns=2")
    results = runs.weights.nunique().unstack("seed")
    settings, seeds = results.shape
    need(settings >= 2, "one setting: the question is which of several repeat themselves")
    need(seeds >= 3, f"{seeds} seeds: take three at least")
    others = ", ".join(map(setting_in_text, results.index[results.max(axis=1) > 1]))
    outcome = f"other bits under {others}" if others else "the same bits"
    return f"{settings} settings were run twice, and the second time gave {outcome}. Nobody has a complete list."


# --- 01: what is inside your device ----------------------------------------------------------------------


@exercise("01-1", "a number, in flop per byte")
def _intensity(answer: Any) -> str:
    one, many = (2 * 784 * 128 * images / (4 * (784 * 128 + images * (784 + 128))) for images in (1, 64))
    mistakes = {
        one: "that of one image, not of 64",
        many / 2: "half of it. A multiplication with its addition counts as two, and a float32 has 4 bytes",
        4 * many: "four times too large: count bytes, not numbers",
    }
    near(answer, many, mistakes)
    return f"{many:.3g} flop per byte, {many / one:.0f} times that of one image: the weights are read once."


@exercise("01-2", "(table, 'memory') or (table, 'arithmetic'): both rooflines in one table, and what falls more")
def _ceilings(answer: Any) -> str:
    frame, falls_more = pair(answer)
    frame = table(frame, "setting", "kind", "gflops", "gigabytes_per_second")
    need({"cpu", "cpu:threads=1"} <= set(frame.setting), "rows of cpu or of cpu:threads=1 are missing: use pd.concat")
    memory = frame[frame.kind == "memory"].groupby("setting").gigabytes_per_second.max()
    arithmetic = frame[frame.kind.isin(UNDER_THE_ROOF)].groupby("setting").gflops.max()
    of_memory, of_arithmetic = (speed["cpu"] / speed["cpu:threads=1"] for speed in (memory, arithmetic))
    numbers = f"with all threads {of_memory:.2f} times the memory and {of_arithmetic:.2f} times the arithmetic of one"
    right = "memory" if of_memory > of_arithmetic else "arithmetic"
    need(choice(falls_more, "memory", "arithmetic") == right, f"in this table, {numbers}")
    return f"{numbers}. Cores compute alone and share the way to memory."


@exercise("01-3", "{'cpu': {'gflops': …, 'watts': …}, 'cuda': {'gflops': …, 'watts': …}}, of the autoencoder's layer")
def _per_joule(answer: Any) -> str:
    per_joule = []
    for device in ("cpu", "cuda"):
        row = fields(fields(answer, "cpu", "cuda")[device], "gflops", "watts")
        rate, watts = number(row["gflops"]), number(row["watts"])
        need(1 <= watts <= 2000, f"{device}: {watts:g} is no power in watts")
        per_joule.append(f"{rate / watts:.2g}")
    layer = recorded_rooflines().query("operation.str.startswith('autoencoder')").gflops.max()
    need(rate < 10 * layer, f"{rate:g} Gflop/s is near the GPU's peak, and this layer was recorded at {layer:.3g}")
    return f"Gflop per joule: {' on the CPU, '.join(per_joule)} on the GPU. A data sheet's watts are of full load."


# --- 02: why do two correct devices disagree? ------------------------------------------------------------


@exercise("02-1", "a number of orders, of the thousand")
def _exact_orders(answer: Any) -> str:
    def hits(x: np.ndarray) -> int:
        orders = np.random.default_rng(0)
        sums = [np.add.accumulate(orders.permutation(x))[-1] for _ in range(1000)]
        return sums.count(np.float32(math.fsum(x)))

    x = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    of_x, right = hits(x.numpy()), hits((x * 1e4 - 5e3).numpy())
    mistakes = {
        of_x: "those of x itself, and x * 1e4 - 5e3 is asked for",
        0: "was the exact sum left in float64? Round it to float32 before you compare",
    }
    near(answer, right, mistakes, rel=1e-6)
    return f"with x itself {of_x} do. On the way the sums are far larger than at the end, and last digits are lost."


@exercise("02-2", "a verdict on `distance` by `change`, at the last step, from six seeds at least")
def _grown(answer: Any) -> str:
    distances = judged(answer, "change", metric="distance")
    levels = ", ".join(map(str, [distances.reference, *distances.decisions]))
    need("tf32" in levels.lower() and "bit" in levels, f"TF32 and one bit of one weight are not both among {levels}")
    need(distances.runs.step.min() > 0, "this is the first step, before any training: take the last")
    return f"after {distances.runs.step.max()} updates, {decisions(distances)}."


@exercise("02-3", "{'start': w, 'neighbour': w, 'end': loss, 'neighbour_end': loss}, four numbers")
def _one_bit_decides(answer: Any) -> str:
    names = ("start", "neighbour", "end", "neighbour_end")
    start, neighbour, *ends = (number(fields(answer, *names)[name]) for name in names)
    ulps = abs(int(np.float32(start).view(np.int32)) - int(np.float32(neighbour).view(np.int32)))
    need(ulps == 1, f"{ulps} float32 numbers apart, and one bit of one weight is one: torch.nextafter finds it")
    low, high = sorted(ends)
    need(high - low > 0.01 * abs(high), f"{low:.6g} and {high:.6g} differ by less than 1 %: the bit decides nothing")
    return f"one bit decides between {low:.3g} and {high:.3g}. That such a start is ever drawn is another matter."


# --- 03: does an autoencoder learn the same on every device? ---------------------------------------------


@exercise("03-1", "a number of settings, of the five")
def _enough_to_matter(answer: Any) -> str:
    quick = recorded("autoencoder", "quick", loader="window")
    narrow, usual = (list(verdict(quick, reference="cpu", margin=m).decisions.values()) for m in ("0.02sd", None))
    mistakes = {
        narrow.count("equivalent"): "those that are equivalent, and the others are asked for",
        usual.count("different"): "with the usual margin, a quarter of the sd: give margin='0.02sd'",
    }
    near(answer, narrow.count("different"), mistakes, rel=1e-6)
    return "the differences stayed, the margin moved. What matters you say before you look; no run can tell it."


@exercise("03-2", "a verdict on six seeds at least, with cpu:precision=bfloat16 among the settings")
def _in_bfloat16(answer: Any) -> str:
    by_setting = judged(answer, "setting")
    levels = ", ".join(map(str, by_setting.decisions))
    need("emulate=bfloat16" not in levels, "emulate rounds products; weights are to be bfloat16")
    need("precision=bfloat16" in levels, f"bfloat16 is not compared with another setting: there are {levels}")
    return f"{decisions(by_setting)}, on {int(by_setting.table.seeds.min())} seeds."


@exercise("03-3", "{1: verdict, 32: verdict}, by images in an update, each of TF32 against float32")
def _batches_of_32(answer: Any) -> str:
    one, many = (judged(fields(answer, 1, 32)[images], "setting", seeds=3) for images in (1, 32))
    for by_setting in (one, many):
        levels = [str(by_setting.reference), *map(str, by_setting.decisions)]
        rounded = ["tf32=on" in level or "emulate=" in level for level in levels]
        need(any(rounded) and not all(rounded), f"TF32 and float32 are not both among {', '.join(levels)}")
    same = set(one.runs.protocol) & set(many.runs.protocol)
    need(not same, "both are of one protocol: model_options={'batch_size': 32} did not arrive")
    outcomes = [f"{v.table.same_bits.iloc[-1]:.0f} of {v.table.seeds.iloc[-1]} seeds" for v in (one, many)]
    return f"{outcomes[0]} have the same bits with one image an update, with 32 {outcomes[1]}."


# --- 04: does PredNet learn better on a GPU? -------------------------------------------------------------


@exercise("04-1", "a number of seeds, of the 32")
def _not_learned(answer: Any) -> str:
    runs = recorded("prednet", "quick", loader="copied", speed=1)
    stuck_runs = runs[runs.final_loss >= missing_colour_losses(runs)]
    stuck = int((stuck_runs.setting == "cpu:threads=1").sum())
    mistakes = {
        32 - stuck: "those that learned, and the others are asked for",
        len(stuck_runs): "those of both settings: a seed was run on each",
    }
    near(answer, stuck, mistakes, rel=1e-6)
    return f"{stuck} of 32 seeds, and on the GPU {len(stuck_runs) - stuck}. A mean over all mixes whether and how well."


@exercise("04-2", "(run, ratio): a run of gl.train, and its held-out loss over that of repeating the last frame")
def _own_film(answer: Any) -> str:
    run, ratio = pair(answer)
    need(isinstance(run, Run), f"{shown(run)} is no run: gl.train(…) returns one")
    film = run.record["configuration"]["data"]
    need(film != "walk", "this is the walk, the film of the notebook: take another, 'video:FILE' or 'moving-digits'")
    repeat = run.data.repeat_loss()
    trained_on = "final_loss is of the frames that were trained on: take heldout_loss"
    near(ratio, run.heldout_loss / repeat, {run.final_loss / repeat: trained_on})
    beats = "beats" if run.heldout_loss < repeat else "does not beat"
    return f"on {film} the network {beats} repeating the last frame: {run.heldout_loss / repeat:.3g} times its loss."


@exercise("04-3", "a verdict by setting on when a seed leaves its plateau, a column of yours, from six seeds at least")
def _leaving(answer: Any) -> str:
    metric = getattr(answer, "metric", "")
    need(metric not in ("final_loss", "heldout_loss"), f"{metric} says how well, and when a seed leaves is asked for")
    plateau_verdict = judged(answer, "setting", metric=metric)
    not_counted = int(plateau_verdict.table.diverged.sum() + plateau_verdict.table.left_out.sum())
    return f"{decisions(plateau_verdict)}. Not counted: {not_counted} seeds. What another threshold would say is open."


# --- 05: did GPUs train better, or did CPUs train wrongly? -----------------------------------------------


@exercise("05-1", "(overwritten, copied), the sums of the twenty tensors without and with a copy")
def _window_sums(answer: Any) -> str:
    overwritten, copied = 20 * 20, sum(range(1, 21))  # all hold the last frame, or each its own
    first, second = (number(value) for value in pair(answer))
    need(first != copied, f"{first:g} is the sum of what was put in. The tensors share the buffer's memory")
    near(first, overwritten, {19 * 20: "nineteen frames: the window has twenty"})
    near(second, copied, {overwritten: "a copy does not change when the buffer does", 190: "here frames are 1 to 20"})
    return f"{overwritten} is twenty times the last frame: every step of the window holds it."


@exercise("05-2", "the audit of two traces, gl.audit(copied, overwritten)")
def _found_by_audit(answer: Any) -> str:
    need(isinstance(answer, Audit), f"{shown(answer)} is no audit: record both loaders and compare them with gl.audit")
    faults = [bool(trace.overwritten) for trace in (answer.a, answer.b)]
    need(any(faults), "neither trace was overwritten: record 'prednet' with the loader 'reused'")
    need(not all(faults), "both traces were overwritten: record one with the loader 'copied'")
    finding = next(finding for finding in answer.findings if finding.kind == "overwritten")
    return f"the audit names {finding.operation} ({finding.phase}). No loss would have shown it."


@exercise("05-3", "a verdict by loader, 'reused' against 'copied', not on the walk, from six seeds at least")
def _helpful_fault(answer: Any) -> str:
    found = judged(answer, "loader")
    need(found.reference == "copied", f"the reference is {found.reference!r}: a fault is measured from what is right")
    need("reused" in found.decisions, f"'reused' is not among {', '.join(map(str, found.decisions))}")
    data = set(found.runs.data)
    need(data != {"walk"}, "these runs saw the walk, of which the notebook tells: look for other data")
    row = found.table[found.table.loader == "reused"].iloc[0]
    return (
        f"{row.decision}, with a mean difference of {row.difference:+.2g}; below zero, overwritten frames helped. Two "
        "networks that have learned nothing are alike whatever the gradient was."
    )
