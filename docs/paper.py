"""The papers, their numbers from the recorded runs. `python docs/paper.py` writes anew what has a file `*.in`."""

import functools
import re
from pathlib import Path

import answer
import pandas as pd

import companion
import gpulab as gl

ROOT = Path(__file__).parents[1]
PAPER = ROOT / "docs" / "paper" / "paper.md"
PAPERS = (PAPER, PAPER.with_name("rescience.md"), PAPER.with_name("metadata.yaml"))


def minutes(profile):
    """How long all notebooks take, as the page of costs has it."""
    costs = (ROOT / "docs" / "costs.md").read_text(encoding="utf-8")
    ((whole, seconds),) = re.findall(rf"^\| `python -m companion`, {profile}: .+?\| (\d+) min (\d+) s", costs, re.M)
    return round(int(whole) + int(seconds) / 60)


@functools.cache
def numbers():
    """What the paper says of the recorded runs, by the name that it has in `paper.md.in`."""
    pairs = answer.counted(answer.pairs())
    title = companion.title_runs()
    both = pd.concat([title, companion.atlas()]).query("experiment == 'prednet' and profile == 'paper'")
    both = both[(both.gradients == "written out") & (both.truncation == "loss") & (both.setting == "cuda:tf32=off")]
    both = both[both.seed.isin(both[~both.id.isin(title.id)].seed)]
    (card,) = gl.verdict(both, factor="gpu", reference="NVIDIA H200").table.itertuples()
    kept = companion.atlas(), companion.published_runs(), title, companion.longer_runs()
    poles = companion.cartpole_runs().groupby("memory")["time upright (steps)"].mean()
    return {
        "notebooks": len([*(ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb")]),
        "sessions": len([*(ROOT / "docs" / "seminar").glob("session*.md")]),
        "runs": sum(map(len, kept)),
        **{name: f"{worse} of {count}" for name, (worse, count, _) in pairs.items()},
        "verdicts": answer.verdicts(),
        "devices": answer.devices(),
        "card_seeds": card.seeds,
        "cards": card.decision,
        "cartpole": f"{poles['shared memory'] / poles['own memory']:.1%}".replace("%", " %"),
        "cartpole_seeds": companion.cartpole_runs().seed.nunique(),
        **replication(),
        "smoke": minutes("smoke"),
        "quick": minutes("quick"),
    }


def compared(condition, reference):
    """Two conditions, such as `GPU, shared memory`, of which only the device or only the memory differs."""
    (device, memory), (other_device, other_memory) = (each.split(", ") for each in (condition, reference))
    if device == other_device:
        return f"{device}: {memory.removesuffix(' memory')} against {other_memory}"
    return f"{memory}: {device} against {other_device}"


def replication():
    """What is said of the authors' code: a table of its comparisons, the first gradients, and the round trip."""
    runs = companion.published_runs()
    table = companion.published_table(runs)
    rows = []
    for _, pair in table.groupby(["family", "film", "size", "condition", "reference"], sort=False):
        loss = pair[pair.endpoint == "final loss"].iloc[0]
        share = pair[pair.endpoint != "final loss"].iloc[0]
        rows.append(
            f"| {compared(loss.condition, loss.reference)} | {loss.film}, {loss['size'].replace('x', '×')} | "
            f"{loss.worse} of {loss.seeds} | {loss.ratio:.2f} | {loss.decision} | "
            f"{share.beat} for {share.beat_reference} | {share.decision} |"
        )
    heads = "compared | film | higher loss in | times as high | loss is | beat repeating | share is"
    widths = [22, 12, 12, 9, 13, 11, 13]  # of the columns on a page, against each other
    first = companion.recorded_windows().query("window == 0 and not of.str.contains('trip')")
    shared = ["cpu reused", "cuda shared"]
    of, against = (cells.str.partition(",")[0] for cells in (first.of, first.against))
    unlike = of.isin(shared) != against.isin(shared)
    trips = companion.round_trips(runs)
    return {
        "comparisons": "\n".join([f"| {heads} |", f"|{'|'.join('-' * width for width in widths)}|", *rows]),
        "authors_tested": table[
            (table.condition.str.endswith("shared memory")) & table.reference.str.endswith("own memory")
        ]
        .query("endpoint == 'final loss'")
        .seeds.sum(),
        "alike": f"{first[~unlike].gradient_difference.max():.1e}",
        "unlike": f"{first[unlike].gradient_difference.min():.1%}".replace("%", " %"),
        "same_losses": f"{first[unlike].same_losses.sum()} of {first[unlike].losses.sum()}",
        "trips": f"{trips.same_bits.sum():,} of {trips.windows.sum():,}",
    }


def paper(file=PAPER):
    """The text of a paper."""
    return file.with_name(f"{file.name}.in").read_text(encoding="utf-8").format(**numbers())


if __name__ == "__main__":
    for each in PAPERS:
        each.write_text(paper(each), encoding="utf-8")
