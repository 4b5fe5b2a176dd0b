"""The folder of engines is hidden: everything works, and gives the same up to rounding."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
HIDDEN = "import sys; sys.modules['gpulab.engines'] = None\n"
TRAINED = """
import json
import torch
import gpulab as gl

def trained(net):
    run = gl.train(net, profile="smoke", setting="cpu:precision=float64", frames=60, progress=False)
    return [run.record["gradients"], run.final_loss, run.heldout_loss]

def product():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
    H = gl.hessian(net, torch.nn.functional.mse_loss, (torch.rand(5, 3).double(), torch.rand(5, 2).double()))
    return [H.method, (H @ torch.linspace(-1, 1, H.shape[0]).double()).tolist()]

found = {"prednet": trained("prednet"), "autoencoder": trained("autoencoder"), "hessian": product()}
"""


def test_trainings_and_products_without_the_engines():
    there = {}
    exec(TRAINED, there)
    code = f"{HIDDEN}{TRAINED}print(json.dumps(found))"
    hidden = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    here = there["found"]
    # An older torch (2.6) cannot tell whether a guard looks on, so that every gradient is autograd's.
    here_is_fast = hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
    prednet = "written out" if here_is_fast else "autograd"
    for net, way in (("prednet", prednet), ("autoencoder", "autograd")):
        assert (here[net][0], hidden[net][0]) == (way, "autograd")
        assert hidden[net][1:] == pytest.approx(here[net][1:], rel=1e-9)
    assert (here["hessian"][0], hidden["hessian"][0]) == ("forward over reverse", "reverse over reverse")
    torch.testing.assert_close(torch.tensor(hidden["hessian"][1]), torch.tensor(here["hessian"][1]))


@pytest.mark.slow("runs the tests of the core once more")
def test_tests_of_the_core_pass_without_the_engines():
    of_saddles = [f"saddles/test_{name}.py" for name in ("spectrum", "critical", "landscapes", "escapes")]
    tests = [f"tests/{name}" for name in ("training/test_loop.py", "training/test_run.py", "models", *of_saddles)]
    code = f"{HIDDEN}import pytest; sys.exit(pytest.main(['-q', '-m', 'not slow', '-p', 'no:cacheprovider', *{tests}]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
