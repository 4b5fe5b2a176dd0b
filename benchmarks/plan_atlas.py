"""What the whole atlas costs: settings × seeds of both experiments by the paper's protocol, in hours and in money.

    python benchmarks/plan_atlas.py --price 3 --write benchmarks/atlas_plan.md

The times are those of the recorded runs in `data/runs`: `gpulab.companion.atlas_plan`. The price of a GPU's hour is
yours to give.
"""

import argparse
from pathlib import Path

import gpulab as gl
from gpulab.companion.atlas_costs import EXPERIMENTS, atlas_limits, atlas_plan, atlas_rates, rates_table, startup


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--price", type=float, required=True, help="of one GPU for one hour, in any currency")
    parser.add_argument("--settings", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    beside, rates = startup(), atlas_rates()
    size = {"settings": given.settings, "seeds": given.seeds, "rates": rates}
    plan = atlas_plan(given.price, beside, gpus=given.gpus, **size)
    lines = [
        "# What the whole atlas costs",
        "",
        f"{given.settings} settings × {given.seeds} seeds × {len(EXPERIMENTS)} experiments, the `paper` profile: "
        f"{given.settings * given.seeds * len(EXPERIMENTS):,} runs. One GPU is an {rates[EXPERIMENTS[0]].machine}; its "
        f"hour costs {given.price:g}, a number that was put in and is no quotation.",
        "",
        "| experiment | settings measured | runs recorded | at a time on the GPU | seconds of a run | of the GPU |",
        "|---|---|---|---|---|---|",
    ]
    for _, row in rates_table(rates).iterrows():
        seconds = f"{row['seconds of a run']:.0f} ({row.least:.0f} to {row.most:.0f})"
        lines.append(
            f"| {row.experiment} | {row['settings measured']} | {row['runs recorded']} | {row['at a time']:.1f} | "
            f"{seconds} | {row['of a GPU']:.0f} |"
        )
    lines += [
        "",
        "From low to high: the settings that nobody measured as fast as the fastest, and as slow as the slowest "
        "measured one. Every free place takes the next run; an idle GPU is paid until the last run ends.",
        "",
        "| GPUs | hours | money | idle at the end |",
        "|---|---|---|---|",
    ]
    for row in plan.itertuples():
        hours, money = f"{row.hours_low:.2f} to {row.hours_high:.2f}", f"{row.money_low:,.0f} to {row.money_high:,.0f}"
        lines.append(f"| {row.gpus} | {hours} | {money} | {row.idle:.1%} |")
    lines += ["", "## Where these assumptions end", ""]
    lines += [f"- {limit}" for limit in atlas_limits(beside, **size)]
    versions = ", ".join(sorted(set(gl.recorded_runs().query("profile == 'paper'").gpulab)))
    lines += [
        "",
        f"Made by `benchmarks/plan_atlas.py --price {given.price:g}`"
        f" from `data/runs`, recorded with gpulab {versions}.",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if given.write:
        given.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
