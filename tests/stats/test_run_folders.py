"""Folders of runs as Hydra, Lightning, Weights & Biases and TensorBoard write them."""

import argparse
import io
import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml

import gpulab as gl
from gpulab.errors import DataError
from gpulab.stats._configs import MAX_SETTINGS, load_yaml, read_settings
from tests.stats._helpers import FLOORS, logged, metrics, write

RUNS = [(optimizer, seed) for optimizer in FLOORS for seed in range(6)]
EXPECTED = gl.verdict(logged(), "val_loss", "optimizer", last="epoch").table.difference[0]


def hydra(folder, optimizer, seed, number):
    """Write a run as `python train.py -m optimizer=adam,sgd seed=range(6)` does with Lightning's
    logger.
    """
    job = folder / "multirun" / "2026-03-01" / "10-00-00" / str(number)
    config = {
        "seed": seed,
        "optimizer": {"_target_": f"torch.optim.{optimizer}", "lr": "${lr}"},
        "lr": "1e-3",
    }
    write(job / ".hydra/config.yaml", yaml.safe_dump(config | {"experiment": f"e{number}"}))
    write(job / ".hydra/overrides.yaml", yaml.safe_dump([f"optimizer={optimizer}", f"seed={seed}"]))
    write(job / ".hydra/hydra.yaml", "hydra: {run: {dir: here}}\n")
    write(job / "csv/version_0/metrics.csv", metrics(optimizer, seed))
    write(job / "csv/version_0/hparams.yaml", "betas: !!python/tuple\n- 0.9\n- 0.99\n")
    write(job / "predictions.csv", "image,label\n0,1\n")


def lightning(folder, optimizer, seed, number):
    """Write a run as Lightning's command line does."""
    version = folder / "lightning_logs" / f"version_{number}"
    write(
        version / "config.yaml",
        yaml.safe_dump({"seed_everything": seed, "trainer": {"max_epochs": 6}}),
    )
    write(
        version / "hparams.yaml",
        yaml.dump({"optimizer": optimizer, "args": argparse.Namespace(width=3)}),
    )
    write(version / "metrics.csv", metrics(optimizer, seed))


def wandb(folder, optimizer, seed, number):
    """Write a run with a configuration in the format of Weights & Biases."""
    config = {
        "_wandb": {"value": {}},
        "optimizer": {"desc": None, "value": optimizer},
        "seed": {"value": seed},
    }
    write(folder / f"run-{number}" / "config.yaml", yaml.safe_dump(config))
    write(folder / f"run-{number}" / "metrics.csv", metrics(optimizer, seed))


def by_name(folder, optimizer, seed, number):  # noqa: ARG001
    write(folder / f"optimizer={optimizer},seed={seed}" / "progress.csv", metrics(optimizer, seed))


def by_folder(folder, optimizer, seed, number):  # noqa: ARG001
    write(
        folder / optimizer / f"seed_{seed}" / "version_0" / "metrics.csv", metrics(optimizer, seed)
    )


def tensorboard(folder, optimizer, seed, number):  # noqa: ARG001
    table = pd.read_csv(io.StringIO(metrics(optimizer, seed)))
    for tag in ("val_loss", "train_loss"):
        rows = table.dropna(subset=tag)
        curve = pd.DataFrame(
            {"Wall time": 1.7e9 + rows.step, "Step": rows.step, "Value": rows[tag]}
        )
        write(folder / f"run-{optimizer}_seed{seed}-tag-{tag}.csv", curve.to_csv(index=False))


LAYOUTS = {  # the column of the factor for each layout
    hydra: "optimizer",
    lightning: "optimizer",
    wandb: "optimizer",
    by_name: "optimizer",
    by_folder: "group",
    tensorboard: "group",
}


def fill(folder, layout):
    for number, (optimizer, seed) in enumerate(RUNS):
        layout(folder, optimizer, seed, number)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_read_table_of_a_folder_of_runs_gives_the_verdict_of_its_table(tmp_path, layout):
    frame = gl.stats.read_table(fill(tmp_path, layout))
    last = "Step" if layout is tensorboard else "epoch"
    verdict = gl.verdict(frame, "val_loss", LAYOUTS[layout], last=last, reference="adam")
    assert verdict.table.seeds.tolist() == [6]
    assert verdict.table.difference[0] == pytest.approx(EXPECTED)
    assert verdict.source == str(tmp_path)
    with pytest.raises(gl.UsageError, match="and are not averaged"):
        gl.verdict(frame, "val_loss", LAYOUTS[layout])


def test_read_table_notes_say_what_came_from_where(tmp_path):
    notes = gl.stats.read_table(fill(tmp_path, hydra)).attrs["notes"]
    assert notes == (
        "12 tables were read (metrics.csv).",
        "Settings are from hparams.yaml: betas.",
        "Settings are from .hydra/overrides.yaml: optimizer, seed.",
        (
            "Settings are from .hydra/config.yaml: config.experiment, lr, optimizer._target_,"
            " optimizer.lr."
        ),
    )
    frame = gl.stats.read_table(tmp_path)
    assert set(frame["optimizer.lr"]) == {0.001}, "a reference to a number that YAML reads as text"
    assert set(frame.betas) == {"[0.9, 0.99]"}
    assert str(gl.verdict(frame, "val_loss", "optimizer", last="epoch")).endswith("\n".join(notes))
    notes = gl.stats.read_table(fill(tmp_path / "other", lightning)).attrs["notes"]
    assert "The column seed is a copy of seed_everything." in notes
    notes = gl.stats.read_table(fill(tmp_path / "names", by_folder)).attrs["notes"]
    assert any("names of folders and files: seed, group" in note for note in notes)


def test_read_table_takes_patterns_several_names_and_a_part_of_the_folder(tmp_path):
    fill(tmp_path, hydra)
    pattern = tmp_path / "multirun/*/*/*/csv/*/metrics.csv"
    paths = sorted(tmp_path.glob("multirun/*/*/*/csv/*/metrics.csv"))
    for given in (
        str(pattern),
        paths,
        str(tmp_path / "multirun/*/*/*"),
        str(tmp_path / "**/metrics.csv"),
    ):
        frame = gl.stats.read_table(given)
        verdict = gl.verdict(frame, "val_loss", "optimizer", last="epoch", reference="adam")
        assert verdict.table.difference[0] == pytest.approx(EXPECTED)
    with pytest.raises(DataError, match="no file or folder matches this pattern"):
        gl.stats.read_table(tmp_path / "*.json")


def test_read_table_sorts_runs_naturally(tmp_path):
    runs = gl.stats.read_table(fill(tmp_path, lightning)).run.drop_duplicates().tolist()
    assert runs == [f"lightning_logs/version_{number}" for number in range(12)]


def test_read_table_leaves_out_by_name_what_cannot_be_read(tmp_path):
    fill(tmp_path, hydra)
    jobs = tmp_path / "multirun/2026-03-01/10-00-00"
    shutil.rmtree(jobs / "11/csv")
    (jobs / "10/csv/version_0/metrics.csv").write_text("")
    (jobs / "9/csv/version_0/metrics.csv").write_text("epoch,val_loss\n")
    (jobs / "3/csv/version_0/hparams.yaml").write_text("{a: [1, ")
    (jobs / "2/csv/version_0/hparams.yaml").write_bytes(b"a: \xff\xfe")
    (jobs / "1/csv/version_0/hparams.yaml").write_text("- a list\n")
    with pytest.warns(UserWarning, match="left out, because it cannot be read") as caught:
        frame = gl.stats.read_table(tmp_path)
    for name in ("10/csv", "9/csv", "3/csv", "2/csv", "1/csv"):
        assert name in str(caught[0].message)
    left_out = "Left out, because there is no table: multirun/2026-03-01/10-00-00/11."
    assert left_out in frame.attrs["notes"]
    verdict = gl.verdict(frame, "val_loss", "optimizer", last="epoch", reference="adam")
    assert "3 of 6 seeds" in str(verdict)
    assert "Missing: seeds 3, 4 and 5 with sgd." in str(verdict)


@pytest.mark.usefixtures("file_modes")
def test_read_table_names_folders_that_may_not_be_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed in range(3):
        write(tmp_path / f"logs/seed_{seed}/a/metrics.csv", "loss\n1\n")
    Path("logs/seed_1").chmod(0)
    Path("logs/seed_2").chmod(0o400)  # its files can be listed, but not opened
    reason = "cannot be read: Permission denied"
    one, both = [f"logs/seed_1: {reason}"], [f"logs/seed_1: {reason}", f"logs/seed_2: {reason}"]
    given = {
        "logs": one,
        "logs/*": both,
        "logs/*/*/metrics.csv": both,
        "logs/**/metrics.csv": both,
    }
    try:
        for name, expected in given.items():
            with pytest.warns(UserWarning, match="left out, because it cannot be read") as caught:
                frame = gl.stats.read_table(name)
            assert frame.seed.tolist() == [0]
            for error in expected:
                assert error in str(caught[0].message)
                assert error in " ".join(frame.attrs["notes"])
        with pytest.raises(DataError, match=f"^logs/seed_1: {reason}$"):
            gl.stats.read_table("logs/seed_1/*/metrics.csv")
        with pytest.raises(DataError, match=f"^logs/seed_1: {reason}$"):
            gl.stats.read_table("logs/seed_1")
    finally:
        for seed in (1, 2):
            Path(f"logs/seed_{seed}").chmod(0o700)


def test_read_table_keeps_two_versions_of_one_run_apart(tmp_path):
    fill(tmp_path, hydra)
    job = tmp_path / "multirun/2026-03-01/10-00-00/2"
    write(job / "csv/version_1/metrics.csv", metrics("adam", 2, epochs=2))
    with pytest.raises(
        gl.UsageError,
        match=r"optimizer adam seed 2 has 2 runs.*version_0.*version_1.*keep the rows of",
    ):
        gl.verdict(gl.stats.read_table(tmp_path), "val_loss", "optimizer", last="epoch")


def test_read_table_refuses_folders_without_common_tables_in_one_line(tmp_path):
    with pytest.raises(
        DataError,
        match=r"neither gpulab runs nor tables; expected files such as metrics\.csv",
    ):
        gl.stats.read_table(tmp_path)
    for number in range(2):
        write(tmp_path / str(number) / "a.csv", "x\n1\n")
        write(tmp_path / str(number) / "b.csv", "x\n1\n")
    with pytest.raises(
        DataError, match=r"different names \(2 a.csv, 2 b.csv\); give a pattern such as "
    ):
        gl.stats.read_table(tmp_path)
    assert len(gl.stats.read_table(tmp_path / "*" / "a.csv")) == 2


def test_read_table_renames_a_setting_that_means_something_to_a_verdict(tmp_path):
    fill(tmp_path, lightning)
    for number in range(12):
        write(
            tmp_path / f"lightning_logs/version_{number}/hparams.yaml",
            f"weights: w{number}\nstatus: new\nepoch: 6\n",
        )
    frame = gl.stats.read_table(tmp_path)
    assert {"config.weights", "config.status", "config.epoch"} <= set(frame)
    assert "weights" not in frame


def test_read_table_says_which_of_two_files_a_setting_is_from_if_they_differ(tmp_path):
    for run in range(3):
        write(tmp_path / f"{run}/metrics.csv", "loss\n1\n")
        write(tmp_path / f"{run}/hparams.yaml", f"seed: {run + 1}\nrate: 0.1\nlayers: '2'\n")
        write(tmp_path / f"{run}/config.yaml", f"seed: {run}\nrate: 1e-1\nlayers: 2\n")
    write(tmp_path / "config.yaml", "seed: 9\n")  # further away: this is not a contradiction
    frame = gl.stats.read_table(tmp_path)
    assert frame.seed.tolist() == [1, 2, 3]
    notes = [note for note in frame.attrs["notes"] if "used" in note]
    assert notes == [
        "seed is 1 in hparams.yaml and 0 in config.yaml (in 0 and in 2 more folders):"
        " hparams.yaml was used."
    ]


def test_read_table_without_pyyaml_says_that_gpulab_needs_it(tmp_path, monkeypatch):
    write(tmp_path / "0/metrics.csv", "loss\n1\n")
    monkeypatch.setitem(sys.modules, "yaml", None)  # as if it were not installed
    assert len(gl.stats.read_table(tmp_path)) == 1, "there is no configuration to read"
    write(tmp_path / "0/hparams.yaml", "seed: 1\n")
    needed = r"^yaml \(the package pyyaml\) is not installed, and gpulab needs it: pip install"
    with pytest.raises(gl.GpulabError, match=needed):
        gl.stats.read_table(tmp_path)
    (tmp_path / "0/hparams.yaml").unlink()
    (tmp_path / "0").rename(tmp_path / "rate=0.1")
    with pytest.raises(gl.GpulabError, match=needed):
        gl.stats.read_table(tmp_path)


# --- exports --------------------------------------------------------------------------------------


def test_read_table_reads_a_chart_of_weights_and_biases(tmp_path):
    columns = {"Step": range(6)}
    for optimizer, seed in RUNS:
        losses = pd.read_csv(io.StringIO(metrics(optimizer, seed))).val_loss.dropna().tolist()
        columns |= {
            f"{optimizer}-seed-{seed} - val/loss{bound}": losses for bound in ("", "__MIN", "__MAX")
        }
    pd.DataFrame(columns).to_csv(tmp_path / "chart.csv", index=False)
    frame = gl.stats.read_table(tmp_path / "chart.csv")
    assert list(frame) == ["Step", "run", "val/loss", "seed", "group"]
    assert frame.attrs["notes"] == (
        "12 runs were read from the columns of a chart.",
        "Left out: 24 columns with the lowest and highest values (__MIN, __MAX).",
        "From the names of the runs: seed, group.",
    )
    verdict = gl.verdict(frame, "val/loss", "group", last="Step", reference="adam")
    assert verdict.table.difference[0] == pytest.approx(EXPECTED)


def test_read_table_of_runs_of_weights_and_biases_says_how_they_ended(tmp_path):
    rows = "\n".join(
        f'"r{n}","{state}",{n % 3},{"ab"[n // 3]},{n}'
        for n, state in enumerate(["finished"] * 5 + ["crashed"])
    )
    (tmp_path / "runs.csv").write_text(f'"Name","State","seed","optimizer","loss"\n{rows}\n')
    frame = gl.stats.read_table(tmp_path / "runs.csv")
    assert frame.attrs["notes"] == ("The status of each run is from the column State.",)
    verdict = gl.verdict(frame, "loss", "optimizer")
    assert verdict.table.seeds.tolist() == [2]
    assert "did not finish: 1 (b 1 crashed)" in str(verdict)


# --- configuration files --------------------------------------------------------------------------


def test_read_settings_calls_nothing_for_tags_of_python(tmp_path):
    marker = tmp_path / "called"
    text = (
        f"a: !!python/object/apply:os.system ['touch {marker}']\n"
        "b: !!python/name:os.system\n"
        "c: !other {d: 1}\n"
    )
    write(tmp_path / "config.yaml", text)
    assert read_settings(tmp_path / "config.yaml") == {
        "a": f"['touch {marker}']",
        "b": "",
        "c.d": 1,
    }
    assert not marker.exists()


BOMBS = {
    "aliases in lists": "a0: &a0 [x, x]\n"
    + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)),
    "aliases in mappings": "a0: &a0 {x: {}}\n"
    + "".join(
        f"a{n}: &a{n} {{{', '.join(f'k{k}: *a{n - 1}' for k in range(10))}}}\n"
        for n in range(1, 12)
    ),
    "merged mappings": "a0: &a0 {x: 1}\n"
    + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 12)),
    "a loop": "a: &a {b: *a}\n",
    "deep lists": "a: " + "[" * 5000 + "]" * 5000,
    "too many": "\n".join(f"k{n}: 1" for n in range(MAX_SETTINGS + 1)),
    "too large": "a: " + "x" * (1 << 20),
}


@pytest.mark.parametrize("name", BOMBS)
def test_read_settings_refuses_or_shortens_a_file_that_expands_enormously(tmp_path, name):
    file = tmp_path / "config.yaml"
    file.write_text(BOMBS[name])
    if name == "aliases in lists":
        assert max(len(str(value)) for value in read_settings(file).values()) < 1 << 20
        return
    with pytest.raises(DataError, match=r"config.yaml: cannot be read") as error:
        read_settings(file)
    assert len(str(error.value)) < 500


def test_read_settings_reads_plain_values(tmp_path):
    write(
        tmp_path / "config.yaml",
        "a: 1e-3\nb: null\nc: on\nd: 2026-03-01\ne: 'text'\nf: {}\ng: ${a}\nh: ${oc.env:X}\n",
    )
    settings = read_settings(tmp_path / "config.yaml")
    expected = {
        "a": 0.001,
        "b": "null",
        "c": True,
        "d": "2026-03-01",
        "e": "text",
        "g": 0.001,
        "h": "${oc.env:X}",
    }
    assert settings == expected
    write(tmp_path / "empty.yaml", "")
    assert read_settings(tmp_path / "empty.yaml") == {}
    assert load_yaml("a: !!python/tuple [1, 2]") == {"a": [1, 2]}
