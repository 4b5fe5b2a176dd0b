"""Write the papers from their templates `*.in` and the recorded runs: `python
docs/_tools/paper.py`.
"""

import functools
import re
from pathlib import Path

import answer

import companion
import gpulab as gl
from companion.changes import DEVICE, YARDSTICKS
from companion.findings import listed

ROOT = Path(__file__).parents[2]
PAPER = ROOT / "docs" / "paper" / "paper.md"
CLOSE = 0.04  # of the loss on the GPU: how far apart the devices end in most seeds
PAPERS = (PAPER, PAPER.with_name("rescience.md"), PAPER.with_name("metadata.yaml"))


def minutes():
    """Return the minutes that all notebooks take in the smallest profile, by the page of costs."""
    costs = (ROOT / "docs" / "costs.md").read_text(encoding="utf-8")
    ((whole, seconds),) = re.findall(
        r"^\| `python -m companion`, smoke: .+?\| (\d+) min (\d+) s", costs, re.MULTILINE
    )
    return round(int(whole) + int(seconds) / 60)


@functools.cache
def numbers():
    """Return what the papers state about the recorded runs, by its name in the templates."""
    pairs = answer.counted(answer.pairs())
    studies = {
        path.stem.partition("-")[0] for path in (ROOT / "data" / "studies").glob("*.parquet")
    }
    poles = gl.recorded_runs("cartpole").pivot_table(
        index="seed", columns="keep", values="steps_up"
    )
    means = poles.mean()  # overwritten frames are `as_tensor`, copied ones `tensor`
    return {
        "notebooks": len([*(ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb")]),
        "sessions": len([*(ROOT / "docs" / "seminar").glob("session*.md")]),
        "runs": len(companion.atlas()) + sum(len(gl.recorded_runs(name)) for name in studies),
        **{name: f"{worse} of {count}" for name, (worse, count, _) in pairs.items()},
        "device_decision": answer.device_table().loc["final loss of all seeds", "decision"],
        "cartpole": share(means.as_tensor / means.tensor),
        "cartpole_seeds": len(poles),
        **replication(),
        **added_seeds(),
        **single_changes(),
        "smoke": minutes(),
    }


def compared(condition, reference):
    """Describe the comparison of two conditions, such as `GPU, overwritten frames`, that differ
    only in the device or only in the frames.
    """
    (device, frames), (other_device, other_frames) = (
        each.split(", ") for each in (condition, reference)
    )
    if device == other_device:
        return f"{device}: {frames.removesuffix(' frames')} against {other_frames}"
    return f"{frames}: {device} against {other_device}"


def replication():
    """Return what the papers state about the authors' code: its comparisons, the first gradients,
    and the round trip.
    """
    runs = companion.published_runs()
    table = companion.published_table(runs)
    full, half = (table[table["size"] == size] for size in ("160x120", "80x56"))
    first = companion.recorded_windows().query("window == 0 and not of.str.contains('trip')")
    shared = ["cpu reused", "cuda shared"]
    of, against = (cells.str.partition(",")[0] for cells in (first.of, first.against))
    unlike = of.isin(shared) != against.isin(shared)
    trips = companion.round_trips(runs)
    return {
        "comparisons": comparisons(table),
        "statistics": statistics(table, runs),
        "counts": counts(full, half, runs),
        **devices_apart(half, runs),
        "alike": f"{first[~unlike].gradient_difference.max():.1e}",
        "unlike": share(first[unlike].gradient_difference.min()),
        "same_losses": f"{first[unlike].same_losses.sum()} of {first[unlike].losses.sum()}",
        "trips": f"{trips.same_bits.sum():,} of {trips.windows.sum():,}",
        "gpu_minutes": f"{runs[runs.device == 'cuda'].seconds.mean() / 60:.0f}",
        "cpu_minutes": f"{runs[runs.device == 'cpu'].seconds.mean() / 60:.0f}",
        "cpu_hours": f"{runs[runs.device == 'cpu'].seconds.sum() / 3600:.0f}",
    }


def share(number, digits=1):
    """Format a share in per cent for a text."""
    return f"{number:.{digits}%}".replace("%", " %").replace("-", "−")


def rows_of(table):
    """Yield, for each comparison, its description, its film, and the rows of its two endpoints,
    the final loss and the share.
    """
    for _, pair in table.groupby(["family", "film", "size", "condition", "reference"], sort=False):
        loss, beats = (
            pair[pair.endpoint == "final loss"].iloc[0],
            pair[pair.endpoint != "final loss"].iloc[0],
        )
        yield (
            compared(loss.condition, loss.reference),
            f"{loss.film}, {loss['size'].replace('x', '×')}",
            loss,
            beats,
        )


def in_markdown(heads, widths, rows):
    """Return a table in Markdown; the widths of its columns are relative to each other."""
    lines = [f"| {heads} |", f"|{'|'.join('-' * width for width in widths)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def comparisons(table):
    """Return a row for each comparison: how many seeds end higher, by how much, the decisions."""
    rows = [
        [
            *(what, film, f"{loss.worse} of {loss.seeds}", f"{loss.ratio:.2f}", loss.decision),
            *(f"{beats.beat} and {beats.beat_reference}", beats.decision),
        ]
        for what, film, loss, beats in rows_of(table)
    ]
    heads = "compared | film | higher loss in | times as high | loss is | beat repeating | share is"
    return in_markdown(heads, [22, 12, 12, 9, 13, 11, 13], rows)


def statistics(table, runs):
    """Return a row for each comparison: difference and margin of the loss in per cent, and the p
    values.
    """
    rows = []
    for what, film, loss, beats in rows_of(table):
        here = (
            (runs.film == loss.film)
            & (runs["size"] == loss["size"])
            & (runs.condition == loss.reference)
        )
        mean = runs[here].final_loss.mean()
        interval = (
            f"{share(loss.difference / mean)} [{share(loss.low / mean)}, {share(loss.high / mean)}]"
        )
        numbers = [
            f"{p:.1g}".replace("1e+00", "1") for p in (loss.p_holm, loss.p_equivalent, beats.p_holm)
        ]
        rows.append([what, film, interval, f"±{share(loss.margin / mean)}", *numbers])
    heads = (
        "compared | film | difference of the loss | margin | p, different | p, equivalent | p,"
        " share"
    )
    return in_markdown(heads, [22, 12, 24, 8, 11, 11, 9], rows)


def counts(full, half, runs):
    """Return a row for each size and device: the pairs that differ only in the condition, and
    whether a test was planned.
    """
    on_gpu = full[full.endpoint == "final loss"]
    on_cpu = half[(half.endpoint == "final loss") & (half.reference == "CPU, copied frames")]
    losses = losses_by_condition(runs)
    worse = losses["GPU, overwritten frames"] > losses["GPU, copied frames"]
    rows = [
        [
            "GPU, 160×120, three films",
            "imitated",
            "yes",
            f"{on_gpu.worse.sum()} of {on_gpu.seeds.sum()}",
        ],
        [
            "CPU, 80×56, walk",
            "as published",
            "yes",
            f"{on_cpu.worse.sum()} of {on_cpu.seeds.sum()}",
        ],
        ["GPU, 80×56, walk", "imitated", "no", f"{worse.sum()} of {len(worse)}"],
    ]
    return in_markdown(
        "where | overwriting | test planned | higher loss in", [28, 16, 16, 16], rows
    )


def losses_by_condition(runs):
    """Return the final loss at half the size: one row per seed, one column per condition."""
    return runs[runs["size"] == "80x56"].pivot_table(
        index="seed", columns="condition", values="final_loss"
    )


def devices_apart(half, runs):
    """Return how a CPU and a GPU compare at half the size, and the effect of the line there."""
    losses = losses_by_condition(runs)
    own = losses["CPU, copied frames"] / losses["GPU, copied frames"] - 1
    direct = losses["CPU, overwritten frames"] / losses["GPU, copied frames"]
    furthest = own.abs().idxmax()
    close = own.drop(furthest).abs()
    rows = half[half.endpoint == "final loss"].set_index(["condition", "reference"])
    device = rows.loc[("CPU, copied frames", "GPU, copied frames")]
    line = rows.loc[("CPU, overwritten frames", "CPU, copied frames")]
    intervals = {
        name: " to ".join(share(end / losses[reference].mean(), 0) for end in (row.low, row.high))
        for name, row, reference in (
            ("device_interval", device, "GPU, copied frames"),
            ("line_interval", line, "CPU, copied frames"),
        )
    }
    return {
        "close": f"{len(close)} of {len(own)}",
        "within": share(close.max()),
        "outlier": f"{share(abs(own[furthest]), 0)} {'lower' if own[furthest] < 0 else 'higher'}",
        "direct": f"{(direct > 1).sum()} of {len(direct)}",
        "direct_ratio": f"{direct.median():.2f}",
        **intervals,
    }


def added_seeds():
    """Return what the papers state about the comparison at half size with the added seeds."""
    losses = companion.half_size_losses()
    rows = companion.compare_half_size(losses).set_index(["seeds", "analysis"]).loc["all"]
    table = losses.pivot_table(index="seed", columns="device", values="final_loss")
    distances = (table.cpu / table.cuda - 1).abs().sort_values()

    def interval(row):
        return f"{share(row.low)} to {share(row.high)}"

    return {
        "half_windows": losses.windows.max(),
        "half_seeds": rows.pairs["mean"],
        "half_mean": rows.decision["mean"],
        "half_mean_interval": interval(rows.loc["mean"]),
        "half_margin": share(rows.margin["mean"]),
        "half_trimmed": rows.decision["trimmed mean"],
        "half_trimmed_interval": interval(rows.loc["trimmed mean"]),
        "half_close": f"{(distances < CLOSE).sum()} of {len(distances)}",
        "half_close_limit": share(CLOSE, 0),
        "half_far": share(distances.iloc[-1], 0),
    }


def single_changes():
    """Return what the papers state about single changes on networks that learned."""
    runs = gl.recorded_runs("changes")
    # At the published size, the runs with more seeds are used. An EPYC has one network alone.
    runs = runs[(runs.profile != "paper") & ~runs.machine.str.contains("EPYC")]
    table, _ = companion.judge_changes(companion.add_device(companion.name_changes(runs)))
    device = table[table.change == DEVICE].set_index("experiment")
    is_single = ~table.change.isin(YARDSTICKS) & ~table.change.str.contains("+", regex=False)
    published = companion.compare_determinism(companion.determinism_runs())
    published = published[(published.seeds == "all") & (published.analysis == "mean")]
    decisions = [*table.decision[is_single], *published.decision]
    assert "different" not in decisions, "the paper says that no mean is shown to move"
    furthest = table[is_single].largest_move.max()
    return {
        "changes": len(decisions),
        "changes_within": decisions.count("equivalent"),
        "changes_undecided": decisions.count("inconclusive"),
        "changes_furthest": f"{furthest:.1f}",
        "device_seeds": " and ".join(str(count) for count in device.seeds),
        "device_decisions": listed(device.decision.unique()),
    }


def paper(file=PAPER):
    """Return the text of a paper."""
    return file.with_name(f"{file.name}.in").read_text(encoding="utf-8").format(**numbers())


if __name__ == "__main__":
    for each in PAPERS:
        each.write_text(paper(each), encoding="utf-8")
