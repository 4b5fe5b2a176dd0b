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
    return frame[frame.optimizer == optimizer]


@exercise("06-1", "(table, who): of gl.saddles.escape_table, and who left: 'float32', 'float64', 'both' or 'neither'")
def _pushed(answer: Any) -> str:
    frame, who = pair(answer)
    frame = _escapes(frame, "sgd")
    need(set(frame.perturbation) == {1e-9}, "perturbations=[1e-9] is asked for: another push is another question")
    exact = frame.setting.str.contains("precision=float64")
    plain = ~frame.setting.str.contains("precision|emulate")
    need(exact.any() and plain.any(), "the table lacks float32 or float64: take two settings of one kind of CPU")
    names = {(True, True): "both", (True, False): "float64", (False, True): "float32", (False, False): "neither"}
    left = names[bool(frame.left[exact].all()), bool(frame.left[plain].all())]
    moved = f"in float32 the first step moved {frame.moved[plain].mean():.0%} of the weights"
    need(choice(who, *names.values()) == left, f"in this table {left} left, and {moved}")
    return f"{left} left, and {moved}; for the others it is rounded away."


@exercise("06-2", "a table of escapes by Adam, weights in bfloat16, with and without master weights, at several rates")
def _adam_in_bfloat16(answer: Any) -> str:
    frame = _escapes(answer, "adam")
    frame = frame[frame.setting.str.contains("precision=bfloat16")]
    left = frame.groupby(["master_weights", "learning_rate"]).left.all()
    plain = left.get(False, left[:0])
    need(plain.any() and not plain.all(), "in bfloat16 without master weights, some rates should hold it and some not")
    leaves, holds = plain[plain].index.min(), plain[~plain].index.max()
    need(
        leaves <= 10.001 * holds, f"more than a factor of ten lies between {holds:g} and {leaves:g}: try rates between"
    )
    need((True, holds) in left.index, f"with master weights {holds:g} was not tried, which held the others")
    outcome = "leaves" if left[True, holds] else "does not leave either"
    return f"Adam is held at {holds:g} and leaves at {leaves:g}; with master weights it {outcome} at {holds:g}."


@exercise("06-3", "a table of escapes by sgd in float32, from a saddle with small weights")
def _small_weights(answer: Any) -> str:
    frame = _escapes(answer, "sgd")
    frame = frame[~frame.setting.str.contains("precision|emulate") & ~frame.master_weights]
    need((frame.step_ratio > 1).any(), "in float32 alone, steps are still rounded away: step_ratio should be above 1")
    frame = frame[frame.step_ratio > 1]
    times_expected = float((frame.steps / frame.expected).median())
    need(0.5 < times_expected < 2, "it did not leave when the law says: push it, by perturbations=[…], or wait longer")
    return f"float32 leaves after {times_expected:.2f} times the steps of the law. Would a trained network pass there?"


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
    updates = runs.diverged_at[runs.status == "diverged"].astype(float)
    mistakes = {updates.mean(): "the mean, which a few late ones draw up: take the median"}
    near(answer, updates.median(), mistakes, rel=1e-6)
    return f"half of {len(updates)} are NaN after {updates.median():g} updates, the last after {updates.max():g}."


@exercise("09-2", "a table of runs, one-pass and centred, under two arithmetics, on six seeds at least")
def _centred(answer: Any) -> str:
    runs = table(answer, "setting", "covariance", "status", "seed")
    runs = runs[runs.setting.str.contains("emulate=|tf32=on") & runs.covariance.isin(["one-pass", "centred"])]
    seeds = runs.groupby(["setting", "covariance"]).seed.nunique().unstack()
    need(len(seeds) > 1, "two arithmetics of fewer bits: take cpu:tf32=on,emulate=ampere and cpu:emulate=bfloat16")
    need(seeds.shape[1] == 2, "'one-pass' and 'centred' are compared: without the one nothing is at risk")
    need((seeds >= 6).all(axis=None), f"{seeds.min(axis=None):g} seeds in one of the cells: take six at least")
    lost = (runs.status == "diverged").groupby(runs.covariance).sum()
    need(lost["one-pass"], "no run in one pass became NaN: train longer, for the control must fail")
    return f"NaN: {lost['one-pass']} runs in one pass, {lost['centred']} centred. Why, the proof must say."


@exercise("09-3", "the covariance (24, 24) of the exercise's codes, from sums alone, under gl.emulate('tf32')")
def _shifted(answer: Any) -> str:
    codes = torch.randn(50, 24, generator=torch.Generator().manual_seed(0)) * 0.003 + 0.5
    exact = torch.cov(codes.double().T, correction=0)
    need(isinstance(answer, torch.Tensor) and answer.shape == exact.shape, f"{shown(answer)} is no tensor (24, 24)")
    error = float((answer.detach().cpu().double() - exact).norm() / exact.norm())
    need(abs(error - 1 / 49) > 1e-3, "divided by 49: here it is by 50, as in the notebook")
    need(error < 0.5, f"off by {error:.2g} times its size: that is one pass. Subtract a number near the mean before")
    need(error < 0.005, f"off by {error:.1%}: what you subtracted is not quite the mean. Take its product away, too")
    need(error > 1e-5, f"off by {error:.0e}: no product was in TF32. Compute it under gl.emulate('tf32')")
    return f"off by {error:.1e} only. That the product is innocent, a matrix does not show: an audit of the step does."


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


@exercise("11-1", "(overwritten, copied): how many different batches of five, by torch.as_tensor and by torch.tensor")
def _two_buffers(answer: Any) -> str:
    overwritten, copied = map(number, pair(answer))
    need(overwritten != 5, "each batch lies in one of two buffers: which holds the third?")
    need(overwritten == 2, f"{overwritten:g}: there are two buffers, and each holds one batch at a time")
    need(copied == 5, f"{copied:g}: a copy stays what it was")
    return "two buffers are two batches, however many are kept. Code that never keeps more than two seems right."


@exercise("11-2", "(wrong, mended): the reports of two guards with reads='any', the one that finds something first")
def _found_and_mended(answer: Any) -> str:
    wrong, mended = pair(answer)
    for report in (wrong, mended):
        need(isinstance(report, Guard), f"{shown(report)} is no report: `with gl.guard(…) as report:` gives it")
    need(wrong.findings, "the first guard found nothing. Was the array filled again, and read after that?")
    causes = {finding.cause for finding in wrong.findings}
    need("together" in causes, f"the first guard found {', '.join(sorted(causes))}: read the three in one operation")
    need(not mended.findings, "the second guard found something, too: is there another line that keeps the array?")
    return f"found: {wrong.findings[0].explanation}. After one line was changed nothing is found."


@exercise("11-3", "{'library': …, 'shares': True or False, 'evidence': a line of code that shows it}")
def _library(answer: Any) -> str:
    entry = fields(answer, "library", "shares", "evidence")
    need(isinstance(entry["shares"], bool), f"shares {shown(entry['shares'])}: True or False")
    evidence = entry["evidence"]
    need(isinstance(evidence, str) and len(evidence) > 10, f"evidence {shown(evidence)}: a line, and what it printed")
    advice = "whoever keeps it has to copy" if entry["shares"] else "it may be kept, as long as that stays so"
    return f"{entry['library']}: {advice}. Would another release do the same? A test of yours can ask."
