import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

import gpulab as gl
from gpulab.options import how_to_train
from gpulab.settings import cpu_flags
from gpulab.store import listing as stores
from gpulab.store import run_files
from gpulab.training.workers import may_share

COMMAND = [sys.executable, "-m", "gpulab"]
SMOKE = ["train", "autoencoder", "--profile", "smoke", "--frames", "40"]


# Loading torch takes longer than most commands take: one process can run many of them, one by one.
ONE_BY_ONE = """
import contextlib, io, json, os, sys, traceback
import gpulab.cli

os.chdir(sys.argv[1])
for arguments in json.loads(os.environ["ARGUMENTS"]):
    sys.argv = ["gpulab", *map(str, arguments)]
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            gpulab.cli.main()
            status = 0
        except SystemExit as end:
            status = end.code or 0
        except BaseException:
            status = traceback.format_exc().splitlines()[-1]
    print(json.dumps([status, out.getvalue(), errors.getvalue()]), flush=True)
"""


def answers_of(python, folder, commands, code=ONE_BY_ONE, columns="200"):
    """The (status, output, errors) of each of several commands, all run in one process in a folder."""
    done = python(code, folder, ARGUMENTS=json.dumps([*commands]), COLUMNS=columns).stdout
    return [json.loads(line) for line in done.splitlines()]


@pytest.fixture
def session(python, tmp_path):
    """Run commands in an empty folder, all in one process, and give what each printed."""

    def run(*commands):
        answers = answers_of(python, tmp_path, commands)
        assert [(status, errors) for status, _, errors in answers if status] == []
        return [out for _, out, _ in answers]

    return run


def test_the_version_is_told_and_help_says_what_holds_where_nothing_is_said(session):
    version, listing, comparing = session(["--version"], ["runs", "--help"], ["experiment", "--help"])
    assert version == f"gpulab {gl.__version__}\n"
    assert "[default: ($GPULAB_STORE or ./runs)]" in listing
    assert "[default: (final_loss, or the first)]" in comparing


def test_what_is_not_asked_for_does_not_keep_runs_from_sharing_a_gpu():
    how = how_to_train(fresh=False, checkpoint_seconds=None, guard=False, registered=None)
    assert may_share({"net": "prednet", "setting": "cuda:tf32=off", **how})
    assert not may_share({"net": "prednet", "setting": "cuda:tf32=off", **how | {"guard": True}})


def test_devices_shows_the_passport_and_the_settings_that_run_here(session):
    document, text = session(["devices", "--json"], ["devices"])
    assert json.loads(document) == gl.passport()
    assert gl.passport()["software"]["python"] in text
    assert text.split("Settings that run here: ")[1].split() == gl.available_settings()


def test_a_run_is_trained_kept_listed_and_not_trained_again(session, tmp_path):
    train = [*SMOKE, "--seed", "3", "--setting", "cpu:threads=1"]
    first, again, other, listed, named, table = session(
        train,
        train,
        [*train, "--fresh", "--store", "other"],
        ["runs"],
        ["runs", "--store", "runs"],
        ["runs", "runs", "--csv"],
    )
    assert named == listed
    assert re.search(r"autoencoder under cpu:threads=1, seed 3: final loss 0\.\d+", first)
    assert again == first, "down to the seconds: it is the run that was there"
    (run,) = gl.runs(tmp_path / "runs").itertuples()
    assert f"kept in runs{os.sep}{run.id}" in first
    record = run_files.read_record(Path(run.path))
    assert record["command"] == "gpulab train autoencoder --profile smoke --setting cpu:threads=1 --seed 3 --frames 40"
    assert record["arithmetic"]["threads"] == 1
    assert f"kept in other{os.sep}{run.id}" in other
    assert gl.runs(tmp_path / "other").weights.tolist() == [run.weights]
    assert "1 runs" in listed
    assert "cpu:threads=1" in listed
    frame = pd.read_csv(io.StringIO(table))
    assert list(frame.columns) == stores.COLUMNS
    assert repr(run.final_loss) in table
    assert frame.weights.tolist() == [run.weights]


def test_a_table_from_elsewhere_gets_its_verdict_and_picture(python, tmp_path):
    losses = [("cpu", 0.1), ("cuda", 0.6)]
    rows = [f"{seed},{device},{base + 0.01 * seed},FINISHED,a" for seed in range(8) for device, base in losses]
    header = "params.seed,params.device,metrics.loss,status,params.model"
    (tmp_path / "runs.csv").write_text("\n".join([header, *rows, "8,cpu,,KILLED,a", "0,cpu,0.3,FINISHED,b"]))
    options = ["verdict", "runs.csv", "--metric", "loss", "--factor", "device", "--margin", "0.05"]
    commands = [
        [*options, "--where", "model=a", "--picture", "seeds.png"],
        [*options, "--where", "model=a", "--reference", "cuda", "--alpha", "0.005"],
        options,
        [*options, "--margin", "small"],
        ["verdict", "no.csv"],
        ["verdict", "runs.csv", "--metric", "lost"],
    ]
    answers = answers_of(python, tmp_path, commands)
    assert [status for status, _, _ in answers] == [0, 0, 2, 2, 1, 2]
    first, other, twice, small, missing, unknown = (out + errors for _, out, errors in answers)
    assert "cuda against cpu, 8 seeds: different; difference 0.5 [0.5, 0.5], p = 0.0078" in first
    assert "did not finish: 1 (cpu 1 killed)" in first
    assert (tmp_path / "seeds.png").read_bytes().startswith(b"\x89PNG")
    assert "cpu against cuda, 8 seeds: inconclusive" in other
    assert "device 'cpu' seed 0 was run more than once" in twice
    assert "margin 'small': expected a number above 0" in small
    assert "no.csv" in missing
    assert "no column 'lost'; there are params.seed, params.device, metrics.loss" in unknown
    assert "name its columns by metric=, factor= and block= (--metric, --factor and --block)" in unknown


def test_runs_are_listed_with_what_differs_and_a_store_or_packed_runs_get_their_verdict(session):
    trained = [
        [*SMOKE, "--seed", str(seed), "--setting", setting] for seed in (0, 1) for setting in ("cpu", "cpu:threads=1")
    ]
    *_, of_store, of_file, _, every, some = session(
        *trained,
        ["pack", "runs", "packed.parquet"],
        ["verdict", "runs"],
        ["verdict", "packed.parquet"],
        [*SMOKE, "--loader", "reused"],
        ["runs"],
        ["runs", "--where", "loader=reused", "--where", "seed=0"],
    )
    assert "cpu:threads=1 against cpu, 2 seeds" in of_store
    assert of_file == of_store
    assert ["loader" in text for text in (every, some)] == [True, False]
    assert "1 runs" in some


def test_an_experiment_is_run_compared_done_again_and_drawn(session, tmp_path):
    experiment = ["experiment", *SMOKE[1:], "--seeds", "2", "--setting", "cpu", "--setting", "cpu:threads=1"]
    (text,) = session(experiment)
    assert "4 runs" in text
    assert "cpu:threads=1 against cpu, 2 seeds" in text
    frame = gl.runs(tmp_path / "runs")
    assert [*zip(frame.setting, frame.seed, strict=True)] == [*itertools.product(["cpu", "cpu:threads=1"], [0, 1])]
    assert str(gl.verdict(frame)) in text
    command = run_files.read_record(Path(frame.path[3]))["command"]
    assert command == "gpulab train autoencoder --profile smoke --setting cpu:threads=1 --seed 1 --frames 40"
    (tmp_path / "own.py").write_text("def train(seed):\n    print(seed, file=open('calls', 'a'))\n    return 1.0\n")
    own = ["experiment", "own.py:train", "--seeds", "2", "--setting", "cpu:threads=1"]
    calls = []
    for more in ([], [], ["--fresh"], ["--guard"], ["--picture", "runs.png"]):
        session([*own, *more])
        calls.append(len((tmp_path / "calls").read_text().splitlines()))
    assert calls == [2, 2, 4, 6, 6]
    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")


def test_a_guard_ends_an_experiment_that_overwrites(python, tmp_path):
    experiment = ["experiment", "prednet", "--profile", "smoke", "--frames", 40, "--seeds", "1", "--setting", "cpu"]
    ((status, _, errors),) = answers_of(python, tmp_path, [[*experiment, "--loader", "reused", "--guard"]])
    assert status == 1
    assert "overwritten since it was saved" in errors


def test_the_smallest_change_is_searched_and_drawn(session, tmp_path):
    old = ["--profile", "smoke", "--frames", 40, "--seeds", 6]
    asked = ["autoencoder", "--profile", "smoke", "--target", "cpu:threads=1", "--workers", 2]
    asked += ["--setting", "cpu:threads=1,precision=bfloat16", "--search", "precision=float32,float64"]
    _, text, csv = session(
        ["experiment", "autoencoder", *old, "--setting", "cpu:threads=1"],
        ["reproduce", *asked, "--margin", "1e-6", "--picture", "found.png"],
        ["reproduce", *asked, "--margin", "1e-6", "--csv"],
    )
    assert "The smallest change found" in text
    assert "precision bfloat16 → float32 (distance 1; 2 tried)" in text
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
    table = pd.read_csv(io.StringIO(csv))
    assert table.confirmed.tolist() == [False, True]


def test_recorded_runs_are_listed_as_csv_and_nothing_of_the_current_folder_is_imported(tmp_path):
    (tmp_path / "queue.py").write_text("raise SystemExit('nothing that lies in the current folder is imported')")
    command = [*COMMAND, "runs", "--recorded", "--csv"]
    table = pd.read_csv(io.StringIO(subprocess.check_output(command, cwd=tmp_path, text=True)))
    assert table.recorded.all()
    assert len(table) == len(gl.recorded_runs())


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGTERM to be heard")
@pytest.mark.parametrize(("seeds", "status"), [("3", 0), ("1000", 143)], ids=["to its end", "until it is stopped"])
def test_an_experiment_whose_bar_nobody_reads_goes_on(tmp_path, seeds, status):
    size = ["--profile", "smoke", "--size", "8x12", "--channels", "3,4", "--frames", "400", "--workers", "2"]
    command = [*COMMAND, "experiment", "prednet", "--setting", "cpu:threads=1", "--seeds", seeds, *size]
    with open(tmp_path / "said", "w") as said:
        experiment = subprocess.Popen(command, cwd=tmp_path, stdout=said, stderr=subprocess.PIPE)
    try:
        assert experiment.stderr.read(1), "the bar is drawn"
        experiment.stderr.close()
        deadline = time.monotonic() + 300
        while status and not list(tmp_path.glob("runs/prednet-*")):
            assert experiment.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if status:
            experiment.terminate()
        assert experiment.wait(timeout=300) == status
    finally:
        experiment.kill()
    if not status:
        assert len(gl.runs(tmp_path / "runs")) == 3
        assert "3 runs" in (tmp_path / "said").read_text()


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(SMOKE, 0), (["runs", "--recorded", "--csv"], 0), (["runs", "no-such"], 1), (["train", "nonsense"], 2)],
)
def test_a_command_that_nobody_reads_keeps_its_exit_status(tmp_path, arguments, status):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([*COMMAND, *arguments], cwd=tmp_path, stdout=writing, stderr=writing, timeout=300)
    os.close(writing)
    assert done.returncode == status
    assert gl.runs(tmp_path / "runs").empty == (arguments != SMOKE)


@pytest.mark.skipif("avx512f" not in cpu_flags(), reason="running as AVX2 shows on an AVX-512 CPU only")
def test_an_instruction_set_can_be_chosen(tmp_path):
    subprocess.run([*COMMAND, *SMOKE, "--setting", "cpu:isa=avx2"], cwd=tmp_path, check=True, timeout=120)
    record = run_files.read_record(Path(gl.runs(tmp_path / "runs").path[0]))
    assert record["arithmetic"]["cpu_capability"] == "AVX2"


def hears_ctrl_c():
    """A process started by one that ignores SIGINT (a job in the background) would ignore it too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
def test_ctrl_c_saves_a_checkpoint_says_so_and_the_same_command_goes_on(tmp_path):
    size = ["--size", "8x12", "--channels", "3,4", "--frames", "2000"]
    command = [*COMMAND, "train", "prednet", "--profile", "smoke", *size, "--checkpoint-seconds", "0"]
    training = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=hears_ctrl_c)
    while not list(tmp_path.glob(f"runs/{run_files.WORK}/*.safetensors")):
        assert training.poll() is None, training.stderr.read()
        time.sleep(0.01)
    training.send_signal(signal.SIGINT)
    errors = training.communicate(timeout=60)[1]
    assert training.returncode == 130
    assert "interrupted; run the same command again to go on" in errors
    assert "Traceback" not in errors
    assert gl.runs(tmp_path / "runs").empty
    options = {"model_options": {"size": (8, 12), "channels": [3, 4]}, "data_options": {"size": (8, 12)}}
    run = gl.train("prednet", profile="smoke", frames=2000, store=tmp_path / "runs", progress=False, **options)
    assert 0 < run.record["resumed_at"] < 100


# A signal at a chosen moment: when a module is looked for, or the first time that a function is called.
AT_A_MOMENT = """
import os, signal, sys

moment = sys.argv.pop(1)
signal.signal(signal.SIGINT, signal.default_int_handler)


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == moment:
            os.kill(os.getpid(), signal.SIGINT)


def watch(frame, event, _):
    if event == "call" and frame.f_code.co_name == moment:
        sys.setprofile(None)
        os.kill(os.getpid(), signal.SIGINT)


sys.meta_path.insert(0, Finder())
from gpulab.__main__ import main

sys.setprofile(watch)
main()
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
@pytest.mark.parametrize("moment", ["typer", "pandas", "say_csv", "_shutdown"])
def test_ctrl_c_is_quiet_at_any_moment(python, moment):
    done = python(AT_A_MOMENT, moment, "runs", "--recorded", "--csv", check=False)
    assert done.returncode == 130
    assert done.stderr in ("", "gpulab: interrupted; run the same command again to go on\n")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_is_not_lost_in_a_finalizer_nor_said_twice(python, name, status):
    code = """
    import os, signal, sys
    from gpulab import signals

    class Odd:
        def __del__(self):
            os.kill(os.getpid(), number)
            print("heard")

    number = getattr(signal, sys.argv[1])
    signal.signal(number, signal.default_int_handler)
    with signals.Raising("interrupted"):
        if sys.argv[2] == "lost":
            Odd()
        os.kill(os.getpid(), number)
        print("went on")
    """
    for where, errors in (("lost", ""), ("work", "interrupted\n")):
        done = python(code, name, where, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (status, "", errors)


# --- a step ------------------------------------------------------------------------------------------------

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


COMPARED = {  # status, and words of its output or its errors
    "record my_steps.py:step": (0, "kept in step-cpu.trace"),
    "record my_steps:step --setting cpu:threads=1 --output deep/b.trace": (0, "kept in deep/b.trace"),
    "record my_steps.py:other --output other.trace": (0, "kept in other.trace"),
    "record my_steps.py:wrong --output wrong.trace": (0, "kept in wrong.trace"),
    "audit step-cpu.trace deep/b.trace --html pages/report.html": (0, "all is well: rounding alone"),
    "audit wrong.trace wrong.trace --html wrong.html": (1, "report in wrong.html"),
    "audit my_steps.py:short --setting cpu --setting cpu:emulate=tf32 --confirm": (0, "3 × reduced precision"),
    "audit step-cpu.trace other.trace": (1, "different steps"),
    "audit step-cpu.trace no.trace": (1, "no.trace: not a trace"),
    "audit missing.trace step-cpu.trace": (1, "missing.trace"),
    "audit my_steps.py:short --setting cpu": (2, "a step with --setting twice"),
    "audit step-cpu.trace": (2, "expected two traces"),
    "audit step-cpu.trace deep/b.trace --confirm": (2, "needs the step itself"),
    "record my_steps.py:nothing": (2, "no function or gpulab.Step named 'nothing'"),
    "record no_such_module:step": (2, "no_such_module cannot be imported"),
    "record my_steps.py": (2, "expected module:name or file.py:name"),
    "record my_steps.py:step --setting gpu": (2, "setting 'gpu'"),
    "record my_steps.py:step --setting cuda:77": (1, "cuda:77"),
}


@pytest.fixture(scope="module")
def compared(python, tmp_path_factory):
    """(status, output, errors) of these commands, all in one process, and their folder."""
    folder = tmp_path_factory.mktemp("steps")
    (folder / "my_steps.py").write_text(STEPS)
    (folder / "no.trace").write_text("not a trace")
    return folder, dict(zip(COMPARED, answers_of(python, folder, map(str.split, COMPARED)), strict=True))


@pytest.mark.parametrize("command", COMPARED)
def test_steps_are_recorded_and_compared(command, compared):
    status, words = COMPARED[command]
    got, out, errors = compared[1][command]
    assert got == status
    assert words in out + errors


def test_an_audit_says_where_and_writes_a_report(compared):
    folder, answers = compared
    assert gl.diagnostics.Trace.load(folder / "deep" / "b.trace").setting == "cpu:threads=1"
    page = (folder / "pages" / "report.html").read_text(encoding="utf-8")
    assert "data:image/png;base64," in page
    assert "cpu:threads=1" in page
    assert "overwritten" in (folder / "wrong.html").read_text(encoding="utf-8")
    text = next(out for command, (_, out, _) in answers.items() if command.endswith("emulate=tf32 --confirm"))
    line = STEPS.splitlines().index("    loss = (x @ x.T).square().sum()") + 1
    assert f"my_steps.py:{line}" in text
    assert "100% of the difference in the loss goes" in text


# --- errors ------------------------------------------------------------------------------------------------

SEARCH = "reproduce prednet --target cpu --setting cpu:threads=1 --search"
USAGE = [  # what makes no sense
    "fly",
    "train",
    "train prednet --colour red",
    "train prednet --seed -1",
    "train prednet --frames many",
    "train prednet --setting gpu",
    "train resnet",
    "train prednet --profile huge",
    "train prednet --profile smoke --data imagenet",
    "train prednet --size 24",
    "train prednet --channels a,b",
    "train autoencoder --profile smoke --channels 3,4",
    "train prednet --profile smoke --learning-rate nan",
    "experiment prednet",
    "experiment prednet --setting gpu",
    "experiment prednet --setting cpu --seeds some",
    "experiment prednet --setting cpu --seeds 0",
    "experiment prednet --setting cpu --reruns 0",
    "experiment prednet --profile smoke --setting cpu --frames=0",
    f"{SEARCH} learning_rate=0.1",
    f"{SEARCH} learning_rate",
    "runs one --store another",
]
FAILURES = {  # what cannot be done, and what is named
    "train prednet --profile smoke --setting cuda:77": "cuda:77",
    "train prednet --profile smoke --data video:missing.mp4": "missing",
    "runs missing": "missing",
    "pack missing packed.parquet": "missing",
    "train autoencoder --profile smoke --frames 20 --store a-file": "a-file",
    "train autoencoder --profile smoke --frames 20 --store a-file/b": "a-file",
}


@pytest.fixture(scope="module")
def outcomes(python, tmp_path_factory):
    folder = tmp_path_factory.mktemp("errors")
    (folder / "a-file").write_text("not a folder")
    commands = [*USAGE, *FAILURES]
    return dict(zip(commands, answers_of(python, folder, map(str.split, commands)), strict=True))


@pytest.mark.parametrize("command", USAGE)
def test_a_command_that_makes_no_sense_ends_with_status_2(outcomes, command):
    status, out, errors = outcomes[command]
    assert (status, out) == (2, "")
    assert errors.strip()


@pytest.mark.parametrize("command", FAILURES)
def test_what_cannot_be_done_ends_with_status_1_and_one_line(outcomes, command):
    status, out, errors = outcomes[command]
    assert (status, out) == (1, "")
    lines = [line for line in errors.splitlines() if "frame/s" not in line]  # a progress bar is no message
    assert lines[-1].startswith("gpulab: ")
    assert FAILURES[command] in lines[-1]


def test_options_of_a_network_reach_it_and_its_record(python, tmp_path):
    experiment = ["experiment", "whitener", "--profile", "smoke", "--seeds", "1", "--setting", "cpu:threads=1"]
    wrong = ["covariance", "=centred", "covariance=diagonal"]
    commands = [[*experiment, "--option", "covariance=centred", "--option", "code=20"]]
    commands += [[*experiment, "--option", option] for option in wrong]
    answers = answers_of(python, tmp_path, commands)
    assert [status for status, _, _ in answers] == [0, 2, 2, 2]
    (run,) = gl.runs(tmp_path / "runs").itertuples()
    assert run.covariance == "centred"
    record = run_files.read_record(Path(run.path))
    assert record["configuration"]["model_options"]["code"] == 20
    assert record["command"].endswith("--option covariance=centred --option code=20")
    for option, (_, _, errors) in zip(wrong, answers[1:], strict=True):
        assert option.rpartition("=")[2] in errors


# --- a training of one's own -------------------------------------------------------------------------------

OWN = """
import torch


def train(seed, setting, width=4, learning_rate=0.1):
    net = torch.nn.Linear(width, 1)
    loss = net(torch.ones(1, width)).square().mean()
    return {"loss": loss.item(), "size": width * learning_rate}
"""


WRONG_OWN = {
    "a metric that it has not": (["--metric", "accuracy"], "the runs have loss, size, final_loss"),
    "an option that it has not": (["--option", "colour=3"], "no option 'colour'; it has width, learning_rate"),
    "a flag that it has not": (["--flip", "3"], "no option 'flip'"),
    "an option of data": (["--data-option", "seed=3"], "--data-option seed"),
}


def test_a_training_of_ones_own_is_run_compared_listed_and_reproduced(python, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    experiment = ["experiment", "own.py:train", "--option", "width=8", "--setting", "cpu:threads=1"]
    search = ["reproduce", "own.py:train", "--target", "cpu:threads=1", "--search", "width=4", "--setting", "cpu"]
    commands = {
        "compared": [*experiment, "--seeds", "2", "--setting", "cpu:threads=2", "--metric", "loss"],
        "one": ["train", "own.py:train", "--seed", "1", "--learning-rate", "0.5"],
        "listed": ["runs"],
        "again": [*experiment, "--seeds", "0,1"],
        "few": search,
        "more": [*experiment, "--seeds", "8"],
        "found": search,
        **{name: [*experiment, "--seeds", "1", *options] for name, (options, _) in WRONG_OWN.items()},
    }
    answers = dict(zip(commands, answers_of(python, tmp_path, commands.values()), strict=True))
    wrong = {"few", *WRONG_OWN}
    assert {name: status for name, (status, _, _) in answers.items() if status} == dict.fromkeys(wrong, 2)
    said = {name: out + errors for name, (_, out, errors) in answers.items()}
    assert "cpu:threads=2 against cpu:threads=1, 2 seeds: equivalent" in said["compared"]
    assert re.search(r"own\.py:train under cpu, seed 1: loss [\d.]+, size 2, ", said["one"])
    for word in ("5 runs", "own.py:train", "learning_rate", "width", "size"):
        assert word in said["listed"]
    assert "2 runs" in said["again"]
    assert "at least 6 are needed" in said["few"]
    assert "Nothing need change" in said["found"]
    for name, (_, words) in WRONG_OWN.items():
        assert words in said[name]
    (row,) = (row for row in gl.runs(tmp_path / "runs").itertuples() if row.learning_rate == 0.5)
    assert (row.size, row.width) == (2.0, 4)
    assert (
        stores.record_of(row)["command"]
        == "gpulab train own.py:train --setting cpu --seed 1 --option learning_rate=0.5"
    )


# --- disks, names and terminals --------------------------------------------------------------------------------


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this operating system has no /dev/full")
@pytest.mark.parametrize("arguments", [["runs", "--recorded"], ["runs", "--recorded", "--csv"]])
def test_an_output_that_is_full_is_one_line(arguments):
    with open("/dev/full", "w") as full_one:
        done = subprocess.run([*COMMAND, *arguments], stdout=full_one, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("gpulab: standard output: cannot be written: the disk is full")
    assert len(done.stderr.splitlines()) == 1


def test_what_could_not_be_written_is_said_before_the_work(python, tmp_path):
    (tmp_path / "a-file").write_text("")
    long = "x" * 300
    commands = {
        "a-file/a.png: cannot be written: a part of its path is a file": [*SMOKE, "--picture", "a-file/a.png"],
        f"{long}: cannot be written: the name is too long": [*SMOKE, "--picture", long],
        f"gpulab: {long}: the name is too long": ["runs", long],
    }
    for words, (status, _, errors) in zip(commands, answers_of(python, tmp_path, commands.values()), strict=True):
        assert (status, len(errors.splitlines())) == (1, 1)
        assert words in errors
    assert [file.name for file in tmp_path.iterdir()] == ["a-file"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names themselves")
def test_a_name_that_is_not_utf8_is_refused_before_it_is_written_into_a_store(python, tmp_path):
    for name in ("own.py", "own\udcff.py", "table\udcff.csv"):
        (tmp_path / name).write_text("def train(seed, data=''):\n    return float(seed)\n")
    commands = [
        ["train", "own\udcff.py:train"],
        ["train", "own.py:train", "--option", "data=table\udcff.csv"],
        [*SMOKE, "--data", "frames:own\udcff.py"],
        ["experiment", "own.py:train", "--setting", "cpu", "--seeds", "2", "--store", "runs\udcff"],
    ]
    for status, _, errors in answers_of(python, tmp_path, commands):
        assert status == 2
        assert re.fullmatch(r"gpulab: \S*\\udcff\S*: this name is not UTF-8, .*\n", errors)
    assert not list(tmp_path.glob("runs*"))


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such names")
def test_names_are_shown_as_they_are_and_move_no_cursor(python, tmp_path):
    name = "[bold]\x1b[31m$red$.py"
    (tmp_path / name).write_text("def train(seed):\n    return {'[link=x]\\x07': float(seed)}\n")
    code = ONE_BY_ONE.replace("\nos.chdir", "\ngpulab.terminal.MOST_DRAWN = 1\nos.chdir", 1)
    train = ["train", f"{name}:train", "--seed"]
    commands = [[*train, "0"], ["runs"], [*train, "1"], ["runs"], ["runs", "--csv"]]
    answers = answers_of(python, tmp_path, commands, code, columns="300")
    assert [status for status, _, _ in answers] == [0] * len(commands)
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f]", "".join(out for _, out, _ in answers))
    assert not [errors for _, _, errors in answers if "\x1b[31m" in errors]
    drawn, aligned, csv = (answers[place][1] for place in (1, 3, 4))
    for listed in (drawn, aligned, csv):
        assert "[bold]\\x1b[31m$red$.py:train" in listed
        assert "[link=x]\\x07" in listed

    def cells(table):
        return [re.findall(r"[^\s│┃]+", line) for line in table.splitlines() if re.search("profile|cpu", line)]

    assert cells(drawn) == cells(aligned)[:2]
    assert len(cells(aligned)) == 3
