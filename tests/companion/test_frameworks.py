"""The library as a factor: JAX and Keras do what torch does, from the same weights, and refuse what they cannot."""

import doctest
import importlib

import numpy as np
import pandas as pd
import pytest
import torch

import gpulab as gl
from gpulab.companion import library_runs, library_speeds, library_verdicts, one_step
from gpulab.companion.frameworks import LIBRARIES
from gpulab.companion.same_start import begun
from gpulab.training.plan import plan_run
from gpulab.training.step import FirstWindow, Trainer

SIZE = {"size": "smoke"}
NETWORKS = ("autoencoder", "prednet")


@pytest.fixture(params=LIBRARIES)
def library(request):
    """The module of a library that is installed here."""
    pytest.importorskip({"keras": "tensorflow"}.get(request.param, request.param))
    return importlib.import_module(f"gpulab.companion.in_{request.param}")


def name_of(library):
    return library.__name__.rpartition("_")[2]


@pytest.mark.parametrize("net", NETWORKS)
def test_a_step_is_torchs_to_rounding(library, net):
    (row,) = one_step(net, libraries=[name_of(library)], **SIZE).itertuples()
    assert row.loss_difference < 1e-6
    assert 0 < row.gradient_difference < 3e-6
    (row,) = one_step(net, "cpu:precision=float64", libraries=[name_of(library)], **SIZE).itertuples()
    assert row.loss_difference < 1e-14
    assert row.gradient_difference < 1e-14


@pytest.mark.parametrize("net", NETWORKS)
def test_a_training_follows_torchs(library, net):
    """In float64, so that what differs is the protocol: the state from window to window, its truncation, Adam."""
    setting = "cpu:precision=float64"
    usual = gl.train(net, setting=setting, seed=1, profile="smoke", progress=False)
    other = gl.train(f"{library.__name__}:{net}", setting=setting, seed=1, model_options=SIZE, progress=False)
    assert other.history.loss.to_numpy() == pytest.approx(usual.history.loss.to_numpy(), rel=1e-9)
    assert other.final_loss == pytest.approx(usual.final_loss, rel=1e-9)
