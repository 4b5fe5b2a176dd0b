"""The data card's table of what was laid down before its runs: times and decisions are those of the recordings."""

import os
import re
import subprocess
from pathlib import Path

import pandas as pd
import pytest

import companion
import gpulab as gl
from companion import anomaly
from companion.anomaly import BEATS, LOSS, dose_finding
from companion.learning import ALL, BEAT, LEARNED, STUCK

HERE = Path(__file__).parents[2]
METRICS = {
    BEATS: "beat repeating",
    LOSS: "mean loss",
    BEAT: "beat repeating",
    ALL: "mean loss",
    STUCK: "did not learn",
    LEARNED: "mean loss of those that learned",
}


def said(table, metrics, column="metric"):
    """The decisions on each metric, once where all are the same."""
    parts = []
    for metric in metrics:
        decisions = list(table[table[column] == metric].decision)
        parts.append(f"{METRICS[metric]}: {', '.join(decisions[: 1 if len(set(decisions)) == 1 else None])}")
    return "; ".join(parts)


def trend(runs):
    """Whether the loss follows the bias of the gradient."""
    (sentence,) = dose_finding(runs).sentences()[0][1]
    return "no trend" if "no trend is shown" in sentence else "a trend"


def recorded_claims():
    """Of each row of the table its runs, and what they say."""
    runs = gl.recorded_runs().query("experiment == 'prednet'")
    registered = [ALL, STUCK, LEARNED]
    for of_size in ("profile == 'quick' and device == 'cpu'", "profile == 'paper'"):
        some = runs.query(f"{of_size} and loader != 'window'")
        yield some, said(companion.anomaly_table(some), registered)
    published = companion.published_runs()
    table = companion.published_table(published)
    for full in (True, False):
        some = table[(table["size"] == anomaly.FULL) == full]
        yield published[published.full == full], said(some, [BEATS, LOSS], "endpoint")
    trips = companion.round_trips(published)
    same = "the same bits" if (trips.same_bits == trips.windows).all() else "other bits"
    yield published[published.full], same
    dose = companion.recorded_dose()
    on_gpu, on_cpu = (dose[dose.device == device] for device in ("cuda", "cpu"))
    yield on_gpu, trend(on_gpu)
    longer = companion.longer_runs()
    memory, arithmetic = longer.query("setting == 'cuda:tf32=off'"), longer.query("loader == 'window'")
    table = companion.learning_table(memory, factor="loader", reference="window")
    yield memory, said(table, [BEAT, *registered])
    table = companion.learning_table(arithmetic, factor="setting", reference="cuda:tf32=off")
    yield arithmetic[arithmetic.setting == "cuda:tf32=on"], said(table, [BEAT, *registered])
    yield on_cpu, trend(on_cpu)
    title = companion.title_runs().query(
        "experiment == 'prednet' and profile == 'paper' and gradients == 'written out'"
    )
    table = companion.learning_table(title, factor="setting", reference="cuda:tf32=off")
    yield title[title.registered.isna()], said(table[table.setting.str.startswith("cpu")], [BEAT, *registered])
    stuck = title[title.final_loss >= companion.missing_colour_losses(title)]
    on_cpu = stuck[stuck.device == "cpu"]
    yield on_cpu, f"{len(on_cpu)} of {stuck[stuck.device == 'cuda'].seed.nunique()} stay stuck"
    cards = companion.atlas().query("experiment == 'prednet' and profile == 'paper' and truncation == 'loss'")
    cards = pd.concat([title, cards]).query("setting == 'cuda:tf32=off'")
    both = cards[cards.seed.isin(cards[cards.gpu.str.contains("H100")].seed)]
    judged = gl.verdict(both, factor="gpu", reference="NVIDIA H200")
    yield both[both.gpu.str.contains("H100")], f"mean loss: {', '.join(judged.decisions.values())}"
    copied = runs.query("profile == 'quick' and loader == 'copied'")
    yield copied, said(companion.learning_table(copied, "setting", "cpu:threads=1"), [BEAT, *registered])


@pytest.mark.slow("judges all that was registered once more")
def test_the_table_has_the_times_and_decisions_of_the_recordings():
    card = (HERE / "data/README.md").read_text(encoding="utf-8")
    lines = card.partition("## What was laid down before the runs\n")[2].partition("\n\n")[0].splitlines()[2:]
    started = pd.concat(pd.read_parquet(file, columns=["id", "started"]) for file in HERE.glob("data/*/*.parquet"))
    started = started.drop_duplicates("id").set_index("id").started
    for line, (runs, outcome) in zip(lines, recorded_claims(), strict=True):
        claim, laid_down, first_run, decided = (cell.strip() for cell in line.strip("|").split("|"))
        assert (claim, decided) == (claim, outcome)
        assert (claim, first_run) == (claim, started[runs.id].min().replace("T", " ").removesuffix("Z"))
        if not laid_down.startswith("no"):
            commit, time = laid_down.strip("`").split("`, ")
            assert time < first_run, claim
            told = subprocess.run(
                ["git", "log", "-1", "--format=%cd", "--date=format-local:%Y-%m-%d %H:%M:%S", commit],
                cwd=HERE,
                env={**os.environ, "TZ": "UTC"},
                capture_output=True,
                text=True,
            )
            assert told.returncode or told.stdout.strip() == time, claim  # a copy without history has no commits


def test_the_registered_pairs_are_counted_as_on_the_page_of_notebook_05():
    card = (HERE / "data/README.md").read_text(encoding="utf-8")
    table = companion.published_table(companion.published_runs())
    memory = companion.longer_runs().query("setting == 'cuda:tf32=off'")
    longer = companion.learning_table(memory, factor="loader", reference="window")
    port = companion.anomaly_table(gl.recorded_runs().query("loader != 'window'"))
    (pairs,) = [line for line in card.splitlines() if line.startswith("The decisions are today's")]
    on_the_page = anomaly._short(table, longer, port)[0]
    assert re.findall(r"\d+ of \d+", pairs) == re.findall(r"\d+ of \d+", on_the_page)
    walk = table[(table.film == "walk") & (table["size"] == anomaly.FULL)].iloc[0]
    assert f"Of the {walk.beat_reference} runs on the walk" in pairs
    assert f"beat repeating the last frame, {walk.beat_blurred:.0f} beat it blurred." in pairs
