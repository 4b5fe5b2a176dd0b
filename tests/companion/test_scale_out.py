"""What notebook 08 says about its programs, for made-up numbers."""

import inspect
import re
from argparse import Namespace
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
from nbval.plugin import get_sanitize_patterns

import companion
import gpulab as gl
from companion import scale_out
from companion.scale_out import count_decisions, describe_lock_free
from gpulab.store.recorded import recorded_table
from programs import serve

ROOT = Path(__file__).parents[2]
FOLDED = re.compile(r"<details>.*?</details>", re.DOTALL)


def descents(lost, shift=0.0):
    """Lock-free and synchronous runs from eight seeds, for each repetition."""
    rows = []
    for repetition, share in enumerate(lost):
        for seed in range(8):
            loss = 1.0 + 0.1 * seed
            rows += [
                (repetition, "synchronous", seed, loss, 1.0, 1e-8),
                (repetition, "lock-free", seed, loss + shift, 2.0, share),
            ]
    names = ["repetition", "way", "seed", "heldout_loss", "age", "lost_share"]
    return pd.DataFrame(rows, columns=names)


def verdicts_of(frame):
    """The verdict on the loss of each repetition."""
    return [
        gl.verdict(
            rows[["way", "seed", "heldout_loss"]],
            "heldout_loss",
            "way",
            block="seed",
            reference="synchronous",
        )
        for _, rows in frame.groupby("repetition")
    ]


def speeds_of(free, synchronous):
    """Updates per second in each repetition; None is withheld."""
    rows = [
        (way, repetition, speed)
        for way, speeds in (("lock-free", free), ("synchronous", synchronous))
        for repetition, speed in enumerate(speeds)
    ]
    return pd.DataFrame(rows, columns=["way", "repetition", "updates_per_second"]).astype(
        {"updates_per_second": float}
    )


def scaling_of(speedup, recorded=False, overhead=0.1, size="quick"):
    """One device and two, at one size; without a speedup, the times are withheld."""
    base = {"size": "recorded" if recorded else size, "setting": "cpu:threads=1"}
    base |= {"machine": "a server" if recorded else "this machine", "recorded": recorded}
    rows = []
    for kind, batch in (("strong", 8), ("weak", 16)):
        rows.append(base | {"scaling": kind, "devices": 1, "batch": 8, "speedup": 1.0})
        two = {"seconds": 1.0, "compute": 0.75, "overhead": overhead, "rounds": 7}
        if recorded:
            two |= {"overhead": None, "rounds": None}
        rows.append(
            base | two | {"scaling": kind, "devices": 2, "batch": batch} | {"speedup": speedup}
        )
    return pd.DataFrame(rows).astype({"speedup": float, "overhead": float, "rounds": float})


def found(speedup=1.5, served=2.0, free=(150.0, 160.0)):
    """The finding for made-up numbers; None stands for a number that was withheld."""
    frame = descents(lost=[1e-6, 0.27], shift=9.0)
    ends = pd.DataFrame(
        {"recorded": False, "devices": 2, "precision": ["float32", "float64"]}
    ).assign(weights=[1e-6, 1e-15])
    serving = pd.DataFrame(
        [
            ("this machine", "quick", False, 1, 100.0 if served else None),
            ("this machine", "quick", False, 2, served and 100.0 * served),
            ("a server", "paper", True, 1, 100.0),
            ("a server", "paper", True, 2, 155.0),
        ],
        columns=["machine", "size", "recorded", "devices", "images_per_second"],
    ).astype({"images_per_second": float})
    scalings = [
        scaling_of(speedup),
        scaling_of(speedup and speedup + 0.2, size="small"),
        scaling_of(1.9, recorded=True),
    ]
    return companion.scale_finding(
        ends,
        pd.concat(scalings, ignore_index=True),
        frame,
        speeds_of(free, (100.0, 100.0)),
        verdicts_of(frame),
        serving,
    )


def visible_words(finding):
    """The words of a finding that are not folded."""
    page = FOLDED.sub("", str(finding.words()))
    return re.sub(r"<[^>]+>", " ", page).split()


def test_scale_finding_states_what_was_measured_and_recorded_in_120_words():
    finding = found()
    said = str(finding)
    assert "Measured here: 2 devices train 1.50 to 1.70 times as fast as one with" in said
    assert ", and serve 2.00 times as fast" in said
    assert "Recorded on a server: 2 devices train 1.90 times as fast as one with" in said
    assert ", and serve 1.55 times as fast" in said
    assert "1.50 to 1.60 times as fast as synchronous ones (2 of 2 repetitions)" in said
    assert "Verdicts on the loss without a lock: 2 different." in said
    assert "Waiting and communication take 10% of a divided update" in said
    assert "Waiting and communication take 25% of a divided update" in said, "0.25 of 1 s, recorded"
    assert 50 < len(visible_words(finding)) <= 120


def test_scale_finding_says_that_a_machine_is_too_busy():
    said = str(found(speedup=None, served=None, free=(None, None)))
    for words in ("training and serving", "workers with and without a lock"):
        assert f"his machine is too busy to time {words}" in said
    assert "Recorded on a server: 2 devices train 1.90 times" in said
    assert "nan" not in said


def test_scale_finding_compares_nothing_with_a_withheld_number():
    """If only the time of one device is withheld, several devices are not "1.00 times as fast"."""
    said = str(found(served=float("nan")))
    assert "this machine is too busy to time serving" in said
    assert "2 devices train 1.50 to 1.70 times as fast" in said


@pytest.mark.parametrize("measured", [found, partial(found, None, None, (None, None))])
def test_nbval_compares_the_same_words_of_a_quiet_and_of_a_busy_machine(measured):
    rules = get_sanitize_patterns((ROOT / "tests" / "nbval.cfg").read_text(encoding="utf-8"))

    def sanitised(text):
        for pattern, replacement in rules:
            text = re.sub(pattern, replacement, text)
        return text

    quiet = found()
    for said, expected in ((str(measured()), str(quiet)), (measured().words(), quiet.words())):
        assert sanitised(str(said)) == sanitised(str(expected))
    assert sanitised(str(quiet)) != sanitised(str(quiet).replace("Recorded", "Measured"))


def test_describe_gains_leaves_out_withheld_repetitions():
    gains = companion.lock_free_gains(speeds_of((110.0, None, 200.0), (100.0, 100.0, 100.0)))
    said = companion.describe_gains(gains)
    assert "1.10 to 2.00 times" in said
    assert "(2 of 3 repetitions)" in said


def test_describe_lock_free_states_the_spread_over_repetitions():
    words = describe_lock_free(descents(lost=[1e-6, 0.27, 0.006]))
    assert "In 3 repetitions" in words
    assert "1.0e-06 to 2.7e-01" in words


@pytest.mark.parametrize(("shift", "decision"), [(0.0, "equivalent"), (9.0, "different")])
def test_count_decisions_of_all_repetitions(shift, decision):
    verdicts = verdicts_of(descents(lost=[0.1, 0.2], shift=shift))
    assert count_decisions(verdicts) == f"Verdicts on the loss without a lock: 2 {decision}."


def test_overheads_are_recorded_or_differences_of_means():
    table = pd.concat([scaling_of(1.5), scaling_of(1.9, recorded=True)])
    table = table[(table.devices == 2) & (table.scaling == "strong")]
    assert companion.overheads(table).tolist() == [0.1, 0.25]
    withheld = scaling_of(1.5, overhead=None)
    assert companion.overheads(withheld[withheld.devices == 2]).isna().all()


def test_show_source_is_the_source_with_decorators():
    source = companion.show_source("serve", "predict", "measure")
    assert str(source) == inspect.getsource(serve.predict) + "\n\n" + inspect.getsource(
        serve.measure
    ).rstrip("\n")
    assert source._repr_markdown_() == f"```python\n{source}\n```"
    with pytest.raises(gl.UsageError, match=r"serve.py \(predict, measure, main\), got missing"):
        companion.show_source("serve", "missing")


@pytest.mark.slow("imports anew")
def test_kernel_of_notebook_08_needs_no_torch(python):
    """Torch takes a quarter of a gigabyte, and the kernel waits while programs use it."""
    done = python("""
        import sys
        import pandas as pd
        import companion, gpulab as gl
        from gpulab.plots import theme
        from gpulab.store.recorded import recorded_table

        for name in ("data_parallel", "lock_free", "model_parallel", "serving"):
            getattr(companion, f"draw_{name}")()
        companion.show_source("hogwild", "work"), companion.run_program, companion.scale_finding
        rows = pd.DataFrame({"way": list("ab") * 6, "seed": [n // 2 for n in range(12)]})
        gl.verdict(rows.assign(loss=range(12)), "loss", "way", block="seed", reference="a").plot()
        recorded_table("programs", "scaling"), gl.profile("quick"), companion.finding
        sys.exit("torch" in sys.modules)
    """)
    assert done.returncode == 0


def test_run_program_reads_withheld_columns_as_missing_numbers(monkeypatch):
    tables = {"speeds": [{"way": "a", "updates_per_second": None}], "command": "python"}
    monkeypatch.setattr(scale_out, "read_document", lambda _: tables)
    monkeypatch.setattr(scale_out.subprocess, "run", lambda *_, **__: Namespace(returncode=0))
    (table,) = companion.run_program("hogwild").values()
    assert table.updates_per_second.dtype == float
    assert table.machine.tolist() == ["this machine"]


@pytest.mark.parametrize(
    "name", ["draw_data_parallel", "draw_lock_free", "draw_model_parallel", "draw_serving"]
)
def test_drawings_of_shared_work_have_their_words(name):
    picture = getattr(companion, name)()
    texts = " ".join(text.get_text() for text in picture.figure.axes[0].texts)
    assert texts
    assert picture.alt.endswith(".")


def test_compare_lock_free_has_a_row_for_each_repetition():
    frame = descents([0.05, 0.02], shift=0.01).assign(condition="quiet")
    table = companion.compare_lock_free(frame)
    assert table.repetition.tolist() == [0, 1]
    assert table.lost_share.tolist() == pytest.approx([0.05, 0.02])
    assert table.decision.tolist() == ["different but negligible"] * 2
    assert (table.higher == 8).all()
    assert table.difference.tolist() == pytest.approx([0.01, 0.01])


def test_recorded_lock_free_runs_are_those_of_the_readme():
    table = companion.compare_lock_free(recorded_table("lock_free")).set_index("condition")
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    for condition, digits in (("quiet", 1), ("busy", 2)):
        shares = 100 * table.loc[condition].lost_share
        low, high = f"{shares.min():.{digits}f}", f"{shares.max():.1f}"
        assert f"{condition}: {low} to {high} %" in page
    quiet = table.loc["quiet"]
    assert f"a higher loss in {quiet.higher.sum()} of {quiet.seeds.sum()} pairs" in page
