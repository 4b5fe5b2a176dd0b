"""The paper, its numbers from the recorded runs. `python docs/paper.py` writes `paper/paper.md` anew."""

import re
from pathlib import Path

import answer
import pandas as pd

import gpulab as gl

ROOT = Path(__file__).parents[1]
PAPER = ROOT / "docs" / "paper" / "paper.md"


def minutes(profile):
    """How long all notebooks take, as the page of costs has it."""
    costs = (ROOT / "docs" / "costs.md").read_text(encoding="utf-8")
    ((whole, seconds),) = re.findall(rf"^\| `gpulab companion`, {profile}: .+?\| (\d+) min (\d+) s", costs, re.M)
    return round(int(whole) + int(seconds) / 60)


def numbers():
    """What the paper says of the recorded runs, by the name that it has in `paper.md.in`."""
    losses = answer.pairs().pivot_table(index=["row", "seed"], columns="memory", values="times").dropna()
    title = gl.companion.title_runs()
    both = pd.concat([title, gl.companion.atlas()]).query("experiment == 'prednet' and profile == 'paper'")
    both = both[(both.gradients == "written out") & (both.truncation == "loss") & (both.loader == "window")]
    devices = both[both.id.isin(title.id) & both.setting.isin(["cuda:tf32=off", "cpu:threads=3,denormals=off"])]
    table = gl.companion.learning_table(devices, factor="setting", reference="cuda:tf32=off").set_index("metric")
    device, learned = table.loc["final loss of all seeds"], table.loc["final loss of the seeds that learned"]
    on_cards = both[both.setting == "cuda:tf32=off"]
    (card,) = gl.verdict(on_cards, factor="gpu", reference="NVIDIA H200").table.itertuples()
    kept = gl.companion.atlas(), gl.companion.published_runs(), title, gl.companion.longer_runs()
    return {
        "notebooks": len([*(ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb")]),
        "sessions": len([*(ROOT / "docs" / "seminar").glob("session*.md")]),
        "runs": sum(map(len, kept)),
        "pairs": len(losses),
        "worse": (losses[answer.SHARED] > losses[answer.OWN]).sum(),
        "cpu": device.seeds,
        "devices": device.decision,
        "difference": abs(device.difference),
        "margin": device.margin,
        "learned_devices": learned.decision,
        "learned_margin": learned.margin,
        "learn": table.loc["share of seeds that did not learn"].decision,
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
