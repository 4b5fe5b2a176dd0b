"""Timings are withheld if the rounds disagree."""

import math

import pandas as pd
import pytest

from companion import timing


def test_time_rounds_reports_spread(monkeypatch):
    seconds = [[1.0, 1.0, 1.0], [1.0, 2.0, 4.0]]
    monkeypatch.setattr(timing, "time_in_rounds", lambda *_: seconds)
    table = timing.time_rounds({"calm": int, "disturbed": int}, "cpu", rounds=3)
    assert table.spread.tolist() == [0.0, 0.75]  # quartiles 1.5 and 3 over a median of 2
    assert table.seconds.tolist() == [1.0, 2.0]


def test_withhold_only_where_rounds_disagree():
    table = pd.DataFrame({"seconds": [1.0, 2.0], "spread": [0.2, 0.21]}, index=["a", "b"])
    kept = timing.withhold(table)
    assert kept.seconds.to_dict() == {"a": 1.0, "b": pytest.approx(float("nan"), nan_ok=True)}
    assert kept.spread.tolist() == [0.2, 0.21]
    assert timing.withhold(table, share=0.5).seconds.isna().all()


@pytest.mark.parametrize(
    ("spreads", "share", "words", "trusted"),
    [
        ([0.01, 0.05], 1.0, "can be trusted", True),
        ([0.01, 0.05, 0.4], 1.0, "1 of 3 times", True),
        ([0.01, 0.5, 0.4], 1.0, "2 of 3 times", False),
        ([0.01, 0.05], 0.6, "60%", False),
    ],
)
def test_describe_trust(spreads, share, words, trusted):
    table = pd.DataFrame({"spread": spreads})
    assert words in timing.describe_trust(table, share)
    assert ("too busy" in timing.describe_trust(table, share)) is not trusted
    assert timing.is_trusted(table, share) is trusted


def test_share_of_cores_halves_when_another_core_is_asked_for(monkeypatch):
    """If twice the real number of cores is assumed, half of the processor time is missing."""
    real = timing.count_cores()
    monkeypatch.setattr(timing, "count_cores", lambda: 2 * real)
    assert timing.share_of_cores(0.1) < 0.7


@pytest.mark.parametrize(
    ("seconds", "share", "expected", "words"),
    [
        ([[1.0] * 3, [1.0, 1.0, 1.1]], 1.0, [1.0, 1.0], "can be trusted"),
        ([[1.0] * 3, [1.0, 2.0, 4.0]], 1.0, [1.0, math.nan], "1 of 2 times"),
        ([[1.0] * 3, [1.0] * 3], 0.8, [math.nan, math.nan], "80%"),
    ],
)
def test_measure_times_withholds_and_says_so(monkeypatch, capsys, seconds, share, expected, words):
    monkeypatch.setattr(timing, "time_in_rounds", lambda *_: seconds)
    monkeypatch.setattr(timing, "share_of_cores", lambda: share)
    table = timing.measure_times({"a": int, "b": int}, "cpu", rounds=3)
    assert table.seconds.tolist() == pytest.approx(expected, nan_ok=True)
    assert words in capsys.readouterr().out


def test_withhold_rows_takes_seeds_as_rounds_and_keeps_what_is_no_time(capsys):
    """One way agrees over its seeds and one does not; a rate brings its own spread."""
    rows = [("text", "net", "calm", "s", value, None) for value in (1.0, 1.0, 1.1)]
    rows += [("text", "net", "disturbed", "s", value, None) for value in (1.0, 2.0, 4.0)]
    rows += [("text", "net", "disturbed", "loss", value, None) for value in (1.0, 2.0, 4.0)]
    rows += [("libraries", "net", "jax", "images/s", 9.0, 0.3), ("trees", "", "", "", None, None)]
    frame = pd.DataFrame(rows, columns=["part", "what", "way", "unit", "value", "spread"])
    frame = frame.assign(setting="cpu").astype({"value": float, "spread": float})
    kept = timing.withhold_rows(frame)
    nan = math.nan
    expected = [1.0, 1.0, 1.1, nan, nan, nan, 1.0, 2.0, 4.0, nan, nan]
    assert kept.value.tolist() == pytest.approx(expected, nan_ok=True)
    assert kept.spread[[0, 3, 9]].tolist() == pytest.approx([0.05, 0.75, 0.3])
    assert "2 of 3 times" in capsys.readouterr().out
    busy = timing.withhold_rows(frame, share=0.5)
    assert busy.value[frame.unit.isin(timing.TIMED_UNITS)].isna().all()
    assert busy.value[frame.unit == "loss"].tolist() == [1.0, 2.0, 4.0]
