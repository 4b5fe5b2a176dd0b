import contextlib
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import pytest

import gpulab as gl
import gpulab.cli
from gpulab.passports import cpu_description
from gpulab.store import _run_store as stores
from gpulab.store import _tables as tables

SMOKE = ["train", "autoencoder", "--profile", "smoke", "--option", "frames=40"]


class Answer(NamedTuple):
    status: int
    out: str
    errors: str


@pytest.fixture
def answer(tmp_path, monkeypatch):
    """Run a command in an empty folder, in this process: loading torch takes longer than most
    commands.
    """
    monkeypatch.chdir(tmp_path)
    # commands replace `formatwarning`; this restores it afterwards
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["gpulab", *map(str, arguments)])
        out, errors, status = io.StringIO(), io.StringIO(), 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            try:
                gpulab.cli.main()
            except SystemExit as end:
                status = end.code or 0
        return Answer(status, out.getvalue(), errors.getvalue())

    return run


@pytest.fixture
def output(answer):
    """Run a command that succeeds, and return what it prints."""

    def run(*arguments):
        got = answer(*arguments)
        assert got.status == 0, got.errors
        return got.out

    return run


def test_cli_version_help_and_devices(output):
    assert output("--version") == f"gpulab {gl.__version__}\n"
    assert "[default: ($GPULAB_STORE or ./runs)]" in output("runs", "--help")
    text = output("devices")
    assert gl.passport()["software"]["python"] in text
    assert text.split("Settings that run here: ")[1].split() == gl.available_settings()


def test_train_command_keeps_a_run_that_runs_lists_and_does_not_train_again(output, tmp_path):
    train = [*SMOKE, "--seed", "3", "--setting", "cpu:threads=1"]
    first = output(*train)
    assert re.search(r"autoencoder under cpu:threads=1, seed 3: final loss 0\.\d+", first)
    assert output(*train) == first, "the same text, including the seconds: the stored run"
    (run,) = gl.runs(tmp_path / "runs").itertuples()
    assert f"stored in runs{os.sep}{run.id}" in first
    command = (
        "gpulab train autoencoder --profile smoke --setting cpu:threads=1 --seed 3 --option"
        " frames=40"
    )
    assert stores.read_run(Path(run.path)).record["command"] == command
    assert f"stored in other{os.sep}{run.id}" in output(*train, "--store", "other")
    assert output("runs", ".") == "no runs in .\n"
    assert re.search(r"1 runs\n.*cpu:threads=1", output("runs"), re.DOTALL)
    frame = pd.read_csv(io.StringIO(output("runs", "runs", "--csv")), float_precision="round_trip")
    assert list(frame.columns) == tables.RUN_COLUMNS
    assert (frame.weights.tolist(), frame.final_loss.tolist()) == ([run.weights], [run.final_loss])


def test_verdict_command_reads_a_table_from_elsewhere_and_draws_its_picture(answer, tmp_path):
    losses = [("cpu", 0.1), ("cuda", 0.6)]
    rows = [
        f"{seed},{device},{base + 0.01 * seed},FINISHED,a"
        for seed in range(8)
        for device, base in losses
    ]
    header = "seed,device,loss,status,model"
    (tmp_path / "runs.csv").write_text(
        "\n".join([header, *rows, "8,cpu,,KILLED,a", "0,cpu,0.3,FINISHED,b"])
    )
    options = ["verdict", "runs.csv", "--metric", "loss", "--factor", "device"]
    first = answer(*options, "--margin", "0.05", "--where", "model=a", "--picture", "seeds.png")
    headline = first.out.partition("\n")[0]
    assert headline.startswith("cuda against cpu, 8 seeds: different")
    assert "4.7 times" in headline
    assert "1 (cpu 1 killed)" in first.out
    assert (tmp_path / "seeds.png").read_bytes().startswith(b"\x89PNG")
    other = answer(
        *options, "--margin", "1%", "--where", "model=a", "--reference", "cuda", "--alpha", "0.005"
    )
    assert "cpu against cuda, 8 seeds: inconclusive" in other.out
    missing = answer("verdict", "no.csv")
    assert (missing.status, "no.csv" in missing.errors) == (1, True)


def test_verdict_command_says_of_a_folder_of_logs_what_the_api_says(answer, tmp_path):
    for number in range(12):
        run = tmp_path / "logs" / f"version_{number}"
        run.mkdir(parents=True)
        seed, amp = divmod(number, 2)
        (run / "hparams.yaml").write_text(f"seed: {seed}\namp: {bool(amp)}\n")
        rows = [
            f"{epoch},,{1 / (epoch + 1) + 0.01 * seed + 0.1 * amp}\n{epoch},0.5,"
            for epoch in range(4)
        ]
        (run / "metrics.csv").write_text("\n".join(["epoch,train_loss,val_loss", *rows]))
    command = ["verdict", "logs", "--metric", "val_loss", "--factor", "amp"]
    refused = answer(*command)
    assert (refused.status, refused.errors.count("\n")) == (2, 1)
    assert "last='epoch' (--last epoch)" in refused.errors
    assert "the best with" in refused.errors
    found = answer(*command, "--last", "epoch", "--html", "pages/verdict.html")
    frame = gl.stats.read_table("logs")
    assert (
        found.out == f"{gl.verdict(frame, 'val_loss', 'amp', last='epoch')}\n"
        "report written to pages/verdict.html\n"
    )
    page = (tmp_path / "pages" / "verdict.html").read_text(encoding="utf-8")
    assert "<title>Verdict on val loss: amp=True against amp=False</title>" in page
    assert (
        str(gl.verdict(frame, "val_loss", "amp", best="val_loss"))
        in answer(*command, "--best", "val_loss").out
    )
    paths = [str(path) for path in sorted((tmp_path / "logs").glob("*/metrics.csv"))]
    assert answer("verdict", *paths, *command[2:], "--last", "epoch").out.startswith(
        found.out.partition("\n")[0]
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    refused = answer("verdict", "empty")
    assert (refused.status, "empty: " in refused.errors, refused.out) == (1, True, "")


@pytest.mark.parametrize(
    "command", [["runs", "locked"], ["verdict", "locked"], ["verdict", "locked/runs.csv"]]
)
def test_cli_reports_a_folder_that_may_not_be_read_in_one_line(
    answer, tmp_path, monkeypatch, command
):
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked" / "runs.csv").touch()
    real = {name: getattr(os, name) for name in ("listdir", "scandir", "stat")}

    def refused(name):
        def call(path=".", *args, **options):
            if "locked" in str(path) and not (name == "stat" and str(path).endswith("locked")):
                raise PermissionError(13, "Permission denied", str(path))
            return real[name](path, *args, **options)

        return call

    for name in real:  # removing permissions is not enough: root may read everything
        monkeypatch.setattr(os, name, refused(name))
    found = answer(*command)
    assert found.status == 1
    assert found.errors == f"gpulab: {command[1]}: cannot be read: Permission denied\n"


@pytest.mark.usefixtures("file_modes")
def test_cli_names_runs_that_may_not_be_read_and_shows_the_others(answer, tmp_path):
    for seed in range(3):
        assert answer(*SMOKE, "--seed", seed).status == 0
    paths = [Path(path) for path in gl.runs(tmp_path / "runs").path]
    (tmp_path / "parent" / "store").mkdir(parents=True)
    forbidden = [paths[1], paths[2] / "run.json", tmp_path / "parent" / "store"]
    for path in forbidden:
        path.chmod(0)
    skipped = r"cannot be read \(permission denied\): "
    names = f"runs/{paths[1].name}; runs/{paths[2].name}/run.json$"
    try:
        with pytest.warns(UserWarning, match=f"^2 folder.* {skipped}{names}"):
            listed = answer("runs", "runs")
        with pytest.warns(UserWarning, match=f"^2 folder.* {skipped}{names}"):
            compared = answer("verdict", "runs", "--factor", "machine")
        with pytest.warns(UserWarning, match=f"^1 folder.* {skipped}parent/store$"):
            empty = answer("runs", "parent")
        refused = answer("verdict", "parent")
    finally:
        for path in forbidden:
            path.chmod(0o700)
    assert listed.out.startswith("1 runs\n")
    assert "2 folder(s) or file(s) in the store cannot be read" in compared.out
    assert empty.out == "no runs in parent\n"
    assert refused.errors == "gpulab: parent/store: cannot be read: Permission denied\n"


def test_runs_command_lists_recorded_runs_as_csv(output):
    table = pd.read_csv(io.StringIO(output("runs", "--recorded", "--csv")))
    assert (table.recorded.all(), len(table)) == (True, len(gl.recorded_runs()))


def test_experiment_command_runs_compares_lists_and_packs(output, tmp_path):
    text = output(
        "experiment", *SMOKE[1:], "--seeds", "2", "--setting", "cpu", "--setting", "cpu:threads=1"
    )
    frame = gl.runs(tmp_path / "runs")
    assert [*zip(frame.setting, frame.seed, strict=True)] == [
        *itertools.product(["cpu", "cpu:threads=1"], [0, 1])
    ]
    assert "4 runs" in text
    assert str(gl.verdict(frame)) in text
    gl.store.pack(tmp_path / "runs", tmp_path / "packed.parquet")
    of_store = output("verdict", "runs")
    assert "cpu:threads=1 against cpu, 2 seeds" in of_store
    assert output("verdict", "packed.parquet") == of_store
    output(*SMOKE, "--option", "loader=reused")
    assert "loader" in output("runs"), "the list shows the columns in which runs differ"
    some = output("runs", "--where", "loader=reused", "--where", "seed=0")
    assert ("1 runs" in some, "loader" in some) == (True, False)


def test_experiment_command_passes_options_to_the_network_and_its_record(answer, tmp_path):
    experiment = [
        "experiment",
        "whitener",
        "--profile",
        "smoke",
        "--seeds",
        "1",
        "--setting",
        "cpu:threads=1",
    ]
    assert answer(*experiment, "--option", "covariance=centred", "--option", "code=20").status == 0
    (run,) = gl.runs(tmp_path / "runs").itertuples()
    record = stores.read_run(Path(run.path)).record
    assert (run.covariance, record["configuration"]["model_options"]["code"]) == ("centred", 20)
    assert record["command"].endswith("--option covariance=centred --option code=20")
    assert answer(*experiment, "--option", "=centred").status == 2


@pytest.mark.slow("starts a process that loads torch")
@pytest.mark.skipif(
    "avx512f" not in cpu_description()["flags"],
    reason="restricting instructions to AVX2 has a visible effect only on an AVX-512 CPU",
)
def test_train_command_with_an_older_instruction_set(tmp_path):
    command = [sys.executable, "-m", "gpulab", *SMOKE, "--setting", "cpu:isa=avx2"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120)
    record = stores.read_run(Path(gl.runs(tmp_path / "runs").path[0])).record
    assert record["arithmetic"]["cpu_capability"] == "AVX2"


# --- a step ---------------------------------------------------------------------------------------

STEPS = """
import torch
import torch.nn as nn
import gpulab

torch.manual_seed(0)
step = gpulab.Step(nn.Linear(4, 2), torch.ones(3, 4))
other = gpulab.Step(nn.LSTM(4, 2), torch.ones(3, 4))


def short(setting):
    x = torch.linspace(0.1, 1, 20, dtype=setting.dtype).view(4, 5).requires_grad_()
    loss = (x @ x.T).square().sum()
    loss.backward()
    return loss.detach()


def wrong(setting):
    x = torch.ones(3, 4, dtype=setting.dtype, requires_grad=True)
    buffer = torch.zeros(3, 4, dtype=setting.dtype)
    loss = (x * buffer).sum()
    buffer.data.add_(1)
    loss.backward()
"""


@pytest.fixture
def my_steps(tmp_path):
    (tmp_path / "my_steps.py").write_text(STEPS)
    (tmp_path / "no.trace").write_text("not a trace")
    return tmp_path


def test_record_and_audit_commands_exchange_traces(my_steps, answer, output):
    kept = answer("record", "my_steps.py:step", "step-cpu.trace")
    assert ("step-cpu.trace" in kept.out, kept.errors) == (True, ""), "a pipe shows no bar"
    output("record", "my_steps:step", "deep/b.trace", "--setting", "cpu:threads=1")
    assert "identical" in output("audit", "step-cpu.trace", "deep/b.trace")
    output("record", "my_steps.py:other", "other.trace")
    output("record", "my_steps.py:wrong", "wrong.trace")
    found = answer("audit", "wrong.trace", "wrong.trace", "--html", "pages/wrong.html")
    assert (found.status, "pages/wrong.html" in found.out) == (1, True)
    page = (my_steps / "pages" / "wrong.html").read_text(encoding="utf-8")
    assert "overwritten" in page
    assert "data:image/png;base64," in page
    for wrong, status, words in (
        ("audit step-cpu.trace no.trace", 2, "no.trace: not a trace"),
        (
            "audit my_steps.py:short cpu cpu:threads=1 cuda",
            2,
            "two traces, or a step and two settings; got my_steps",
        ),
        ("record my_steps.py:step x.trace --setting cuda:77", 1, "cuda:77"),
    ):
        got = answer(*wrong.split())
        assert (got.status, words in got.errors) == (status, True), wrong


@pytest.mark.usefixtures("my_steps")
def test_audit_command_of_a_step_prints_for_people_programs_and_an_issue(answer):
    compared = ("audit", "my_steps.py:short", "cpu", "cpu:emulate=tf32")
    line = STEPS.splitlines().index("    loss = (x @ x.T).square().sum()") + 1
    text = answer(*compared).out
    assert "3 × reduced precision" in text
    assert f"my_steps.py:{line}" in text
    said = json.loads(answer(*compared, "--json").out)
    assert set(said) == {
        "format",
        "headline",
        "kind",
        "faulty",
        "settings",
        "passports",
        "findings",
    }
    assert (said["kind"], said["faulty"]) == ("reduced precision", False)
    failed = answer(*compared, "--fail-on", "reduced precision", "--markdown")
    assert failed.status == 1
    assert failed.out.startswith(said["headline"])
    assert "- cpu:emulate=tf32: " in failed.out
    refused = answer(*compared, "--fail-on", "low precision")
    assert (refused.status, "'low precision'" in refused.errors) == (2, True)


# --- errors ---------------------------------------------------------------------------------------

USAGE = """
fly
train
train prednet --colour red
train prednet --seed -1
train prednet --option frames=many
train resnet
train prednet --data-option seed
experiment prednet
experiment prednet --setting cpu --seeds some
runs one another
"""
FAILURES = {  # a command that fails, and what its message has to name
    "train prednet --profile smoke --setting cuda:77": "cuda:77",
    "train prednet --profile smoke --option data=video:missing.mp4": "missing",
    "runs missing": "missing",
    "train autoencoder --profile smoke --option frames=20 --store a-file/b": "a-file",
}


@pytest.mark.parametrize("command", USAGE.strip().splitlines())
def test_cli_ends_with_status_2_for_an_invalid_command(command, answer):
    got = answer(*command.split())
    assert (got.status, got.out) == (2, "")
    assert got.errors.strip()


@pytest.mark.parametrize("command", FAILURES)
def test_cli_ends_with_status_1_and_one_line_for_a_command_that_fails(command, answer, tmp_path):
    (tmp_path / "a-file").write_text("not a folder")
    got = answer(*command.split())
    assert (got.status, got.out) == (1, "")
    # the progress bar is not a message
    lines = [line for line in got.errors.splitlines() if "frame/s" not in line]
    assert lines[-1].startswith("gpulab: ")
    assert FAILURES[command] in lines[-1]


# --- a custom training function -------------------------------------------------------------------

OWN = """
import torch


def train(seed, setting, width=4, learning_rate=0.1):
    print(seed, file=open("calls", "a"))
    net = torch.nn.Linear(width, 1)
    loss = net(torch.ones(1, width)).square().mean()
    return {"loss": loss.item(), "size": width * learning_rate}
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return [
        "experiment",
        "own.py:train",
        "--option",
        "width=8",
        "--setting",
        "cpu:threads=1",
        "--workers",
        "1",
    ]


@pytest.mark.slow("runs six experiments, each in separate processes")
def test_experiment_command_runs_compares_and_lists_a_custom_training(
    own, answer, output, tmp_path
):
    two_settings = [*own, "--seeds", "2", "--setting", "cpu:threads=2", "--metric", "loss"]
    assert "cpu:threads=2 against cpu:threads=1, 2 seeds: equivalent" in output(*two_settings)
    one = output("train", "own.py:train", "--seed", "1", "--option", "learning_rate=0.5")
    assert re.search(r"own\.py:train under cpu, seed 1: loss [\d.]+, size 2, ", one)
    assert re.search("5 runs.*learning_rate.*size", output("runs"), re.DOTALL)
    ((record, _),) = tables.read_histories(gl.runs(tmp_path / "runs").query("learning_rate == 0.5"))
    command = "gpulab train own.py:train --setting cpu --seed 1 --option learning_rate=0.5"
    assert record["command"] == command
    output(*own, "--seeds", "0,1", "--picture", "runs.png")
    assert len((tmp_path / "calls").read_text().splitlines()) == 5, (
        "stored runs are not trained again"
    )
    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")
    got = answer(*own, "--seeds", "1", "--option", "colour=3")
    assert (got.status, "no option 'colour'; it has width, learning_rate" in got.errors) == (
        2,
        True,
    )


METRICS = """
def train(seed, setting):
    print(seed, file=open("calls", "a"))
    return {"val_loss": 1 + seed / 10, "accuracy": 0.5}


def one(seed, setting):
    return {"accuracy": 0.5 + seed / 10}
"""
CHOICES = (
    "metrics.py:train returned several metrics: val_loss, accuracy; choose one with --metric, such"
    " as --metric val_loss; stored runs are not trained again"
)


def test_experiment_command_refuses_an_unknown_metric_before_training_if_it_can(answer, tmp_path):
    (tmp_path / "metrics.py").write_text(METRICS)
    assert answer("train", "metrics.py:train").status == 0
    experiment = ["experiment", "metrics.py:train", "--setting", "cpu", "--seeds"]
    got = answer(*experiment, "5")
    assert (got.status, got.out, got.errors) == (2, "", f"gpulab: {CHOICES}\n")
    got = answer(*experiment, "5", "--metric", "acuracy")
    assert (got.status, got.out) == (2, "")
    for named in ("--metric acuracy", "no such metric", "val_loss, accuracy"):
        assert named in got.errors
    assert (tmp_path / "calls").read_text() == "0\n", "no other run was trained"
    chosen = answer(*experiment, "1", "--metric", "accuracy")
    assert chosen.status == 0, chosen.errors
    network = answer("experiment", *SMOKE[1:], "--setting", "cpu", "--metric", "acuracy")
    assert (network.status, "expected one of final_loss, heldout_loss" in network.errors) == (
        2,
        True,
    )
    assert len(gl.runs(tmp_path / "runs")) == 1


def test_experiment_command_compares_the_only_metric_of_a_function(answer, tmp_path):
    (tmp_path / "metrics.py").write_text(METRICS)
    settings = ["--setting", "cpu", "--setting", "cpu:threads=1"]
    for seed, setting in itertools.product((0, 1), settings[1::2]):
        assert answer("train", "metrics.py:one", "--seed", seed, "--setting", setting).status == 0
    got = answer("experiment", "metrics.py:one", *settings, "--seeds", "2")
    assert got.status == 0, got.errors
    assert "comparing accuracy, the only metric that metrics.py:one returned" in got.errors
    assert "every seed has exactly the same accuracy" in got.out


@pytest.mark.slow("starts processes that load torch")
def test_experiment_command_names_the_metrics_after_training_and_keeps_the_runs(answer, tmp_path):
    (tmp_path / "metrics.py").write_text(METRICS)
    experiment = ["experiment", "metrics.py:train", "--setting", "cpu", "--seeds", "2"]
    got = answer(*experiment)
    assert (got.status, got.out.startswith("2 runs")) == (2, True)
    assert got.errors.endswith(f"gpulab: {CHOICES}\n")
    assert answer(*experiment, "--metric", "val_loss").status == 0
    assert sorted((tmp_path / "calls").read_text().split()) == ["0", "1"]


# --- names ----------------------------------------------------------------------------------------


def test_cli_names_a_file_that_cannot_be_written_before_the_work(answer, tmp_path):
    (tmp_path / "a-file").write_text("")
    long, experiment = "x" * 300, ["experiment", *SMOKE[1:], "--setting", "cpu", "--picture"]
    for words, arguments in {
        "a-file/a.png: cannot be written: Not a directory; name another": [
            *experiment,
            "a-file/a.png",
        ],
        f"{long}: cannot be written: File name too long; name another": [*experiment, long],
        f"{long}: cannot be read: File name too long": ["runs", long],
    }.items():
        got = answer(*arguments)
        assert (got.status, len(got.errors.splitlines())) == (1, 1)
        assert words in got.errors
    assert [file.name for file in tmp_path.iterdir()] == ["a-file"]


def test_cli_refuses_a_store_whose_name_is_not_utf8(answer):
    got = answer(*SMOKE, "--store", "runs\udcff")
    assert (got.status, "this name is not valid UTF-8" in got.errors) == (2, True)


def test_cli_interrupted_command_ends_with_status_130_and_says_how_to_go_on(answer, tmp_path):
    (tmp_path / "own.py").write_text("def train(seed):\n    raise KeyboardInterrupt\n")
    got = answer("train", "own.py:train")
    assert (got.status, "interrupted; run the same command again" in got.errors) == (130, True)


INTERRUPTION_SWALLOWED = """\
import signal

try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    pass

def train(seed):
    return 1.0
"""
INTERRUPTION_TURNED_INTO_ANOTHER_ERROR = """\
import signal

try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    raise ImportError('cannot load module more than once per process') from None
"""
INTERRUPTED_IMPORTS = {
    "a library of the command line": (
        "typer.py",
        "import signal\nsignal.raise_signal(signal.SIGINT)\n",
        "--help",
    ),
    "an extension that swallows it": (
        "own.py",
        INTERRUPTION_SWALLOWED,
        "train own:train",
    ),
    "an extension that turns it into a different error": (
        "own.py",
        INTERRUPTION_TURNED_INTO_ANOTHER_ERROR,
        "train own:train",
    ),
    "code that is executed from a string": (
        "typer.py",
        "exec('raise KeyboardInterrupt')\n",
        "--help",
    ),
}


@contextlib.contextmanager
def interruptions_not_ignored():
    """Let processes that are started inside receive SIGINT.

    A shell starts a program in the background, such as these tests, with SIGINT ignored, and a
    process inherits that from the one that starts it.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("kind", INTERRUPTED_IMPORTS)
def test_cli_interrupted_import_ends_in_one_line_with_status_130(kind, tmp_path):
    file, code, command = INTERRUPTED_IMPORTS[kind]
    (tmp_path / file).write_text(code)
    words = [sys.executable, "-m", "gpulab", *command.split()]
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path}
    with interruptions_not_ignored():
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("gpulab: interrupted")
    assert "run the same command again" in line
