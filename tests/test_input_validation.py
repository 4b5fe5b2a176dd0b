"""Every public function rejects nonsense with an error from `errors.py` that names the value, and
never with any other error.
"""

import inspect
import math
import string

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gpulab as gl

NET, BATCH = torch.nn.Linear(4, 2), torch.ones(3, 4)
STEP = gl.Step(NET, (BATCH, torch.ones(3, 2)), torch.nn.functional.mse_loss)
HESSIAN = gl.hessian(NET, lambda: NET(BATCH).square().mean())
TABLE = pd.DataFrame(
    {"setting": setting, "seed": seed, "final_loss": seed + shift}
    for setting, shift in (("cpu", 0), ("cuda", 1))
    for seed in range(8)
)


def own(seed):
    """A custom training function."""
    return float(seed)


# A valid call of each function; its texts and numbers are replaced by nonsense, one at a time.
CALLS = {
    gl.load: {"name": "walk", "frames": 20, "size": (24, 32), "speed": 1.0},
    gl.audit: {"step": STEP, "a": "cpu", "b": "cpu:threads=1"},
    gl.record: {"step": STEP, "setting": "cpu"},
    gl.guard: {"on": "raise"},
    gl.emulate: {"name": "tf32", "order": "pairwise"},
    gl.setting: {"text": "cpu"},
    gl.available_settings: {"device": "cpu"},
    gl.recorded_runs: {"study": "dose"},
    gl.roofline: {"setting": "cpu"},
    gl.verdict: {
        "frame": TABLE,
        "metric": "final_loss",
        "factor": "setting",
        "block": "seed",
        "alpha": 0.05,
    },
    gl.hessian: {"model": NET, "loss": lambda: NET(BATCH).sum(), "parameters": "weight"},
    gl.train: {
        "net": "autoencoder",
        "data": "digits",
        "setting": "cpu",
        "profile": "smoke",
        "frames": 20,
        "seed": 0,
    }
    | {"rerun": 0, "learning_rate": 1e-3},
    gl.Experiment: {"model": own, "settings": ["cpu"], "seeds": 2, "workers": 1, "reruns": 1},
    gl.seed_runs: {"train": own, "setting": "cpu", "seeds": 1},
    gl.numerics.round_to: {"x": BATCH, "name": "tf32", "mode": "nearest"},
    gl.saddles.extreme_eigenpairs: {"H": HESSIAN, "tolerance": 0.01},
    gl.saddles.spectral_density: {"H": HESSIAN, "probes": 2, "steps": 3},
    gl.models.flip_bit: {"model": NET, "weight": 0},
    gl.models.Autoencoder: {"hidden": (4,), "size": (8, 8), "batch_size": 1},
    gl.models.PredNet: {"channels": (1, 2), "size": (4, 4), "truncation": "loss"},
    gl.models.Whitener: {"hidden": 4, "code": 2, "batch_size": 3, "covariance": "one-pass"},
    gl.models.LinearAutoencoder: {"features": 4, "hidden": 2},
    gl.device.place: {"step": STEP, "ceilings": "cpu", "repeats": 1},
}
NONSENSE = {
    str: st.text(string.ascii_letters, min_size=1).map(lambda text: f"no such {text}"),
    int: st.integers(max_value=-1),
    float: st.sampled_from([math.nan, -1.0, -math.inf]),
}
QUIET = {"progress": False}


PIECES = [
    pytest.param(function, name, NONSENSE[type(value)], id=f"{function.__name__}-{name}")
    for function, arguments in CALLS.items()
    for name, value in arguments.items()
    if type(value) in NONSENSE
]


def call(function, arguments):
    quiet = QUIET if "progress" in inspect.signature(function).parameters else {}
    result = function(**arguments, **quiet)
    if hasattr(result, "__enter__"):
        with result:
            pass


@pytest.mark.parametrize(("function", "name", "nonsense"), PIECES)
def test_public_function_names_the_invalid_value_that_it_refuses(function, name, nonsense):
    @settings(max_examples=5, deadline=None, database=None)
    @given(nonsense)
    def refused(value):
        with pytest.raises(gl.GpulabError) as error:
            call(function, CALLS[function] | {name: value})
        assert str(value) in str(error.value).replace(",", "")

    refused()
