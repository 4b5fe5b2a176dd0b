"""Small steps and their audits: what several files of this folder share."""

import math

import torch
from small_networks import drawn
from torch import nn

import gpulab as gl
from gpulab._torch_internals import operation_name
from gpulab.audits._rounding import forward_error

A, B = "cpu", "cpu:threads=1"


class Own(nn.Module):
    """A function as a layer."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def seeded(make):
    torch.manual_seed(0)
    return make()


def with_a_function(function):
    """A step of a network with the function between two layers."""
    return gl.Step(
        seeded(lambda: nn.Sequential(nn.Linear(20, 30), Own(function), nn.Linear(30, 5))),
        drawn(8, 20),
    )


def recorded(step, setting=A):
    return gl.record(step, setting, progress=False)


def audited(step, a=A, b=B, **options):
    return gl.audit(step, a, b, progress=False, **options)


def faults(report):
    return [finding for finding in report.findings if finding.kind != "rounding"]


def compared(operation, args, out, **kwargs):
    """An operation's results beside those of float64."""
    return forward_error(operation, operation_name(operation), args, kwargs, out)


def ratio(seen):
    """An error in units of what rounding explains."""
    return seen.error / seen.bound if seen.bound else math.inf if seen.error else 0.0
