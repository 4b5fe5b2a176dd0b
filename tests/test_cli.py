import contextlib
import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

import gpulab as gl
from gpulab.settings import cpu_flags
from gpulab.training import folders
from gpulab.training import store as stores

COMMAND = [sys.executable, "-m", "gpulab"]
SMOKE = ["train", "autoencoder", "--profile", "smoke", "--frames", "40"]


@pytest.fixture
def cli(tmp_path):
    """Run the command line in an empty folder."""

    def run(*arguments, status=0, **environment):
        done = subprocess.run(
            [*COMMAND, *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "200", **environment},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == status, done.stderr
        assert "Traceback" not in done.stderr
        return done

    return run


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


def test_help_lists_every_command_and_says_what_holds_where_nothing_is_said(session):
    commands = ["devices", "train", "experiment", "reproduce", "verdict", "runs", "pack", "record", "audit"]
    commands.append("companion")
    text, version, *helps = session(["--help"], ["--version"], *([command, "--help"] for command in commands))
    assert version == f"gpulab {gl.__version__}\n"
    assert re.findall(rf"^\W*({'|'.join(commands)})\b", text, re.MULTILINE) == commands
    help_of = dict(zip(commands, helps, strict=True))
    assert [command for command in commands if command not in help_of[command]] == []
    assert "[default: ($GPULAB_STORE or ./runs)]" in help_of["runs"]
    assert "[default: (final_loss, or the first)]" in help_of["experiment"]


def test_an_experiment_takes_the_options_of_one_training():
    from typer.main import get_command

    from gpulab.cli import app

    one, many = (
        {option: parameter.help for parameter in get_command(app).commands[name].params for option in parameter.opts}
        for name in ("train", "experiment")
    )
    asked_otherwise = {"--seed", "--rerun"}  # --seeds, --reruns
    assert one.keys() - many.keys() == asked_otherwise
    of_several = {"--setting", "--picture"}
    assert [name for name in one.keys() - asked_otherwise - of_several if one[name] != many[name]] == []


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
    record = folders.read_record(Path(run.path))
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
    options = ["runs.csv", "--metric", "loss", "--factor", "device", "--margin", "0.05"]
    commands = [
        ["verdict", *options, "--where", "model=a", "--picture", "seeds.png"],
        ["verdict", *options, "--where", "model=a", "--reference", "cuda", "--alpha", "0.005"],
        ["verdict", *options],
        ["verdict", "no.csv"],
        ["verdict", "runs.csv", "--metric", "lost"],
    ]
    answers = answers_of(python, tmp_path, commands)
    assert [status for status, _, _ in answers] == [0, 0, 2, 1, 2]
    (first, other), (twice, missing, unknown) = [out for _, out, _ in answers[:2]], [said for *_, said in answers[2:]]
    assert "cuda against cpu, 8 seeds: different; difference 0.5 [0.5, 0.5], p = 0.0078" in first
    assert "did not finish: 1 (cpu 1 killed)" in first
    assert "picture in seeds.png" in first
    assert (tmp_path / "seeds.png").read_bytes().startswith(b"\x89PNG")
    assert "cpu against cuda, 8 seeds: inconclusive" in other
    assert "device 'cpu' seed 0 was run more than once" in twice
    assert missing == "gpulab: no.csv: no such file\n"
    assert "no column 'lost'; there are params.seed, params.device, metrics.loss" in unknown


def test_a_table_whose_columns_are_called_otherwise_is_told_which_there_are_and_how_to_name_them(python, tmp_path):
    rows = [f"{device},{number},0.{number}{device}" for number in range(6) for device in (1, 2)]
    (tmp_path / "runs.csv").write_text("\n".join(["device,run,loss", *rows]))
    options = [("--metric", "loss"), ("--factor", "device"), ("--block", "run")]
    commands = [["verdict", "runs.csv", *itertools.chain(*options[:some])] for some in range(4)]
    *refused, told = answers_of(python, tmp_path, commands)
    advice = "each row is a run: name its columns by metric=, factor= and block= (--metric, --factor and --block)"
    assert refused == [
        [2, "", f"gpulab: no column '{missing}'; there are device, run, loss; {advice}\n"]
        for missing in ("final_loss", "setting", "seed")
    ]
    assert "2 against 1, 6 runs" in told[1]


def test_a_store_and_packed_runs_get_their_verdict(session):
    trained = [
        [*SMOKE, "--seed", str(seed), "--setting", setting] for seed in (0, 1) for setting in ("cpu", "cpu:threads=1")
    ]
    *_, of_store, of_file = session(
        *trained, ["pack", "runs", "packed.parquet"], ["verdict", "runs"], ["verdict", "packed.parquet"]
    )
    assert "cpu:threads=1 against cpu, 2 seeds" in of_store
    assert of_file == of_store


def test_a_guarded_run_computes_the_same_and_a_list_has_a_column_for_what_differs(session, tmp_path):
    _, _, _, every, some = session(
        [*SMOKE, "--store", "plain"],
        [*SMOKE, "--store", "guarded", "--guard"],
        [*SMOKE, "--store", "guarded", "--loader", "reused"],
        ["runs", "guarded"],
        ["runs", "guarded", "--where", "loader=reused"],
    )
    plain, guarded = (gl.runs(tmp_path / name).query("loader == 'window'").iloc[0] for name in ("plain", "guarded"))
    assert (plain.id, plain.final_loss, plain.heldout_loss) == (guarded.id, guarded.final_loss, guarded.heldout_loss)
    assert ["loader" in text for text in (every, some)] == [True, False]


def test_a_fresh_run_ignores_a_checkpoint(session, tmp_path):
    def stop(*_):
        raise KeyboardInterrupt

    for folder in ("resumed", "fresh"):
        with pytest.raises(KeyboardInterrupt):
            gl.train("autoencoder", profile="smoke", frames=40, store=tmp_path / folder, progress=stop)
    session([*SMOKE, "--store", "resumed"], [*SMOKE, "--store", "fresh", "--fresh"])
    records = [folders.read_record(Path(gl.runs(tmp_path / folder).path[0])) for folder in ("resumed", "fresh")]
    assert [record.get("resumed_at") for record in records] == [1, None]
    runs = [gl.train("autoencoder", profile="smoke", frames=40, store=tmp_path / f) for f in ("resumed", "fresh")]
    assert ["resumed at frame 20" in repr(run) for run in runs] == [True, False]


def test_a_real_video_is_trained_on(cli, shared, tmp_path):
    video = shared / "video" / "road_camera.mp4"
    cli(
        *("train", "prednet", "--profile", "smoke", "--data", f"video:{video}", "--frames", 60),
        *("--size", "24x32", "--channels", "3,4", "--learning-rate", "0.002"),
    )
    (run,) = gl.runs(tmp_path / "runs").itertuples()
    configuration = folders.read_record(Path(run.path))["configuration"]
    assert (configuration["frames"], configuration["window"], configuration["learning_rate"]) == (60, 20, 0.002)
    assert configuration["data"] == f"video:{video}"
    assert configuration["data_options"] == {"size": [24, 32], "frames": 60, "heldout": 6}
    assert configuration["model_options"] == {"size": [24, 32], "channels": [3, 4], "truncation": "loss"}


def test_an_experiment_is_run_and_compared(cli, tmp_path):
    arguments = ["experiment", "autoencoder", "--profile", "smoke", "--frames", 40, "--seeds", "2"]
    text = cli(*arguments, "--setting", "cpu", "--setting", "cpu:threads=1").stdout
    assert "4 runs" in text
    assert "cpu:threads=1 against cpu, 2 seeds" in text
    frame = gl.runs(tmp_path / "runs")
    assert frame[["setting", "seed"]].values.tolist() == [
        ["cpu", 0],
        ["cpu", 1],
        ["cpu:threads=1", 0],
        ["cpu:threads=1", 1],
    ]
    assert str(gl.verdict(frame)) in text
    command = folders.read_record(Path(frame.path[3]))["command"]
    assert command == "gpulab train autoencoder --profile smoke --setting cpu:threads=1 --seed 1 --frames 40"


def test_an_experiment_is_done_again_and_drawn(session, tmp_path):
    (tmp_path / "own.py").write_text("def train(seed):\n    print(seed, file=open('calls', 'a'))\n    return 1.0\n")
    arguments = ["experiment", "own.py:train", "--seeds", "2", "--setting", "cpu:threads=1"]
    calls = []
    for commands in ([[], []], [["--fresh"], ["--guard"], ["--picture", "runs.png"]]):
        session(*([*arguments, *more] for more in commands))
        calls.append(len((tmp_path / "calls").read_text().splitlines()))
    assert calls == [2, 6]
    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")


def test_a_guard_ends_an_experiment_that_overwrites(cli):
    arguments = ["experiment", "prednet", "--profile", "smoke", "--frames", 40, "--seeds", "1", "--setting", "cpu"]
    done = cli(*arguments, "--loader", "reused", "--guard", status=1)
    assert "overwritten since it was saved" in done.stderr


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


def test_recorded_runs_are_listed_as_csv_and_a_reader_may_leave_early(cli, tmp_path):
    (tmp_path / "queue.py").write_text("raise SystemExit('nothing that lies in the current folder is imported')")
    table = pd.read_csv(io.StringIO(cli("runs", "--recorded", "--csv").stdout))
    assert table.recorded.all()
    assert len(table) == len(gl.recorded_runs())
    leaving = subprocess.Popen(
        [*COMMAND, "runs", "--recorded", "--csv"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    leaving.stdout.close()
    assert leaving.communicate()[1] == b""
    assert leaving.returncode == 0


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
    ("arguments", "status"), [(["devices"], 0), ([*SMOKE], 0), (["runs", "no-such"], 1), (["train", "nonsense"], 2)]
)
def test_a_command_that_nobody_reads_keeps_its_exit_status(tmp_path, arguments, status):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([*COMMAND, *arguments], cwd=tmp_path, stdout=writing, stderr=writing, timeout=300)
    os.close(writing)
    assert done.returncode == status
    assert gl.runs(tmp_path / "runs").empty == (arguments != SMOKE)


@pytest.mark.skipif("avx512f" not in cpu_flags(), reason="running as AVX2 shows on an AVX-512 CPU only")
def test_an_instruction_set_can_be_chosen(cli, tmp_path):
    cli(*SMOKE, "--setting", "cpu:isa=avx2")
    record = folders.read_record(Path(gl.runs(tmp_path / "runs").path[0]))
    assert record["arithmetic"]["cpu_capability"] == "AVX2"


def hears_ctrl_c():
    """A process started by one that ignores SIGINT (a job in the background) would ignore it too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
def test_ctrl_c_saves_a_checkpoint_says_so_and_the_same_command_goes_on(tmp_path):
    size = ["--size", "8x12", "--channels", "3,4", "--frames", "2000"]
    command = [*COMMAND, "train", "prednet", "--profile", "smoke", *size, "--checkpoint-seconds", "0"]
    training = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=hears_ctrl_c)
    while not list(tmp_path.glob(f"runs/{folders.WORK}/*.safetensors")):
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
@pytest.mark.parametrize("moment", ["typer", "pandas", "_say_csv", "_shutdown"])
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


@pytest.fixture(scope="module")
def compared(python, tmp_path_factory):
    """(status, output, errors) of some commands about recorded steps, all in one process, and their folder."""
    folder = tmp_path_factory.mktemp("steps")
    (folder / "my_steps.py").write_text(STEPS)
    (folder / "no.trace").write_text("not a trace")
    commands = {
        "record by file": ["record", "my_steps.py:step"],
        "record by module": ["record", "my_steps:step", "--setting", "cpu:threads=1", "--output", "deep/b.trace"],
        "record another": ["record", "my_steps.py:other", "--output", "other.trace"],
        "record what is wrong": ["record", "my_steps.py:wrong", "--output", "wrong.trace"],
        "well": ["audit", "step-cpu.trace", "deep/b.trace", "--html", "pages/report.html"],
        "wrong": ["audit", "wrong.trace", "wrong.trace", "--html", "wrong.html"],
        "of different steps": ["audit", "step-cpu.trace", "other.trace"],
        "a trace that is none": ["audit", "step-cpu.trace", "no.trace"],
        "a trace that is missing": ["audit", "missing.trace", "step-cpu.trace"],
        "a step": ["audit", "my_steps.py:short", "--setting", "cpu", "--setting", "cpu:emulate=tf32", "--confirm"],
        "a step under one setting": ["audit", "my_steps.py:short", "--setting", "cpu"],
        "traces put right": ["audit", "step-cpu.trace", "deep/b.trace", "--confirm"],
        "one trace": ["audit", "step-cpu.trace"],
        "no such function": ["record", "my_steps.py:nothing"],
        "no such module": ["record", "no_such_module:step"],
        "no name": ["record", "my_steps.py"],
        "another setting": ["record", "my_steps.py:step", "--setting", "gpu"],
        "a device that is not here": ["record", "my_steps.py:step", "--setting", "cuda:77"],
    }
    return folder, dict(zip(commands, answers_of(python, folder, commands.values()), strict=True))


def test_steps_are_recorded_under_the_name_of_step_and_setting(compared):
    folder, answers = compared
    assert [answers[f"record {which}"][0] for which in ("by file", "by module", "another", "what is wrong")] == [0] * 4
    assert "kept in step-cpu.trace" in answers["record by file"][1]
    assert gl.diagnostics.Trace.load(folder / "step-cpu.trace").setting == "cpu"
    assert gl.diagnostics.Trace.load(folder / "deep" / "b.trace").setting == "cpu:threads=1"


def test_an_audit_where_all_is_well_ends_with_status_0(compared):
    folder, answers = compared
    status, text, _ = answers["well"]
    assert status == 0
    assert "cpu against cpu:threads=1: all is well: rounding alone" in text
    page = (folder / "pages" / "report.html").read_text(encoding="utf-8")
    assert "data:image/png;base64," in page
    assert "cpu:threads=1" in page


def test_an_audit_of_a_step_puts_right_the_lines_that_it_found(compared):
    status, text, _ = compared[1]["a step"]
    assert status == 0  # TF32 was asked for
    assert "cpu against cpu:emulate=tf32: 3 × reduced precision" in text
    line = STEPS.splitlines().index("    loss = (x @ x.T).square().sum()") + 1
    assert f"my_steps.py:{line}" in text
    assert "100% of the difference in the loss goes" in text


def test_what_an_audit_needs_is_said(compared):
    assert [compared[1][which][0] for which in ("a step under one setting", "traces put right")] == [2, 2]
    assert "a step with --setting twice" in compared[1]["a step under one setting"][2]
    assert "needs the step itself" in compared[1]["traces put right"][2]


def test_an_audit_that_finds_something_wrong_ends_with_status_1_and_its_report(compared):
    folder, answers = compared
    status, text, errors = answers["wrong"]
    assert (status, errors) == (1, "")
    assert "overwritten" in text
    assert "report in wrong.html" in text
    assert "buffer.data.add_(1)" in text or "(x * buffer).sum()" in text
    assert "overwritten" in (folder / "wrong.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "expected", "words"),
    [
        ("of different steps", 1, "different steps"),
        ("a trace that is none", 1, "no.trace: not a trace"),
        ("a trace that is missing", 1, "missing.trace"),
        ("one trace", 2, "expected two traces, or a step with --setting twice"),
        ("no such function", 2, "no function or gpulab.Step named 'nothing'"),
        ("no such module", 2, "no_such_module cannot be imported"),
        ("no name", 2, "expected module:name or file.py:name"),
        ("another setting", 2, "setting 'gpu'"),
        ("a device that is not here", 1, "cuda:77"),
    ],
)
def test_a_step_or_trace_that_is_none_is_named(compared, name, expected, words):
    status, _, errors = compared[1][name]
    assert status == expected
    assert words in errors


# --- errors ------------------------------------------------------------------------------------------------

SEARCH = ["reproduce", "prednet", "--target", "cpu", "--setting", "cpu:threads=1", "--search"]
USAGE = {
    "no such command": ["fly"],
    "no model": ["train"],
    "no such option": ["train", "prednet", "--colour", "red"],
    "a seed below nothing": ["train", "prednet", "--seed", "-1"],
    "frames in words": ["train", "prednet", "--frames", "many"],
    "another setting": ["train", "prednet", "--setting", "gpu"],
    "another option of a setting": ["train", "prednet", "--setting", "cpu:tf32=on"],
    "another model": ["train", "resnet"],
    "another profile": ["train", "prednet", "--profile", "huge"],
    "other data": ["train", "prednet", "--profile", "smoke", "--data", "imagenet"],
    "data for the other model": ["train", "prednet", "--profile", "smoke", "--data", "digits"],
    "a size of one number": ["train", "prednet", "--size", "24"],
    "a size in words": ["train", "prednet", "--size", "axb"],
    "a size that does not halve": ["train", "prednet", "--profile", "smoke", "--size", "25x33"],
    "channels in words": ["train", "prednet", "--channels", "a,b"],
    "channels of nothing": ["train", "prednet", "--profile", "smoke", "--channels", "3,0"],
    "grey data for colour channels": ["train", "prednet", "--profile", "smoke", "--channels", "1,4"],
    "channels of the other model": ["train", "autoencoder", "--profile", "smoke", "--channels", "3,4"],
    "too few frames": ["train", "prednet", "--profile", "smoke", "--frames", "5"],
    "no frames": ["train", "prednet", "--profile", "smoke", "--frames", "0"],
    "no speed": ["train", "prednet", "--profile", "smoke", "--speed", "0"],
    "a learning rate below nothing": ["train", "prednet", "--profile", "smoke", "--learning-rate", "-1"],
    "a learning rate that is no number": ["train", "prednet", "--profile", "smoke", "--learning-rate", "nan"],
    "an experiment without a setting": ["experiment", "prednet"],
    "an experiment with another setting": ["experiment", "prednet", "--setting", "gpu"],
    "an experiment with seeds in words": ["experiment", "prednet", "--setting", "cpu", "--seeds", "some"],
    "an experiment with no seeds": ["experiment", "prednet", "--setting", "cpu", "--seeds", "0"],
    "an experiment with no frames": ["experiment", "prednet", "--profile", "smoke", "--setting", "cpu", "--frames=0"],
    "a search without runs of the old setting": [*SEARCH, "learning_rate=0.1"],
    "a search of nothing": [*SEARCH, "learning_rate"],
    "a search of a range in words": [*SEARCH, "learning_rate=low..high"],
    "a search with a margin in words": [*SEARCH, "learning_rate=0.1", "--margin", "small"],
    "a search with no trials": [*SEARCH, "learning_rate=0.1", "--trials", "0"],
    "two stores": ["runs", "one", "--store", "another"],
    "an experiment with no reruns": ["experiment", "prednet", "--setting", "cpu", "--reruns", "0"],
}
FAILURES = {
    "a device that is not here": ["train", "prednet", "--profile", "smoke", "--setting", "cuda:77"],
    "a video that is not there": ["train", "prednet", "--profile", "smoke", "--data", "video:missing.mp4"],
    "a folder that is not there": ["train", "prednet", "--profile", "smoke", "--data", "frames:missing"],
    "MNIST that is not there": ["train", "autoencoder", "--profile", "smoke", "--data", "mnist:missing"],
    "runs that are not there": ["runs", "missing"],
    "runs to pack that are not there": ["pack", "missing", "packed.parquet"],
    "notebooks that are not there": ["companion", "--notebooks", "missing"],
    "a store that is a file": ["train", "autoencoder", "--profile", "smoke", "--frames", "20", "--store", "a-file"],
    "a checkpoint in a file": [*SMOKE, "--store", "a-file", "--checkpoint-seconds", "0"],
    "a store below a file": ["train", "autoencoder", "--profile", "smoke", "--frames", "20", "--store", "a-file/b"],
}


@pytest.fixture(scope="module")
def outcomes(python, tmp_path_factory):
    folder = tmp_path_factory.mktemp("errors")
    (folder / "a-file").write_text("not a folder")
    commands = {**USAGE, **FAILURES}
    return dict(zip(commands, answers_of(python, folder, commands.values()), strict=True))


@pytest.mark.parametrize("name", USAGE)
def test_a_command_that_makes_no_sense_ends_with_status_2(outcomes, name):
    status, out, errors = outcomes[name]
    assert (status, out) == (2, "")
    assert errors.strip()


@pytest.mark.parametrize("name", FAILURES)
def test_what_cannot_be_done_ends_with_status_1_and_one_line(outcomes, name):
    status, out, errors = outcomes[name]
    assert (status, out) == (1, "")
    lines = [line for line in errors.splitlines() if "frame/s" not in line]  # a progress bar is no message
    assert lines[-1].startswith("gpulab: ")
    assert re.search("cuda:77|missing|a-file", lines[-1])


def test_options_of_a_network_reach_it_and_its_record(python, tmp_path):
    experiment = ["experiment", "whitener", "--profile", "smoke", "--seeds", "1", "--setting", "cpu:threads=1"]
    wrong = ["covariance", "=centred", "covariance=diagonal"]
    commands = [[*experiment, "--option", "covariance=centred", "--option", "code=20"]]
    commands += [[*experiment, "--option", option] for option in wrong]
    answers = answers_of(python, tmp_path, commands)
    assert [status for status, _, _ in answers] == [0, 2, 2, 2]
    (run,) = gl.runs(tmp_path / "runs").itertuples()
    assert run.covariance == "centred"
    record = folders.read_record(Path(run.path))
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


@pytest.fixture
def full(tmp_path):
    """A folder on a disk that is full, where one may be made."""
    folder = tmp_path / "full"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        with contextlib.suppress(OSError), open(folder / "filler", "wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


TABLE = "device,seed,loss\n" + "\n".join(f"{name},{seed},{seed}" for seed in range(6) for name in ("a", "b"))
VERDICT = ["verdict", "runs.csv", "--metric", "loss", "--factor", "device"]


def test_a_full_disk_is_one_line_and_leaves_nothing(python, full, compared):
    (full.parent / "runs.csv").write_text(TABLE)
    there = set(full.rglob("*"))
    trace = str(compared[0] / "step-cpu.trace")
    commands = [
        [*VERDICT, "--picture", "full/a.png"],
        ["audit", trace, trace, "--html", "full/new/a.html"],
    ]
    for status, _, errors in answers_of(python, full.parent, commands):
        assert status == 1
        assert re.fullmatch(r"gpulab: full/\S+: cannot be written: the disk is full; free some space .*\n", errors)
    assert {file for file in full.rglob("*") if file.is_file()} == there


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
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "01_one.ipynb").write_text("{")
    long = "x" * 300
    commands = {
        "a-file/a.png: cannot be written: a part of its path is a file": [*SMOKE, "--picture", "a-file/a.png"],
        f"{long}: cannot be written: the name is too long": [*SMOKE, "--picture", long],
        "notebooks: cannot be written: there is a folder of this name": [*SMOKE, "--picture", "notebooks"],
        f"gpulab: {long}: the name is too long": ["runs", long],
        "01_one.ipynb: not a notebook": ["companion", "--notebooks", "notebooks"],
    }
    if sys.platform == "linux":  # where no permission says so
        os.mkfifo(tmp_path / "a-pipe")
        commands["/proc/a.png: cannot be written"] = [*SMOKE, "--picture", "/proc/a.png"]
        commands["a-pipe: cannot be written: there is a pipe or a device"] = [*SMOKE, "--picture", "a-pipe"]
    answers = answers_of(python, tmp_path, commands.values())
    for words, (status, _, errors) in zip(commands, answers, strict=True):
        assert (status, len(errors.splitlines())) == (1, 1)
        assert words in errors
    assert {file.name for file in tmp_path.iterdir()} - {"a-pipe"} == {"a-file", "notebooks"}


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names themselves")
def test_a_name_that_is_not_utf8_is_refused_before_it_is_written_into_a_store(python, tmp_path):
    for name in ("own.py", "own\udcff.py", "table\udcff.csv"):
        (tmp_path / name).write_text("def train(seed, data=''):\n    return float(seed)\n")
    experiment = ["experiment", "own.py:train", "--setting", "cpu", "--seeds", "2"]
    commands = [
        ["train", "own\udcff.py:train"],
        ["train", "own.py:train", "--option", "data=table\udcff.csv"],
        [*SMOKE, "--data", "frames:own\udcff.py"],
        [*experiment, "--store", "runs\udcff"],
        ["runs", "runs\udcff"],
        ["reproduce", "own\udcff.py:train", "--target", "cpu", "--setting", "cpu:threads=1", "--search", "data=a,b"],
    ]
    for status, _, errors in answers_of(python, tmp_path, commands):
        assert status == 2
        assert re.fullmatch(r"gpulab: \S*\\udcff\S*: this name is not UTF-8, .*\n", errors)
    assert not list(tmp_path.glob("runs*"))


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such names")
def test_names_are_shown_as_they_are_and_move_no_cursor(python, tmp_path):
    name = "[bold]\x1b[31m$red$.py"
    (tmp_path / name).write_text("def train(seed):\n    return {'[link=x]\\x07': float(seed)}\n")
    code = f"import gpulab.cli\n{ONE_BY_ONE}".replace("\nos.chdir", "\ngpulab.cli.MOST_DRAWN = 3\nos.chdir", 1)
    commands = [
        *(["train", f"{name}:train", "--seed", str(seed)] for seed in range(3)),
        ["runs"],
        ["train", f"{name}:train", "--seed", "3"],
        ["runs"],
        ["runs", "--csv"],
    ]
    answers = answers_of(python, tmp_path, commands, code, columns="300")
    assert [status for status, _, _ in answers] == [0] * len(commands)
    for _, out, errors in answers:
        assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f]", out)
        assert "\x1b[31m" not in errors
    drawn, aligned, csv = (answers[place][1] for place in (3, 5, 6))
    for listed in (drawn, aligned, csv):
        assert "[bold]\\x1b[31m$red$.py:train" in listed
        assert "[link=x]\\x07" in listed

    def cells(table):
        return [re.findall(r"[^\s│┃]+", line) for line in table.splitlines() if re.search("profile|cpu", line)]

    assert cells(drawn) == cells(aligned)[:4]
    assert len(cells(aligned)) == 5
