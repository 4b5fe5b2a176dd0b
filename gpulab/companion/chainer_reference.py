"""The published Chainer network itself, where Chainer and the authors' repository are at hand."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from gpulab.data.datasets import load
from gpulab.errors import GpulabError
from gpulab.training.protocol import protocol

SCRIPT = Path(__file__).with_name("chainer_window.py")
INSTALL = (
    "to run it, make a Python 3.9 to 3.11 environment with `pip install numpy==1.23.5 'setuptools<70' wheel six "
    "'protobuf<4' typing_extensions filelock` and then `pip install --no-build-isolation chainer==7.8.1`, clone "
    "github.com/eijwat/prednet_in_chainer_py3, and set GPULAB_CHAINER_PYTHON to that environment's python and "
    "GPULAB_CHAINER_PREDNET to the clone's folder PredNet"
)


def published_network(python: str | None = None, folder: str | Path | None = None, profile: str = "quick") -> str:
    """One window of the authors' own network on a CPU, buffer reused against copied, in a sentence.

    Where something is missing the sentence says that it was skipped, and how to get it.

    Args:
        python: A Python with Chainer, else `$GPULAB_CHAINER_PYTHON`, else this one, if it has Chainer.
        folder: Holds the authors' `net.py`, which is run in a process of its own; else `$GPULAB_CHAINER_PREDNET`.
        profile: How large.

    Raises:
        GpulabError: When the network does not run.
    """
    ours = sys.executable if importlib.util.find_spec("chainer") else None
    python = python or os.environ.get("GPULAB_CHAINER_PYTHON") or ours
    folder = folder or os.environ.get("GPULAB_CHAINER_PREDNET")
    if python is None or folder is None:
        missing = [name for name, value in (("Chainer", python), ("the authors' net.py", folder)) if not value]
        return f"Skipped: {' and '.join(missing)} not found; {INSTALL}."
    if not (Path(folder) / "net.py").is_file():
        raise GpulabError(f"{folder}: holds no net.py; it is in the folder PredNet of the authors' repository")
    plan = protocol("prednet", profile)
    frames = next(load(plan.data, frames=plan.window * 2, size=plan.size).windows(plan.window)).frames / 255
    channels = ",".join(map(str, plan.model["channels"]))
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "frames.npy"
        np.save(file, frames.astype(np.float32), allow_pickle=False)
        command = [python, str(SCRIPT), str(folder), str(file), channels]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise GpulabError(f"{python}: could not run the published network: {error}") from None
    if done.returncode:
        raise GpulabError(f"{python}: the published network failed: {' '.join(done.stderr.split()[-30:])}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return (
        f"The published network (Chainer {answer['chainer']}, NumPy {answer['numpy']}), first window, reused against "
        f"copied: {answer['same_losses']} of {answer['losses']} forward losses have the same bits; the gradient is off "
        f"by {answer['gradient_difference']:.1e} (cosine {answer['cosine']:.5f})."
    )
