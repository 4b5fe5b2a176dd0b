"""Trainings in experiments that start processes, and the processes that remain after something is
killed.
"""

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import gpulab as gl
from gpulab.training import _worker_process as worker_process
from gpulab.training import _workers as workers

ONE = "cpu:threads=1"
METHODS = multiprocessing.get_all_start_methods()
ON_POSIX = pytest.mark.skipif(
    not hasattr(os, "killpg"), reason="this operating system has no process groups"
)


def count_workers(seed):
    """Return the number of workers of this worker's parent."""
    siblings = psutil.Process(os.getppid()).children()
    workers_alive = sum("LokyProcess" in " ".join(each.cmdline()) for each in siblings)
    return workers_alive + 0.0 * seed


@pytest.mark.slow("starts three processes")
def test_workers_of_one_setting_end_before_the_next_setting_begins(tmp_path):
    settings = [ONE, "cpu:threads=1,denormals=off", "cpu:threads=1,deterministic=on"]
    runs = gl.Experiment(count_workers, settings, 1, store=tmp_path).run(progress=False)
    assert set(runs.final_loss) == {1.0}


TRAINING = '''
import concurrent.futures, multiprocessing, os, pathlib, subprocess, sys, tempfile, time

import joblib, torch
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, number):
        return torch.tensor(float(number**2))


def square(number):
    return number**2


def touch(rank, folder):
    pathlib.Path(folder, str(rank)).touch()


def loader(method, processes, persistent=False):
    data = DataLoader(
        Squares(),
        num_workers=processes,
        multiprocessing_context=method,
        persistent_workers=persistent,
    )
    return sum(batch.item() for _ in range(2) for batch in data) / 2


def persistent(method, processes):
    return loader(method, processes, persistent=True)


def pool(method, processes):
    with multiprocessing.get_context(method).Pool(processes) as started:
        return sum(started.map(square, range(8)))


def executor(method, processes):
    context = multiprocessing.get_context(method)
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as started:
        return sum(started.map(square, range(8)))


def left_pool(method, processes):
    global pool_of_module
    pool_of_module = multiprocessing.get_context(method).Pool(processes)
    return sum(pool_of_module.map(square, range(8)))


def left_executor(method, processes):
    global executor_of_module
    context = multiprocessing.get_context(method)
    executor_of_module = concurrent.futures.ProcessPoolExecutor(processes, mp_context=context)
    return sum(executor_of_module.map(square, range(8)))


def torch_processes(method, processes):
    folder = tempfile.mkdtemp()
    torch.multiprocessing.start_processes(touch, (folder,), 7, start_method=method or "spawn")
    return 20.0 * len(os.listdir(folder))


def program(method, processes):
    path = "import sys; print(140 if sys.path[0] == '' else sys.path)"  # as where no worker is
    command = [sys.executable, "-c", path]
    return float(subprocess.run(command, capture_output=True, text=True).stdout)


def nested_joblib(method, processes):
    return sum(joblib.Parallel(processes)(joblib.delayed(square)(number) for number in range(8)))


def start_method(method, processes):
    multiprocessing.set_start_method("spawn")
    return 140.0


HOWS = [
    loader,
    persistent,
    pool,
    executor,
    left_pool,
    left_executor,
    torch_processes,
    program,
    nested_joblib,
    start_method,
]


def train(seed, how="loader", method="", processes=1):
    (function,) = [each for each in HOWS if each.__name__ == how]
    return float(function(method or None, processes))


def waits(seed, begun=""):
    """From seed 1 on: start processes of all kinds, say which, and wait."""
    if seed == 0:
        return 0.0
    context = multiprocessing.get_context("fork")
    started = context.Pool(2)
    ids = [process.pid for process in started._pool]
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    ids += [subprocess.Popen(command).pid, os.getpid()]
    data = iter(DataLoader(Squares(), num_workers=1, multiprocessing_context="fork"))
    ids += [process.pid for process in data._workers]
    pathlib.Path(begun + ".part").write_text(" ".join(map(str, ids)))
    os.replace(begun + ".part", begun)
    while True:
        time.sleep(600)
'''


@pytest.fixture
def train(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    Path("starts_processes.py").write_text(TRAINING)

    def run(variants, seeds=1, count=1):
        made = gl.Experiment(
            "starts_processes.py:train",
            [ONE],
            seeds,
            store="runs",
            variants=variants,
            workers=count,
        )
        return made.run(progress=False).final_loss.tolist()

    return run


def test_experiment_trains_with_a_loader_that_has_processes(train):
    assert train([{"processes": 1}]) == [140.0]


@pytest.mark.slow("starts processes by each method that the system has")
@pytest.mark.parametrize("method", ["", *METHODS])
def test_experiment_training_starts_processes_by_any_method(train, method):
    hows = [
        "loader",
        "persistent",
        "pool",
        "executor",
        "left_pool",
        "left_executor",
        "torch_processes",
    ]
    variants = [{"how": how, "method": method, "processes": 2} for how in hows]
    assert train(variants) == [140.0] * len(hows)


@pytest.mark.slow("starts several processes")
def test_workers_have_loaders_with_processes_at_the_same_time(train):
    assert train([{"processes": 2}], seeds=4, count=2) == [140.0] * 4


def test_experiment_training_runs_programs_and_chooses_a_start_method_in_each_run(train):
    variants = [
        {"how": how, "processes": 2} for how in ("program", "start_method", "nested_joblib")
    ]
    assert train(variants, seeds=2) == [140.0] * 6


@pytest.mark.slow("starts processes afresh")
@pytest.mark.parametrize("method", [method for method in METHODS if method != "fork"])
def test_experiment_passes_code_of_a_script_to_processes_that_are_started_afresh(tmp_path, method):
    variants = [
        {"how": how, "method": method, "processes": 2} for how in ("loader", "pool", "executor")
    ]
    main = f"""
if __name__ == '__main__':
    import gpulab as gl

    experiment = gl.Experiment(train, ['{ONE}'], 1, store='runs', variants={variants})
    frame = experiment.run(progress=False)
    print(frame.final_loss.tolist())
"""
    (tmp_path / "script.py").write_text(TRAINING + main)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1:] == ["[140.0, 140.0, 140.0]"], done.stderr


@pytest.mark.parametrize("chosen", [None, "spawn"])
def test_start_method_of_workers_is_that_of_the_program(chosen, monkeypatch):
    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", None)
    multiprocessing.set_start_method(chosen, force=True)
    multiprocessing.get_start_method()  # from now on, the default counts as chosen
    assert workers.chosen_start_method() == chosen or METHODS[0] == chosen
    monkeypatch.setattr(worker_process, "_start_method", chosen)
    multiprocessing.set_start_method("spawn", force=True)
    worker_process.reset_start_method()
    assert multiprocessing.get_start_method(allow_none=True) == chosen


# --- what is killed -------------------------------------------------------------------------------

WAITING = """
import gpulab as gl

if __name__ == "__main__":
    options = {"begun": "begun"}
    exp = gl.Experiment(
        "starts_processes.py:waits", ["cpu:threads=1"], 2, store="runs", options=options
    )
    exp.run(progress=False)
"""


def living(ids):
    """Return those processes that have not ended."""
    alive = []
    for number in ids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(number).status() != psutil.STATUS_ZOMBIE:
                alive.append(number)
    return alive


def wait_until(condition, what):
    for _ in range(600):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError(what)


@pytest.fixture
def waiting(tmp_path):
    """An experiment whose first run is done, and whose second has started processes and waits."""
    (tmp_path / "starts_processes.py").write_text(TRAINING)
    (tmp_path / "driver.py").write_text(WAITING)
    driver = subprocess.Popen(
        [sys.executable, "driver.py"],
        cwd=tmp_path,
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    begun = tmp_path / "begun"
    wait_until(lambda: begun.exists() or driver.poll() is not None, "no run has begun")
    assert driver.poll() is None, driver.stderr.read()
    ids = [int(number) for number in begun.read_text().split()]
    reapers = [
        child.pid
        for child in psutil.Process(driver.pid).children()
        if "reaper.py" in str(child.cmdline())
    ]
    assert len(reapers) == 1
    yield driver, ids, reapers
    for number in living([driver.pid, *ids, *reapers]):
        os.kill(number, signal.SIGKILL)
    driver.communicate()


@ON_POSIX
@pytest.mark.slow("kills an experiment in another process")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGKILL"])
def test_experiment_killed_by_a_signal_leaves_no_process_and_keeps_what_is_done(
    waiting, tmp_path, name
):
    driver, ids, reapers = waiting
    number = getattr(signal, name)
    driver.send_signal(number)
    assert driver.wait() == -number or name == "SIGINT"
    wait_until(
        lambda: not living([*ids, *reapers]), f"still there: {living([*ids, *reapers])} of {ids}"
    )
    assert gl.runs(tmp_path / "runs").seed.tolist() == [0]


@ON_POSIX
@pytest.mark.slow("kills a worker of an experiment in another process")
def test_worker_killed_by_sigkill_takes_along_what_it_has_started(waiting, tmp_path):
    driver, ids, reapers = waiting
    (worker,) = [number for number in ids if psutil.Process(number).ppid() == driver.pid]
    os.kill(worker, signal.SIGKILL)
    assert re.search(
        r"1 of 2 runs failed.*its worker process ended", driver.stderr.read(), re.DOTALL
    )
    assert driver.wait() == 1
    wait_until(
        lambda: not living([*ids, *reapers]), f"still there: {living([*ids, *reapers])} of {ids}"
    )
    assert gl.runs(tmp_path / "runs").seed.tolist() == [0]


@ON_POSIX
def test_sigterm_and_sighup_that_a_program_handles_or_ignores_are_left_alone(monkeypatch):
    def own(*_):
        """Handled by the program."""

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        signal.signal(signal.SIGTERM, own)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with workers.end_on_signals():
            assert signal.getsignal(signal.SIGTERM) is own
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raised = []
        monkeypatch.setattr(signal, "raise_signal", raised.append)
        with pytest.raises(KeyboardInterrupt), workers.end_on_signals():
            os.kill(os.getpid(), signal.SIGTERM)
        assert raised == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
