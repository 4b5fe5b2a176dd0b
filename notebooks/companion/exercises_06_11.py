"""The checks of the exercises of notebooks 06 to 11; see `exercises`."""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch

from companion.answers import choice, exercise, fields, near, need, number, pair, recorded, shown, table
from gpulab.device import Placement
from gpulab.guards import Guard
from gpulab.settings import Setting
from gpulab.stats.verdicts import verdict
from gpulab.store.recorded import recorded_table

# --- 06: does rounding noise help a network to leave a saddle? -------------------------------------------


def _escapes(value: Any, optimizer: str) -> pd.DataFrame:
    columns = ("setting", "optimizer", "perturbation", "learning_rate", "master_weights", "left", "moved", "step_ratio")
    frame = table(getattr(value, "table", value), *columns)
    need(optimizer in set(frame.optimizer), f"no row is of {optimizer}")
    return frame[frame.optimizer == optimizer]


@exercise("06-1", "(table, who): of gl.saddles.escape_table, and who left: 'float32', 'float64', 'both' or 'neither'")
def _pushed(answer: Any) -> str:
    frame, who = pair(answer)
    frame = _escapes(frame, "sgd")
    need(set(frame.perturbation) == {1e-9}, "perturbations=[1e-9] is asked for: another push is another question")
    in_float64 = frame.setting.str.contains("precision=float64")
    in_float32 = ~frame.setting.str.contains("precision|emulate")
    need(
        in_float64.any() and in_float32.any(),
        "the table lacks float32 or float64: take two settings of one kind of CPU",
    )
    outcomes = {(True, True): "both", (True, False): "float64", (False, True): "float32", (False, False): "neither"}
    who_left = outcomes[bool(frame[in_float64].left.all()), bool(frame[in_float32].left.all())]
    moved = frame[in_float32].moved.mean()
    choice(who, "float32", "float64", "both", "neither")
    need(who == who_left, f"in this table {who_left} left. The first step moved {moved:.0%} of the weights in float32")
    return (
        f"{who_left} left. In float32 the first step moved {moved:.0%} of the weights; for the others it is rounded "
        "away."
    )


@exercise("06-2", "a table of escapes by Adam, weights in bfloat16, with and without master weights, at several rates")
def _adam_in_bfloat16(answer: Any) -> str:
    frame = _escapes(answer, "adam")
    frame = frame[frame.setting.str.contains("precision=bfloat16")]
    need(len(frame), "no row has weights in bfloat16: the setting is cpu:precision=bfloat16")
    need(frame.master_weights.nunique() == 2, "both are needed, master_weights=True and without: pd.concat the tables")
    plain = frame[~frame.master_weights].groupby("learning_rate").left.all()
    need(plain.any(), "without master weights nobody left: try larger rates too")
    need(not plain.all(), "without master weights all left: try smaller rates too")
    smallest_leaving, largest_held = plain[plain].index.min(), plain[~plain].index.max()
    need(
        smallest_leaving <= 10.001 * largest_held,
        f"between {largest_held:g} and {smallest_leaving:g} lies more than a factor of ten: try rates between",
    )
    master = frame[frame.master_weights].groupby("learning_rate").left.all()
    need(largest_held in master.index, f"with master weights {largest_held:g} was not tried, which held the others")
    outcome = "leaves" if master[largest_held] else "does not leave either"
    return (
        f"in bfloat16 Adam is held at {largest_held:g} and leaves at {smallest_leaving:g}; with master weights it "
        f"{outcome} at {largest_held:g}."
    )


@exercise("06-3", "a table of escapes by sgd in float32, from a saddle with small weights")
def _small_weights(answer: Any) -> str:
    frame = _escapes(answer, "sgd")
    frame = frame[~frame.setting.str.contains("precision|emulate") & ~frame.master_weights]
    need(len(frame), "no row is in float32 alone: neither another precision, nor emulated, nor master weights")
    need((frame.step_ratio > 1).any(), f"step_ratio is {frame.step_ratio.max():.2g}: steps are still rounded away")
    frame = frame[frame.step_ratio > 1]
    need(frame.left.any(), "steps are long enough, and nobody left: push it, by perturbations=[…], or wait longer")
    times_expected = float((frame.steps / frame.expected).median())
    need(0.5 < times_expected < 2, f"it left after {times_expected:.2g} times the steps that the law expects")
    return (
        f"float32 leaves after {times_expected:.2f} times the steps that the law expects. Would a trained network "
        "pass there? Compare its weights with those of your saddle."
    )


# --- 07: how much faster is a GPU? -----------------------------------------------------------------------


@exercise("07-1", "a price of an hour, in the currency in which an hour of the CPU costs 0.10")
def _break_even(answer: Any) -> str:
    rows = recorded_table("speed").query("part == 'text' and way == 'float32' and unit == 's' and size == 'quick'")
    seconds = rows.groupby("setting").value.median()
    times = seconds.filter(like="cpu").min() / seconds["cuda:tf32=off"]
    mistakes = {
        times: "how many times as dear an hour may be: multiply it by the price of an hour of the CPU",
        0.1 / times: "the wrong way round: the faster device may cost more",
    }
    near(answer, 0.1 * times, mistakes)
    return f"{0.1 * times:.3g} an hour. `breaks even at`, {times:.3g}, is the same whatever the prices are."


@exercise("07-2", "{'usual': …, 'words': …, 'width': …}, three placements of gl.device.place")
def _placements(answer: Any) -> str:
    placed = [fields(answer, "usual", "words", "width")[name] for name in ("usual", "words", "width")]
    need(all(isinstance(each, Placement) for each in placed), "these are not three placements")
    usual, words, width = (sum(each.flop.values()) for each in placed)
    need(1.8 < words / usual < 2.8, "'words' does not about twice the operations: take texts of twice as many words")
    need(width / usual > 2.8, "'width' does not nearly four times the operations: take a network of twice the width")
    intensities = ", ".join(f"{name} {each.intensity:.3g}" for name, each in answer.items())
    return f"flop per byte: {intensities}. A product's operations grow faster with its width than what it moves."


@exercise("07-3", "(slow, fast), two rows of the table `recorded`, in seconds")
def _any_number(answer: Any) -> str:
    slow, fast = (fields(row, "what", "way", "size", "value", "unit", "setting", "machine") for row in pair(answer))
    need(slow["unit"] == fast["unit"] == "s", f"{slow['unit']} and {fast['unit']}: two times in seconds are compared")
    for name in ("what", "size"):
        need(slow[name] == fast[name], f"{slow[name]} against {fast[name]}: that is not the same work")
    need(any(slow[name] != fast[name] for name in ("machine", "setting")), "both are of one device")
    ratio = number(slow["value"]) / number(fast["value"])
    need(abs(ratio * 13.76 - 1) > 0.02, "the inverse: the slow one comes first")
    need(abs(ratio / 13.76 - 1) < 0.02, f"{ratio:.4g} times, which is more than 2 % from 13.76")
    return f"{ratio:.4g} times, by {slow['what']}, {slow['way']}. Among enough pairs there is one for any number."


# --- 08: when do many devices train faster than one? -----------------------------------------------------


@exercise("08-1", "a number of devices")
def _twice_the_price(answer: Any) -> str:
    # n devices take (1 + 64 / 8n) / (1 + 64 / 8) times the updates of one, so the price is (n + 8) / 9 times as high.
    mistakes = {10: "there the price is 2, and more than that is asked for", 16: "dear enough, but not the fewest"}
    near(answer, 11, mistakes, rel=1e-6)
    return f"11 devices are {9 * 11 / 19:.2f} times as fast for {19 / 9:.2f} times the price."


@exercise("08-2", "(small, large), the tables `descents` of hogwild.py with two sizes of `--hidden`")
def _gain_without_a_lock(answer: Any) -> str:
    small, large = (table(descents, "way", "seed", "weights", "updates_per_second") for descents in pair(answer))
    gains = []
    need(min(small.seed.nunique(), large.seed.nunique()) >= 6, "fewer than six seeds: take six at least")
    for frame in (small, large):
        speeds = frame.groupby("way").updates_per_second.mean()
        gains.append(speeds["lock-free"] / speeds["synchronous"])
    need(small.weights.max() < large.weights.max(), "the smaller network comes first, and has fewer weights")
    return f"without a lock the small network makes {gains[0]:.2f} times the updates a second, the large {gains[1]:.2f}"


@exercise("08-3", "[(critical batch, devices), …], a phase each, two at least, of equally many updates at least")
def _schedule(answer: Any) -> str:
    need(isinstance(answer, (list, tuple)) and 2 <= len(answer) <= 1000, f"{shown(answer)} is no list of two phases")
    batches, devices = zip(*([number(value) for value in pair(phase)] for phase in answer), strict=True)
    need(min(batches) > 0, "a critical batch is above 0")
    need(all(count >= 1 and count.is_integer() for count in devices), "a number of devices is whole, and at least 1")
    need(batches[0] < batches[-1], "the critical batch does not grow, and the question is what to do when it does")
    mean = sum(devices) / len(devices)  # costs as much: a phase's price is proportional to its devices + B_crit / 8
    steady = sum(1 + batch / (8 * mean) for batch in batches)  # S = S_min (1 + B_crit / B), and B is 8 for each device
    gain = steady / sum(1 + batch / (8 * count) for batch, count in zip(batches, devices, strict=True))
    need(gain > 1, f"for the same price {mean:.3g} devices all the time are {1 / gain:.2f} times as fast")
    return (
        f"by the law it is {gain:.2f} times as fast as {mean:.3g} devices all the time, for the same price. Whether it "
        "ends where the usual training does only a verdict says, and no run was looked at here."
    )


# --- 09: why does a network become NaN on the new card? --------------------------------------------------


@exercise("09-1", "a number of updates")
def _updates_to_nan(answer: Any) -> str:
    runs = recorded("whitener", "quick", covariance="one-pass", setting="cuda:tf32=on")
    diverged_runs = runs[runs.status == "diverged"]
    mistakes = {
        float(diverged_runs.diverged_at.mean()): "the mean, which a few late ones draw up: take the median",
        len(diverged_runs): "how many became NaN, and after how many updates is asked for",
        float(diverged_runs.diverged_at.max()): "the last one to fail, and not the median",
    }
    near(answer, float(diverged_runs.diverged_at.median()), mistakes, rel=1e-6)
    middle, last = diverged_runs.diverged_at.median(), diverged_runs.diverged_at.max()
    return f"half of {len(diverged_runs)} are NaN after {middle:g} updates, the last after {last:g}."


@exercise("09-2", "a table of runs, one-pass and centred, under two arithmetics, on six seeds at least")
def _centred(answer: Any) -> str:
    runs = table(answer, "setting", "covariance", "status", "seed")
    runs = runs[runs.setting.str.contains("emulate=|tf32=on")]
    need(len(runs), "no run has fewer bits: take cpu:tf32=on,emulate=ampere and cpu:emulate=bfloat16")
    need(runs.setting.nunique() >= 2, "one arithmetic: take cpu:emulate=bfloat16 too, or order=tensor-core")
    has_both = {"one-pass", "centred"} <= set(runs.covariance)
    need(
        has_both,
        "model_options={'covariance': 'centred'} and 'one-pass' are compared: without the one nothing is at risk",
    )
    seeds = runs.groupby(["setting", "covariance"]).seed.nunique()
    need(seeds.min() >= 6, f"{seeds.min()} seeds in one of the cells: take six at least")
    diverged_counts = (runs.status == "diverged").groupby(runs.covariance).sum()
    need(diverged_counts["one-pass"], "no run in one pass became NaN: train longer, for the control must fail")
    return (
        f"NaN: {diverged_counts['one-pass']} runs in one pass, {diverged_counts['centred']} centred. Why, the proof "
        "must say."
    )


@exercise("09-3", "the covariance (24, 24) of the exercise's codes, from sums alone, under gl.emulate('tf32')")
def _shifted(answer: Any) -> str:
    codes = torch.randn(50, 24, generator=torch.Generator().manual_seed(0)) * 0.003 + 0.5
    exact = torch.cov(codes.double().T, correction=0)
    need(isinstance(answer, torch.Tensor), f"{shown(answer)} is no tensor")
    need(answer.shape == exact.shape, f"its shape is {tuple(answer.shape)}")
    covariance = answer.detach().cpu().double()
    need(covariance.isfinite().all(), "it is not finite")
    error, error_by_49 = (
        float((matrix - exact).norm() / exact.norm()) for matrix in (covariance, covariance * 49 / 50)
    )
    need(error_by_49 > 1e-3, "divided by 49: here it is by 50, as in the notebook")
    need(
        error < 0.5, f"off by {error:.2g} times its size: that is one pass. Subtract a number near the mean beforehand"
    )
    need(error < 0.005, f"off by {error:.1%}: what you subtracted is not quite the mean. Take its product away, too")
    need(error > 1e-5, f"off by {error:.0e}: no product was in TF32. Compute it under gl.emulate('tf32')")
    return (
        f"off by {error:.1e} only. A matrix does not show that it was made from sums alone, nor that the product is "
        "innocent: an audit of the step does."
    )


# --- 10: what does everything recorded so far prove? -----------------------------------------------------


@exercise("10-1", "a probability, between 0 and 1")
def _luck(answer: Any) -> str:
    mistakes = {
        0.95**20: "the probability that none of them does",
        1.0: "twenty times 5 %: a bound, which adds up what happens together",
    }
    right = near(answer, 1 - 0.95**20, mistakes)
    return f"{right:.0%}: of twenty settings that do nothing, one is more likely than not to be called different."


@exercise("10-2", "a table of runs of yours: the autoencoder, quick, under cpu:threads=1, three seeds at least")
def _own_runs(answer: Any) -> str:
    runs = table(answer, "setting", "seed", "protocol", "final_loss", "weights", "recorded")
    need(not runs.recorded.any(), "some of these runs are the recorded ones: give those that you made")
    recorded_runs = recorded("autoencoder", "quick", loader="window", setting="cpu:threads=1")
    paired_runs = runs.merge(recorded_runs, on=["protocol", "setting", "seed"])
    seeds = paired_runs.seed.nunique()
    need(seeds >= 3, f"{seeds} seeds are of the profile quick, under cpu:threads=1, and recorded too: take three")
    largest_difference = (paired_runs.final_loss_x - paired_runs.final_loss_y).abs().max()
    same_bits = int((paired_runs.weights_x == paired_runs.weights_y).sum())
    apart = f"{largest_difference / recorded_runs.final_loss.std():.1e} standard deviations between seeds apart"
    return f"{same_bits} of {len(paired_runs)} have the same bits as the recorded ones; the losses are at most {apart}."


@exercise("10-3", "{'metric': …, 'factor': …, 'reference': …, 'margin': …, 'seeds': …}, planned before any run")
def _registration(answer: Any) -> str:
    plan = fields(answer, "metric", "factor", "reference", "margin", "seeds")
    runs = recorded("prednet", "paper", loader="window")
    for name in ("metric", "factor"):
        need(isinstance(plan[name], str) and plan[name] in runs, f"{name} {shown(plan[name])}: no column of gl.runs")
    if plan["factor"] == "setting":
        Setting.parse(plan["reference"])  # which says what is wrong with it
    seeds = number(plan["seeds"])
    need(seeds >= 6, f"{seeds:g} seeds cannot show a difference, however large: six are the fewest")
    found = verdict(runs[runs["rerun"] == 0], margin=plan["margin"], reference="cuda:tf32=off").table
    needed = found.seeds_needed.where(found.decision == "inconclusive", 10).min()
    need(seeds >= needed, f"{seeds:g} seeds: as far as recorded runs tell, this margin takes {needed:g} at least")
    return f"{seeds:g} seeds are enough for the setting that scatters least. Whether it convinces is yours to say."


# --- 11: where else does this fault live? ----------------------------------------------------------------


@exercise("11-1", "(shared, own): how many different batches of five you have, by torch.as_tensor and by torch.tensor")
def _two_buffers(answer: Any) -> str:
    shared, own = map(number, pair(answer))
    need(shared != 5, "each batch lies in one of two buffers: which holds the third?")
    need(shared != 1, "with one buffer it would be one. There are two, filled in turn")
    need(shared == 2, f"{shared:g}: there are two buffers, and none holds more than one batch at a time")
    need(own == 5, f"{own:g}: a copy stays what it was")
    return "two buffers are two batches, however many are kept. Code that never keeps more than two seems right."


@exercise("11-2", "(wrong, mended): the reports of two guards with reads='any', the one that finds something first")
def _found_and_mended(answer: Any) -> str:
    faulty_report, mended_report = pair(answer)
    for report in (faulty_report, mended_report):
        need(isinstance(report, Guard), f"{shown(report)} is no report: `with gl.guard(…) as report:` gives it")
        need(report.reads == "any", "this guard looked at gradients alone: reads='any' is asked for")
    need(
        len(faulty_report),
        "the first guard found nothing. Was the array filled again, and were the tensors read after that?",
    )
    causes = {finding.cause for finding in faulty_report.findings}
    need("together" in causes, f"the first guard found {', '.join(sorted(causes))}: read the three in one operation")
    need(
        not mended_report.findings, "the second guard found something, too: is there another line that keeps the array?"
    )
    return f"found: {faulty_report.findings[0].explanation}. After one line was changed nothing is found."


@exercise("11-3", "{'library': …, 'shares': True or False, 'evidence': a line of code that shows it}")
def _library(answer: Any) -> str:
    entry = fields(answer, "library", "shares", "evidence")
    need(isinstance(entry["shares"], bool), f"shares {shown(entry['shares'])}: True or False")
    for name in ("library", "evidence"):
        need(
            isinstance(entry[name], str) and entry[name].strip(), f"{name} {shown(entry[name])}: a few words are needed"
        )
    need(len(entry["evidence"]) > 10, f"evidence {shown(entry['evidence'])}: a line of code, with what it printed")
    advice = "whoever keeps it has to copy" if entry["shares"] else "it may be kept, as long as that stays so"
    return f"{entry['library']}: {advice}. Would another release do the same? A test of yours can ask."
