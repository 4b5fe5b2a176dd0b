import math

import pandas as pd
import pytest

import gpulab as gl


def frame(*rows, **columns):
    """Runs from (setting, seed, loss, weights), and columns that all have in common."""
    common = {"experiment": "prednet", "profile": "quick", "frames": 1000, "protocol": "1a2b", "rerun": 0}
    common |= {"machine": "a machine", "heldout_loss": 1.0, **columns}
    return pd.DataFrame(
        [
            {
                **common,
                "setting": setting,
                "seed": seed,
                "final_loss": loss,
                "weights": weights,
                "status": "diverged" if math.isnan(loss) else "finished",
            }
            for setting, seed, loss, weights in rows
        ]
    )


THREE = frame(
    ("cpu", 0, 0.10, "a"),
    ("cpu", 1, 0.20, "b"),
    ("cpu", 2, 0.60, "c"),
    ("cpu:threads=1", 0, 0.10, "a"),
    ("cpu:threads=1", 1, 0.21, "d"),
    ("cpu:threads=1", 2, 0.57, "e"),
    ("cuda", 0, 0.30, "f"),
    ("cuda", 1, 0.18, "g"),
)


def row(comparison, setting):
    (found,) = comparison.table[comparison.table.setting == setting].to_dict("records")
    return found


def test_settings_are_compared_seed_by_seed():
    comparison = gl.compare(THREE, "cpu")
    assert comparison.table.setting.tolist() == ["cpu:threads=1", "cuda"]
    assert row(comparison, "cpu:threads=1") == {
        "setting": "cpu:threads=1",
        "seeds": 3,
        "same_bits": 1,
        "mean_difference": pytest.approx((0 + 0.01 - 0.03) / 3),
        "largest_difference": pytest.approx(0.03),
        "diverged": 0,
    }
    # cuda has no run from seed 2: that seed is left out, not made up
    assert row(comparison, "cuda")["seeds"] == 2
    assert row(comparison, "cuda")["mean_difference"] == pytest.approx((0.2 - 0.02) / 2)
    assert row(comparison, "cuda")["largest_difference"] == pytest.approx(0.2)
    moved = comparison.differences.set_index(["setting", "seed"]).difference
    assert moved.loc["cpu:threads=1"].tolist() == pytest.approx([0, 0.01, -0.03])
    assert moved.loc["cuda"].tolist() == pytest.approx([0.2, -0.02])
    assert comparison.between_seeds == pytest.approx(math.sqrt((0.2**2 + 0.1**2 + 0.3**2) / 2))
    assert comparison.largest == pytest.approx(0.2)
    assert comparison.ratio == pytest.approx(0.2 / math.sqrt(0.07))


def test_the_order_of_the_runs_does_not_matter():
    first, second = gl.compare(THREE, "cpu"), gl.compare(THREE.sample(frac=1, random_state=1), "cpu")
    for setting in ("cpu:threads=1", "cuda"):
        assert row(first, setting) == pytest.approx(row(second, setting))


def test_another_reference_turns_the_signs():
    comparison = gl.compare(THREE, "cuda")
    assert row(comparison, "cpu")["mean_difference"] == pytest.approx((-0.2 + 0.02) / 2)
    assert comparison.between_seeds == pytest.approx(0.12 / math.sqrt(2))


def test_another_metric_can_be_compared():
    heldout = THREE.assign(heldout_loss=THREE.final_loss * 2)
    comparison = gl.compare(heldout, "cpu", metric="heldout_loss")
    assert comparison.largest == pytest.approx(0.4)
    assert "heldout_loss" in str(comparison)
    with pytest.raises(gl.UsageError, match="'beauty'"):
        gl.compare(THREE, "cpu", metric="beauty")


def test_the_words_follow_from_the_numbers():
    text = str(gl.compare(THREE, "cpu"))
    assert "2.00e-01" in text
    assert "2.65e-01" in text
    assert "is smaller than the change of seed: 0.76 of it" in text
    assert "Diverged runs: 0" in text
    far = THREE.assign(final_loss=[0.10, 0.20, 0.60, 0.10, 0.21, 0.57, 1.30, 0.18])
    assert "is not smaller than the change of seed: 4.5 of it" in str(gl.compare(far, "cpu"))


RERUNS = pd.concat(
    [
        frame(("cuda", 0, 0.10, "a"), ("cuda", 1, 0.20, "b"), ("cpu", 0, 0.10, "x"), ("cpu", 1, 0.25, "y")),
        frame(("cuda", 0, 0.10, "a"), ("cuda", 1, 0.23, "c"), ("cpu", 0, 0.90, "z"), rerun=1),
    ]
)


def test_the_reruns_of_the_reference_have_a_row_of_their_own():
    comparison = gl.compare(RERUNS, "cuda")
    assert comparison.table.setting.tolist() == ["cpu", "cuda again"]
    assert row(comparison, "cuda again") == {
        "setting": "cuda again",
        "seeds": 2,
        "same_bits": 1,
        "mean_difference": pytest.approx(0.015),
        "largest_difference": pytest.approx(0.03),
        "diverged": 0,
    }
    assert comparison.largest == pytest.approx(0.05), "neither the reruns of the reference nor those of others count"
    assert "changed a seed by up to 3.00e-02; 1 of 2 seeds gave the same bits twice" in str(comparison)
    assert gl.compare(RERUNS, "cpu").largest == pytest.approx(0.05)


def test_every_rerun_of_the_reference_counts():
    third = frame(("cuda", 0, 0.70, "d"), ("cuda", 1, 0.20, "b"), rerun=2)
    again = row(gl.compare(pd.concat([RERUNS, third]), "cuda"), "cuda again")
    assert again["largest_difference"] == pytest.approx(0.6)


def test_diverged_runs_are_counted_and_do_not_spoil_the_numbers():
    runs = frame(
        ("cpu", 0, 0.1, "a"),
        ("cpu", 1, 0.3, "b"),
        ("cpu", 2, math.nan, "c"),
        ("cuda", 0, 0.2, "d"),
        ("cuda", 1, math.nan, "e"),
        ("cuda", 2, 0.4, "f"),
    )
    comparison = gl.compare(runs, "cpu")
    assert row(comparison, "cuda")["diverged"] == 1
    assert comparison.largest == pytest.approx(0.1)
    assert comparison.between_seeds == pytest.approx(0.2 / math.sqrt(2))
    assert "Diverged runs: 2" in str(comparison), "the reference's own count, too"


def test_one_seed_tells_nothing_about_the_spread_between_seeds():
    comparison = gl.compare(THREE[THREE.seed == 0], "cpu")
    assert comparison.largest == pytest.approx(0.2)
    assert math.isnan(comparison.between_seeds)
    assert math.isnan(comparison.ratio)
    assert "smaller than the change of seed" not in str(comparison)
    assert "0.00e+00" not in str(comparison)


def test_settings_without_a_seed_in_common_are_not_compared():
    comparison = gl.compare(frame(("cpu", 0, 0.1, "a"), ("cpu", 1, 0.3, "b"), ("cuda", 2, 0.2, "c")), "cpu")
    assert row(comparison, "cuda")["seeds"] == 0
    assert "smaller than the change of seed" not in str(comparison)


def test_settings_that_agree_to_the_last_bit_differ_by_nothing():
    comparison = gl.compare(
        pd.concat([THREE[THREE.setting == "cpu"], THREE[THREE.setting == "cpu"].assign(setting="xpu")]), "cpu"
    )
    assert row(comparison, "xpu")["same_bits"] == 3
    assert (comparison.largest, comparison.ratio) == (0, 0)
    assert "is smaller than the change of seed: 0 of it" in str(comparison)


def test_one_setting_alone_is_compared_with_nothing():
    comparison = gl.compare(THREE[THREE.setting == "cpu"], "cpu")
    assert comparison.table.empty
    assert comparison.largest == 0
    assert "nothing to compare" in str(comparison)


@pytest.mark.parametrize("column", ["experiment", "profile", "frames", "protocol"])
def test_runs_of_different_protocols_are_not_compared(column):
    mixed = pd.concat([THREE, THREE.assign(**{column: "another"})])
    with pytest.raises(gl.UsageError, match=r"mixes.*another"):
        gl.compare(mixed, "cpu")


def test_two_machines_runs_of_one_setting_are_not_compared():
    with pytest.raises(gl.UsageError, match=r"'cpu' seed 0 was run more than once, on a machine, another"):
        gl.compare(pd.concat([THREE, THREE.assign(machine="another")]), "cpu")


def test_a_reference_that_was_not_run_is_refused_with_those_that_were():
    with pytest.raises(gl.UsageError, match=r"'mps'.*cpu:threads=1.*cuda"):
        gl.compare(THREE, "mps")
    with pytest.raises(gl.UsageError, match="'cpu'"):
        gl.compare(THREE[:0], "cpu")


def test_the_frame_is_left_as_it_was():
    before = THREE.copy()
    gl.compare(THREE, "cpu")
    assert THREE.equals(before)


def test_recorded_runs_can_be_compared():
    runs = gl.recorded_runs()
    paper = runs[(runs.experiment == "autoencoder") & (runs.profile == "paper")]
    comparison = gl.compare(paper, "cuda:tf32=off")
    assert set(comparison.table.setting) >= {"cuda:tf32=on", "cuda:cudnn=off", "cuda:deterministic=on"}
    assert (comparison.table.seeds >= 10).all()
    assert 0 < comparison.between_seeds < 1
