"""Tables with a row for each epoch or step: rejected, or reduced to one row for each run by `last`
or `best`.
"""

import io
import math

import numpy as np
import pandas as pd
import pytest

import gpulab as gl
from gpulab.stats._tables import read_table
from tests.stats._helpers import logged, metrics

LOGS = {"metric": "val_loss", "factor": "optimizer"}


def test_verdict_refuses_a_row_for_each_epoch_and_names_last_and_best():
    with pytest.raises(gl.UsageError) as error:
        gl.verdict(logged(), **LOGS)
    for named in (
        "optimizer adam seed 0 has 6 rows",
        "'epoch' and step",
        "last='epoch' (--last epoch)",
        "best='val_loss' (--best val_loss)",
    ):
        assert named in str(error.value)


@pytest.mark.parametrize("last", ["epoch", "step"])
def test_verdict_last_takes_the_last_row_of_each_run_with_the_metric(last):
    table = logged()
    verdict = gl.verdict(table.sample(frac=1, random_state=1), **LOGS, last=last)
    ends = table.dropna(subset="val_loss").groupby(["optimizer", "seed"]).val_loss.last()
    assert verdict.table.difference[0] == pytest.approx(
        (ends.sgd - ends.adam).mean() * (-1) ** (verdict.reference == "sgd")
    )
    assert verdict.notes[0].startswith(
        f"From 216 rows, the last {last} with val_loss was taken for each optimizer and"
    )
    assert verdict.table[["seeds", "diverged", "unpaired"]].values.tolist() == [[6, 0, 0]]


def test_verdict_last_takes_the_last_step_of_the_last_epoch():
    table = logged()
    ends = table.dropna(subset="train_loss").groupby(["optimizer", "seed"]).train_loss.last()
    verdict = gl.verdict(table[::-1], "train_loss", "optimizer", last="epoch", reference="adam")
    assert verdict.table.difference[0] == pytest.approx((ends.sgd - ends.adam).mean())


def test_verdict_best_takes_the_row_that_is_best_in_the_column():
    table = logged()
    filled = table.dropna(subset="val_loss")
    lowest = filled.loc[filled.groupby(["optimizer", "seed"]).val_loss.idxmin()].set_index(
        ["optimizer", "seed"]
    )
    own = gl.verdict(table, **LOGS, best="val_loss", reference="adam")
    assert own.table.difference[0] == pytest.approx(
        (lowest.val_loss.sgd - lowest.val_loss.adam).mean()
    )
    # The training loss is in other rows. The last of those with the same epoch is taken.
    train = (
        table.dropna(subset="train_loss").groupby(["optimizer", "seed", "epoch"]).train_loss.last()
    )
    at_best = train.loc[lowest.set_index("epoch", append=True).index].droplevel("epoch")
    other = gl.verdict(table, "train_loss", "optimizer", best="val_loss", reference="adam")
    assert other.table.difference[0] == pytest.approx((at_best.sgd - at_best.adam).mean())
    assert "lowest val_loss (lower is better, judging by its name)" in str(other)
    highest = gl.verdict(table, **LOGS, best="val_loss", mode="max", reference="adam")
    assert highest.table.difference[0] > 0
    assert "by its name" not in str(highest)


@pytest.mark.parametrize(
    "name",
    [
        "epoch",
        "Epoch",
        "step",
        "_step",
        "global_step",
        "trainer/global_step",
        "iteration",
        "iter",
        "time/total_timesteps",
    ],
)
def test_verdict_last_takes_any_counting_column(name):
    table = logged()[["optimizer", "seed", "step", "val_loss"]].rename(columns={"step": name})
    with pytest.raises(gl.UsageError, match=f"which differ in '{name}' and are not averaged"):
        gl.verdict(table, **LOGS)
    assert gl.verdict(table, **LOGS, last=name).table.seeds[0] == 6


@pytest.mark.parametrize(
    "name", ["episode", "n", "train_loss_epoch", "steps_per_second", "batch_size"]
)
def test_verdict_averages_other_repetitions_and_says_so(name):
    table = (
        logged()
        .dropna(subset="val_loss")
        .rename(columns={"epoch": name})[["optimizer", "seed", name, "val_loss"]]
    )
    text = str(gl.verdict(table, **LOGS))
    assert "72 rows were first averaged to 12" in text
    assert f"If {name!r} counts" in text
    assert f"last={name!r} or best=" in text
    assert gl.verdict(table, **LOGS, last=name).table.seeds[0] == 6


def test_verdict_of_a_metric_with_one_row_for_each_run_needs_no_choice():
    table = logged()
    is_end = (table.epoch == 5) & table.val_loss.notna()
    table["test_loss"] = table.val_loss.where(is_end)
    verdict = gl.verdict(table, "test_loss", "optimizer")
    assert verdict.table[["seeds", "diverged", "unpaired"]].values.tolist() == [[6, 0, 0]]


def test_verdict_last_names_a_run_that_ends_early():
    table = logged()
    table = table[~((table.optimizer == "sgd") & (table.seed == 4) & (table.epoch > 2))]
    assert "epoch 5, but an earlier one for optimizer sgd seed 4 (2)." in str(
        gl.verdict(table, **LOGS, last="epoch")
    )


def is_late(runs):
    """The last epochs of one run."""
    return (runs.optimizer == "sgd") & (runs.seed == 4) & (runs.epoch > 2)


MARK_DIVERGED = "write `diverged` into a column `status`"


def test_verdict_last_counts_a_run_that_becomes_infinite_as_diverged():
    table = logged()
    table.loc[is_late(table) & table.val_loss.notna(), "val_loss"] = math.inf
    verdict = gl.verdict(table, **LOGS, last="epoch", reference="adam")
    assert verdict.table[["seeds", "diverged", "unpaired"]].values.tolist() == [[5, 1, 0]]
    # The best row comes before the divergence.
    best = gl.verdict(table, **LOGS, best="val_loss", reference="adam")
    assert best.table[["seeds", "diverged"]].values.tolist() == [[6, 0]]
    assert "Diverged after their best row: optimizer sgd seed 4." in str(best)
    assert MARK_DIVERGED not in str(verdict) + str(best)


@pytest.mark.parametrize("choice", [{"last": "epoch"}, {"best": "val_loss"}])
def test_verdict_counts_nan_at_the_end_of_a_run_as_empty(choice):
    table = logged()
    table.loc[is_late(table) & table.val_loss.notna(), "val_loss"] = math.nan
    verdict = gl.verdict(table, **LOGS, **choice, reference="adam")
    assert verdict.table[["seeds", "diverged", "unpaired"]].values.tolist() == [[6, 0, 0]]
    text = str(verdict)
    assert "val_loss is empty or NaN at the end of optimizer sgd seed 4." in text
    assert MARK_DIVERGED in text
    assert "Diverged" not in text
    is_run = (table.optimizer == "sgd") & (table.seed == 4)
    marked = table.assign(status=np.where(is_run, "diverged", "finished"))
    verdict = gl.verdict(marked, **LOGS, **choice, reference="adam")
    assert verdict.table[["seeds", "diverged", "unpaired"]].values.tolist() == [[5, 1, 0]]
    assert MARK_DIVERGED not in str(verdict)


def test_verdict_last_says_nothing_of_nan_in_a_log_without_gaps_at_its_end():
    assert "NaN" not in str(gl.verdict(logged(), **LOGS, last="epoch"))
    unequal = logged()
    unequal = unequal[~((unequal.optimizer == "sgd") & (unequal.epoch > 3))]
    assert "NaN" not in str(gl.verdict(unequal, **LOGS, last="epoch"))


def test_verdict_last_takes_a_metric_that_is_logged_every_third_epoch():
    table = logged(epochs=8)
    table.loc[table.epoch % 3 > 0, "val_loss"] = math.nan
    verdict = gl.verdict(table, **LOGS, last="epoch")
    assert verdict.table[["seeds", "diverged", "unpaired"]].values.tolist() == [[6, 0, 0]]
    assert "epoch 6" in verdict.notes[0]


def test_verdict_last_counts_a_run_without_any_value_as_missing():
    table = logged()
    text = "\n".join(
        line for line in metrics("sgd", 9).splitlines() if not line.split(",")[3] or "epoch" in line
    )
    table = pd.concat(
        [
            table,
            pd.read_csv(io.StringIO(text))
            .query("epoch < 2")
            .assign(optimizer="sgd", seed=4, val_loss=np.nan),
        ]
    )
    table = table[~((table.optimizer == "sgd") & (table.seed == 4) & table.val_loss.notna())]
    table = table[~((table.optimizer == "sgd") & (table.seed == 4) & (table.epoch > 1))]
    read = io.StringIO(table.to_csv(index=False))
    for frame in (pd.read_csv(read, dtype_backend="numpy_nullable"),):
        verdict = gl.verdict(frame, **LOGS, last="epoch", reference="adam")
        assert verdict.table[["seeds", "diverged"]].values.tolist() == [[5, 0]]
        assert "did not finish: 1 (sgd 1 missing)" in str(verdict)
        assert "Missing: seed 4 with sgd." in str(verdict)


# By the name of a case: the choice, and what the message names besides the offending argument.
REFUSED = {
    "an unknown counting column": ({"last": "epochs"}, ["epoch, step"]),
    "an unknown best column": ({"best": "loss"}, ["epoch, step"]),
    "last and best together": ({"last": "epoch", "best": "val_loss"}, ["best='val_loss'"]),
    "an unknown mode": ({"mode": "low", "best": "val_loss"}, ["'min'", "'max'"]),
    "mode without best": ({"mode": "min"}, ["best="]),
    "best of unknown direction": ({"best": "step"}, ["mode='min'", "mode='max'"]),
    "last of texts": ({"last": "name"}, ["numbers"]),
    "the seed as last": ({"last": "seed"}, ["pairs the runs", "counts epochs or steps"]),
    "the level as last": ({"last": "optimizer"}, ["levels are compared", "epochs or steps"]),
    "the metric as last": ({"last": "val_loss"}, ["best='val_loss'"]),
    "the seed as best": ({"best": "seed", "mode": "min"}, ["pairs the runs"]),
}


@pytest.mark.parametrize(("choice", "named"), REFUSED.values(), ids=REFUSED)
def test_verdict_last_and_best_refuse_impossible_choices_in_one_line(choice, named):
    with pytest.raises(gl.UsageError) as error:
        gl.verdict(logged().assign(name="a"), **LOGS, **choice)
    argument, value = next(iter(choice.items()))
    message = str(error.value)
    assert message.startswith(f"{argument}={value!r}")
    assert [words for words in named if words not in message] == []
    assert "\n" not in message


def test_verdict_best_refuses_a_metric_that_is_not_in_the_best_epoch():
    table = logged()
    table["test_loss"] = table.val_loss.where(table.epoch.isin([0, 1]))
    with pytest.raises(
        gl.UsageError,
        match=r"has no test_loss at epoch \d, where val_loss is best: take the last row with",
    ):
        gl.verdict(table, "test_loss", "optimizer", best="val_loss")


def test_verdict_last_refuses_several_runs_of_one_seed_by_what_differs():
    table = pd.concat([logged().assign(run=f"version_{rate}", rate=rate) for rate in (0.1, 0.2)])
    with pytest.raises(
        gl.UsageError,
        match=r"has 2 runs, which differ in rate \(run version_0.1, version_0.2\); keep",
    ):
        gl.verdict(table, **LOGS, last="epoch")


def test_verdict_last_keeps_rows_of_reruns():
    table = pd.concat([logged(), logged().assign(rerun=1)])
    verdict = gl.verdict(table, **LOGS, last="epoch", reference="adam")
    assert (verdict.table.seeds[0], len(verdict.reruns)) == (6, 6)


def test_verdict_refuses_a_history_of_runs_of_gpulab():
    runs = gl.recorded_runs().query(
        "experiment == 'autoencoder' and profile == 'quick' and loader == 'window'"
    )
    history = gl.store.history(runs[runs.setting.isin(["cpu", "cpu:threads=1"])])
    with pytest.raises(
        gl.UsageError, match="which differ in 'step' and frames_seen and are not averaged"
    ):
        gl.verdict(history, "loss")
    assert gl.verdict(history, "loss", last="step").table.seeds[0] == 10


def test_verdict_of_a_history_counts_the_runs_that_diverged():
    runs = gl.recorded_runs().query("experiment == 'whitener' and covariance == 'one-pass'")
    history = gl.store.history(runs)
    by_run = gl.verdict(runs, reference="cuda:tf32=off").table.diverged[0]
    by_window = gl.verdict(history, "loss", last="step", reference="cuda:tf32=off")
    assert by_window.table.diverged[0] == by_run > 0


@pytest.mark.parametrize("options", [{"last": "epoch"}, {"best": "val_loss"}])
@pytest.mark.parametrize("lost", [None, "", "inf"])
def test_verdict_of_a_file_is_the_same_whether_pandas_or_gpulab_reads_it(tmp_path, options, lost):
    mine, theirs = read_both_ways(tmp_path, lost, options)
    assert mine.table.equals(theirs.table)
    # pandas cannot distinguish an empty cell from NaN, so the verdict has two further lines.
    further = [line for line in theirs.notes if line not in mine.notes]
    assert [note for note in theirs.notes if note not in further] == list(mine.notes)
    assert len(further) == (2 if lost == "" else 0)
    assert str(mine).splitlines()[0] == str(theirs).splitlines()[0]
    assert mine.table.diverged[0] + mine.table.reference_diverged[0] == (
        lost == "inf" and "last" in options
    )


def test_verdict_tells_a_logged_nan_from_an_empty_cell_if_gpulab_reads_the_file(tmp_path):
    mine, theirs = read_both_ways(tmp_path, "nan", {"last": "epoch", "reference": "adam"})
    assert mine.table[["seeds", "diverged"]].values.tolist() == [[5, 1]]
    assert theirs.table[["seeds", "diverged"]].values.tolist() == [[6, 0]]
    assert "gl.stats.read_table tells NaN from an empty cell" in str(theirs)


def read_both_ways(folder, lost, options):
    """The verdicts on a file as gpulab and as pandas read it.

    The last losses of one run are replaced by the text `lost`.
    """
    table = logged()
    losses = table.val_loss.astype(object).where(table.val_loss.notna(), "")
    if lost is not None:
        losses = losses.mask(is_late(table) & table.val_loss.notna(), lost)
    file = folder / "runs.csv"
    table.assign(val_loss=losses).to_csv(file, index=False)
    return [gl.verdict(read(file), **LOGS, **options) for read in (read_table, pd.read_csv)]


def test_verdict_counts_an_empty_cell_as_missing_whoever_reads_it(tmp_path):
    losses = {("cpu", seed): seed / 10 for seed in range(8)}
    losses |= {("cuda", seed): seed / 10 + 1 for seed in range(8)} | {("cuda", 3): ""}
    lines = [f"{setting},{seed},{loss}\n" for (setting, seed), loss in losses.items()]
    (tmp_path / "runs.csv").write_text("setting,seed,loss\n" + "".join(lines))
    mine = gl.verdict(read_table(tmp_path / "runs.csv"), "loss")
    theirs = gl.verdict(pd.read_csv(tmp_path / "runs.csv"), "loss")
    assert mine.table.equals(theirs.table)
    for verdict in (mine, theirs):
        assert "did not finish: 1 (cuda 1 missing)" in str(verdict)
        assert "Missing: seed 3 under cuda." in str(verdict)
    assert "write `diverged` into a column `status`" in str(theirs), (
        "pandas cannot distinguish the two"
    )


# --- seeds ----------------------------------------------------------------------------------------

BASE = pd.DataFrame(
    {"setting": "a", "seed": range(8), "final_loss": [0.0, 10, 20, 30, 40, 50, 60, 70]}
)
WAYS = {
    "text": lambda seeds: seeds.astype(str),
    "decimals": lambda seeds: seeds.astype(float),
    "text with decimals": lambda seeds: seeds.astype(float).astype(str),
    "text with blanks": lambda seeds: " " + seeds.astype(str),
    "categories": lambda seeds: seeds.astype("category"),
    "nullable": lambda seeds: seeds.astype("Int64"),
    "Arrow's text": lambda seeds: seeds.astype("string[pyarrow]"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("first", WAYS)
def test_verdict_pairs_seeds_that_are_the_same_numbers_whatever_their_types(way, first):
    other = BASE.assign(
        setting="b", final_loss=BASE.final_loss + 1, seed=WAYS[way](BASE.seed)
    ).iloc[::-1]
    verdict = gl.verdict(pd.concat([BASE.assign(seed=WAYS[first](BASE.seed)), other]))
    assert (verdict.table.seeds[0], verdict.table.unpaired[0]) == (8, 0)
    assert verdict.pairs.difference.tolist() == [1.0] * 8


def test_verdict_names_seeds_of_several_types_that_are_not_the_same_numbers():
    other = BASE.assign(setting="b", seed="run " + BASE.seed.astype(str))
    with pytest.raises(gl.UsageError) as error:
        gl.verdict(pd.concat([BASE, other]))
    for named in ("seed", "numbers under a (0, 1, 2)", "text under b ('run 0', 'run 1', 'run 2')"):
        assert named in str(error.value)


def test_verdict_keeps_seeds_apart_whose_names_only_look_like_numbers():
    runs = pd.concat(
        [BASE.assign(seed=["01", "1", *"234567"]), BASE.assign(setting="b", seed=[*"01234567"])]
    )
    assert gl.verdict(runs).table.seeds[0] == 7, "01 and 1 are two seeds under a"


def test_verdict_writes_truth_values_with_their_factor():
    runs = pd.concat(
        [BASE.assign(amp=False), BASE[:6].assign(amp=True, final_loss=BASE.final_loss + 1)]
    )
    text = str(gl.verdict(runs, factor="amp"))
    assert text.startswith("amp=True against amp=False, 6 of 8 seeds: ")
    assert "Missing: seeds 6 and 7 with amp=True." in text
    assert str(gl.verdict(runs, factor="amp", reference="amp=True")).startswith(
        "amp=False against amp=True"
    )
    with pytest.raises(gl.UsageError, match=r"^amp=True seed 0 was run more than once, .*day"):
        gl.verdict(pd.concat([runs.assign(day="a"), runs[runs.amp].assign(day="b")]), factor="amp")
    assert "np." not in text
