"""Kills, interruptions, a full disk and several writers at every call that writes: nothing
finished is ever lost.
"""

import itertools
import multiprocessing
import os
import random
import shutil
import signal
import sys
from pathlib import Path

import pytest

import gpulab as gl
from gpulab.store import _run_store as stores

pytestmark = [
    pytest.mark.slow("kills and hinders a training at each call that writes"),
    pytest.mark.skipif(sys.platform != "linux", reason="fault injection needs a server that forks"),
]

NETWORK = (
    "train autoencoder --profile smoke --option frames=40 --setting cpu:threads=1 --store store"
)
FUNCTION = "train own.py:train --setting cpu:threads=1 --store store"
OWN = "def train(seed, rate=0.5):\n    return (1 + seed) * rate\n"
WRITES = ("fsync", "replace", "mkdir", "rename", "unlink")

# A child begins with all that a command imports, and with nothing computed; so it costs a fraction
# of a second.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["gpulab.cli", "gpulab.training._run", "pyarrow.parquet", "pandas"])


def act_of(name):
    """What happens at a write."""
    if name == "full":
        raise OSError(28, "No space left on device")
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "interrupt": signal.SIGINT}[name])


def command(folder, line, act, at, lasting):
    """A command of gpulab, to which something happens when it writes for the `at`-th time, or
    from then on.
    """
    os.chdir(folder)
    said = os.open("said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    count = itertools.count(1)

    def disturbed(usual):
        def call(*given, **more):
            number = next(count)
            Path("count").write_text(str(number))
            if number == at or (lasting and number > at):
                act_of(act)
            return usual(*given, **more)

        return call

    for name in WRITES:
        setattr(os, name, disturbed(getattr(os, name)))
    sys.argv = ["gpulab", *line.split()]
    from gpulab.cli import main
    from gpulab.training import _supervision as supervision

    supervision.CHECKPOINT_SECONDS = 0
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()


def run(folder, line, act="", at=0, lasting=False):
    """The exit status of a command, and what it said."""
    child = FORKS.Process(target=command, args=(folder, line, act, at, lasting))
    child.start()
    child.join(120)
    assert child.exitcode is not None, "it hangs"
    return child.exitcode, (folder / "said").read_text()


def facts(folder):
    """What lies in the store, without what another execution may have otherwise."""
    frame = gl.runs(folder / "store")
    assert frame.attrs["damaged"] == 0
    if frame.empty:
        return {}
    losses = gl.store.history(frame).groupby("id").loss.apply(list).to_dict()
    return {
        row.id: (row.status, row.final_loss, row.weights, losses[row.id])
        for row in frame.itertuples()
    }


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A folder with finished runs, of a network and of a function."""
    folder = tmp_path_factory.mktemp("begun")
    (folder / "own.py").write_text(OWN)
    for line in (NETWORK, FUNCTION):
        assert run(folder, f"{line} --seed 9")[0] == 0
    return folder


@pytest.mark.parametrize("act", ["kill", "interrupt", "full"])
@pytest.mark.parametrize("line", [NETWORK, FUNCTION])
def test_train_command_killed_interrupted_or_out_of_space_at_any_write_loses_nothing(
    act, line, begun, tmp_path
):
    usual = shutil.copytree(begun, tmp_path / "usual")
    before = facts(usual)
    assert run(usual, line)[0] == 0
    writes, after = int((usual / "count").read_text()), facts(usual)
    assert writes >= 2
    places = (
        range(1, writes + 1) if act == "kill" else sorted({1, 2, writes // 2, writes - 1, writes})
    )
    for at, lasting in itertools.product(places, (False, True) if act == "full" else (False,)):
        folder = shutil.copytree(begun, tmp_path / f"{at}-{lasting}")
        status, said = run(folder, line, act, at, lasting)
        assert "Traceback" not in said, (at, said)
        assert act == "kill" or status in (0, 1, 130), (at, status, said)
        assert status != 130 or "interrupted; run the same command again to continue" in said, (
            at,
            said,
        )
        if act == "full" and status:
            assert said.splitlines()[-1].startswith("gpulab: "), (at, said)
            assert "No space left on device; free some space" in said.splitlines()[-1], (at, said)
        left = facts(folder)
        assert before.items() <= left.items() <= after.items(), at
        again, words = run(folder, line)
        assert again == 0, (at, words)
        assert facts(folder) == after, at
        # What a killed process was writing may be deleted at any time; other ends leave nothing.
        left = [
            path.name
            for path in (folder / "store" / stores.WORK_FOLDER).iterdir()
            if not path.name.endswith(".part")
        ]
        assert left == [], at


def writer(folder, number):
    os.chdir(folder)
    seeds = random.Random(number).sample(range(6), 6)
    for seed in seeds:
        gl.train(
            "autoencoder",
            None,
            "cpu:threads=1",
            seed,
            "smoke",
            frames=40,
            store="store",
            progress=False,
        )
        gl.train("own.py:train", seed=seed, store="store", progress=False)


def test_store_with_many_writers_shows_readers_whole_runs_only(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    children = [FORKS.Process(target=writer, args=(tmp_path, number)) for number in range(6)]
    for child in children:
        child.start()
    seen = {}
    while any(child.is_alive() for child in children):
        for name, fact in facts(tmp_path).items():
            assert seen.setdefault(name, fact) == fact
    assert [child.exitcode for child in children] == [0] * len(children)
    assert len(facts(tmp_path)) == 12
    assert [*(tmp_path / "store" / stores.WORK_FOLDER).iterdir()] == []
