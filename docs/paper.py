"""The paper, its numbers from the recorded runs. `python docs/paper.py` writes `paper/paper.md` anew."""

import re
from pathlib import Path

import answer
import pandas as pd

import companion
import gpulab as gl

ROOT = Path(__file__).parents[1]
PAPER = ROOT / "docs" / "paper" / "paper.md"


def minutes(profile):
    """How long all notebooks take, as the page of costs has it."""
    costs = (ROOT / "docs" / "costs.md").read_text(encoding="utf-8")
    ((whole, seconds),) = re.findall(rf"^\| `python -m companion`, {profile}: .+?\| (\d+) min (\d+) s", costs, re.M)
    return round(int(whole) + int(seconds) / 60)


def numbers():
    """What the paper says of the recorded runs, by the name that it has in `paper.md.in`."""
    pairs = answer.counted(answer.pairs())
    title = companion.title_runs()
    both = pd.concat([title, companion.atlas()]).query("experiment == 'prednet' and profile == 'paper'")
    both = both[(both.gradients == "written out") & (both.truncation == "loss") & (both.setting == "cuda:tf32=off")]
    both = both[both.seed.isin(both[~both.id.isin(title.id)].seed)]
    (card,) = gl.verdict(both, factor="gpu", reference="NVIDIA H200").table.itertuples()
    kept = companion.atlas(), companion.published_runs(), title, companion.longer_runs()
    return {
        "notebooks": len([*(ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb")]),
        "sessions": len([*(ROOT / "docs" / "seminar").glob("session*.md")]),
        "runs": sum(map(len, kept)),
        **{name: f"{worse} of {count}" for name, (worse, count, _) in pairs.items()},
        "verdicts": answer.verdicts(),
        "devices": answer.devices(),
        "card_seeds": card.seeds,
        "cards": card.decision,
        "smoke": minutes("smoke"),
        "quick": minutes("quick"),
    }


def paper():
    """The text of the paper."""
    return PAPER.with_suffix(".md.in").read_text(encoding="utf-8").format(**numbers())


if __name__ == "__main__":
    PAPER.write_text(paper(), encoding="utf-8")
