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
from gpulab.models import Autoencoder
from gpulab.numerics.formats import ulp_distance
from gpulab.stats.tests import sign_flip_p
from gpulab.stats.verdicts import verdict
from gpulab.training.run import Run

# --- 00: does the device change what a network learns? ---------------------------------------------------


@exercise("00-1", "a number of seeds")
def _fewest_seeds(answer: Any) -> str:
    at_one_percent, at_five_percent = (
        next(n for n in range(1, 50) if sign_flip_p([1.0] * n) <= alpha) for alpha in (0.01, 0.05)
    )
    mistakes = {
        at_one_percent - 1: "half a chance is missing: all of them may agree upwards, or downwards",
        at_five_percent: "the fewest for 5 %, and 1 % is asked for",
    }
    near(answer, at_one_percent, mistakes, rel=1e-6)
    return (
        f"by luck alone {at_one_percent} seeds agree with a probability of {sign_flip_p([1.0] * at_one_percent):.3g}."
    )


@exercise("00-2", "(calm, busy), two tables of runs from two stores")
def _under_load(answer: Any) -> str:
    columns = ("experiment", "protocol", "setting", "seed", "weights", "path", "seconds")
    calm, busy = (table(runs, *columns) for runs in pair(answer))
    need(not set(calm.path) & set(busy.path), "both tables are of the same runs: a store gives back what it has")
    paired_runs = calm.merge(busy, on=["experiment", "protocol", "setting", "seed"])
    need(
        paired_runs.seed.nunique() >= 3,
        f"{paired_runs.seed.nunique()} seeds are in both, under the same setting: take three",
    )
    same_bits = int((paired_runs.weights_x == paired_runs.weights_y).sum())
    slower = paired_runs.seconds_y.sum() / paired_runs.seconds_x.sum()
    return (
        f"{same_bits} of {len(paired_runs)} trainings have the same bits; under load they took {slower:.2g} times as "
        "long."
    )


@exercise("00-3", "a table of runs, of two settings and three seeds at least, each with reruns")
def _reruns(answer: Any) -> str:
    frame = table(answer, "setting", "seed", "rerun", "weights")
    settings, seeds = frame.setting.nunique(), frame.seed.nunique()
    need(settings >= 2, "one setting: the question is which of several repeat themselves")
    need(seeds >= 3, f"{seeds} seeds: take three at least")
    reruns = frame.groupby(["setting", "seed"])
    need((reruns["rerun"].nunique() >= 2).all(), "some seed was run once only: ask for reruns=2")
    bits_differ = reruns.weights.nunique() > 1
    unrepeatable = ", ".join(map(setting_in_text, sorted(set(bits_differ[bits_differ].reset_index().setting))))
    outcome = f"other bits under {unrepeatable}" if unrepeatable else "the same bits"
    return f"{settings} settings were run twice, and the second time gave {outcome}. Nobody has a complete list."


# --- 01: what is inside your device ----------------------------------------------------------------------


@exercise("01-1", "a number, in flop per byte")
def _intensity(answer: Any) -> str:
    outside, inside = Autoencoder().get_parameter("layers.0.weight").shape

    def intensity(images: int) -> float:
        return 2 * outside * inside * images / (4 * (outside * inside + images * (outside + inside)))

    mistakes = {
        intensity(1): "that of one image, not of 64",
        intensity(64) / 2: "half of it. A multiplication with its addition counts as two, and a float32 has 4 bytes",
        4 * intensity(64): "four times too large: count bytes, not numbers",
    }
    flop_per_byte = near(answer, intensity(64), mistakes)
    return (
        f"{flop_per_byte:.3g} flop per byte, {flop_per_byte / intensity(1):.0f} times that of one image: the weights "
        "are read once."
    )


@exercise("01-2", "(table, 'memory') or (table, 'arithmetic'): both rooflines in one table, and what falls more")
def _ceilings(answer: Any) -> str:
    frame, falls_more = pair(answer)
    frame = table(frame, "setting", "kind", "gflops", "gigabytes_per_second")
    missing = [setting for setting in ("cpu", "cpu:threads=1") if setting not in set(frame.setting)]
    need(not missing, f"the table has no rows of {' and '.join(missing)}: pd.concat puts two rooflines together")
    choice(falls_more, "memory", "arithmetic")
    under_the_roof = frame[frame.kind.isin(UNDER_THE_ROOF)]
    peaks = {
        "memory": under_the_roof[under_the_roof.kind == "memory"].groupby("setting").gigabytes_per_second.max(),
        "arithmetic": under_the_roof.groupby("setting").gflops.max(),
    }
    fall = {name: float(peak["cpu"] / peak["cpu:threads=1"]) for name, peak in peaks.items()}
    times = " and ".join(f"{name} is {ratio:.2f} times" for name, ratio in fall.items())
    numbers = f"with all threads {times} as fast as with one"
    need(falls_more == max(fall, key=lambda name: fall[name]), f"in this table, {numbers}")
    return f"{numbers}. Cores compute alone and share the way to memory."


@exercise("01-3", "{'cpu': {'gflops': …, 'watts': …}, 'cuda': {'gflops': …, 'watts': …}}, of the autoencoder's layer")
def _per_joule(answer: Any) -> str:
    gflop_per_joule = {}
    for device, row in fields(answer, "cpu", "cuda").items():
        rate, watts = (number(fields(row, "gflops", "watts")[name]) for name in ("gflops", "watts"))
        need(1 <= watts <= 2000, f"{device}: {watts:g} is no power in watts")
        gflop_per_joule[device] = rate / watts
    frame = recorded_rooflines()
    layer = frame[frame.operation.str.startswith("autoencoder") & (frame.setting == "cuda:tf32=off")].gflops.max()
    rate = number(answer["cuda"]["gflops"])
    need(rate < 10 * layer, f"{rate:g} Gflop/s is near the GPU's peak, and this layer was recorded at {layer:.3g}")
    best = "CPU" if gflop_per_joule["cpu"] > gflop_per_joule["cuda"] else "GPU"
    return (
        f"by these numbers the {best} does more with a joule: {gflop_per_joule['cpu']:.2g} Gflop on the CPU, "
        f"{gflop_per_joule['cuda']:.2g} on the GPU. Whether the watts are those of this layer cannot be seen from "
        "here: a data sheet's are of full load."
    )


# --- 02: why do two correct devices disagree? ------------------------------------------------------------


@exercise("02-1", "a number of orders, of the thousand")
def _exact_orders(answer: Any) -> str:
    def hits(x: torch.Tensor) -> int:
        orders = np.random.default_rng(0)
        sums = [np.add.accumulate(orders.permutation(x.numpy()))[-1] for _ in range(1000)]
        return int((np.array(sums) == np.float32(math.fsum(x.tolist()))).sum())

    x = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    unshifted_hits, shifted_hits = hits(x), hits(x * 1e4 - 5e3)
    mistakes = {
        unshifted_hits: "those of x itself, and x * 1e4 - 5e3 is asked for",
        1000 - shifted_hits: "those that miss the exact sum",
        0: "was the exact sum left in float64? Round it to float32 before you compare",
    }
    near(answer, shifted_hits, mistakes, rel=1e-6)
    return (
        f"{shifted_hits} of 1000 orders hit the exact sum, and with x itself {unshifted_hits} did. On the way "
        "the sums are far larger than what is left at the end, and its last digits are lost."
    )


@exercise("02-2", "a verdict on `distance` by `change`, at the last step, from six seeds at least")
def _grown(answer: Any) -> str:
    distance_verdict = judged(answer, "change", metric="distance")
    levels = [str(distance_verdict.reference), *map(str, distance_verdict.decisions)]
    need(any("tf32" in level.lower() for level in levels), f"TF32 is not among {', '.join(levels)}")
    need(any("bit" in level for level in levels), f"one bit of one weight is not among {', '.join(levels)}")
    steps = distance_verdict.runs.step.unique()
    need(steps.min() > 0, "this is the first step, before any training: take the last")
    return f"after {steps.max()} updates, {decisions(distance_verdict)}."


@exercise("02-3", "{'start': w, 'neighbour': w, 'end': loss, 'neighbour_end': loss}, four numbers")
def _one_bit_decides(answer: Any) -> str:
    names = ("start", "neighbour", "end", "neighbour_end")
    start, neighbour, end, neighbour_end = (number(fields(answer, *names)[name]) for name in names)
    ulps = int(ulp_distance(torch.tensor(start), torch.tensor(neighbour)))
    need(ulps, "start and neighbour are the same float32: a float64 has more digits than the weight")
    need(ulps == 1, f"{ulps} float32 numbers apart: one bit of one weight is one. torch.nextafter finds it")
    low, high = sorted((end, neighbour_end))
    need(high - low > 0.01 * abs(high), f"{low:.6g} and {high:.6g} differ by less than 1 %: the bit decides nothing")
    return (
        f"one bit decides between {low:.3g} and {high:.3g}. Is your start on a ridge, from which the loss "
        "falls to either side? That such a start is ever drawn is another matter."
    )


# --- 03: does an autoencoder learn the same on every device? ---------------------------------------------


@exercise("03-1", "a number of settings, of the five")
def _enough_to_matter(answer: Any) -> str:
    quick = recorded("autoencoder", "quick", loader="window")
    narrow_decisions, usual_decisions = (
        list(verdict(quick, reference="cpu", margin=m).decisions.values()) for m in ("0.02sd", None)
    )
    mistakes = {
        narrow_decisions.count("equivalent"): "those that are equivalent, and the others are asked for",
        usual_decisions.count("different"): "with the usual margin, a quarter of the sd: give margin='0.02sd'",
        len(narrow_decisions): "all of them. A setting that gives nearly the same losses is within any margin",
    }
    near(answer, narrow_decisions.count("different"), mistakes, rel=1e-6)
    return "the differences stayed, the margin moved. What matters you say before you look; no run can tell it."


@exercise("03-2", "a verdict on six seeds at least, with cpu:precision=bfloat16 among the settings")
def _in_bfloat16(answer: Any) -> str:
    setting_verdict = judged(answer, "setting")
    levels = ", ".join(map(str, setting_verdict.decisions))
    need("emulate=bfloat16" not in levels, "emulate rounds products; weights are to be bfloat16")
    need("precision=bfloat16" not in str(setting_verdict.reference), "bfloat16 is the reference: compare with float32")
    need("precision=bfloat16" in levels, f"bfloat16 is not among {levels}")
    return f"{decisions(setting_verdict)}, on {int(setting_verdict.table.seeds.min())} seeds."


@exercise("03-3", "{1: verdict, 32: verdict}, by images in an update, each of TF32 against float32")
def _batches_of_32(answer: Any) -> str:
    outcomes, protocols = [], []
    for images in (1, 32):
        size_verdict = judged(fields(answer, 1, 32)[images], "setting", seeds=3)
        levels = [str(size_verdict.reference), *map(str, size_verdict.decisions)]
        rounded = [level for level in levels if "tf32=on" in level or "emulate=" in level]
        need(rounded, f"of {images}: no setting uses TF32 among {', '.join(levels)}")
        need(len(rounded) < len(levels), f"of {images}: no setting computes in float32 among {', '.join(levels)}")
        row = size_verdict.table.iloc[-1]
        images_words = "one image" if images == 1 else f"{images} images"
        outcomes.append(
            f"with {images_words} an update {int(row.same_bits)} of {int(row.seeds)} seeds have the same bits"
        )
        protocols.append(set(size_verdict.runs.protocol))
    need(not protocols[0] & protocols[1], "both are of one protocol: model_options={'batch_size': 32} did not arrive")
    return f"{', '.join(outcomes)}. A GPU uses TF32 for products of matrices; the emulation rounds every product."


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
