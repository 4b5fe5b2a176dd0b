"""Small steps, their audits, and kernels that are wrong: what several files of this folder share."""

import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gpulab as gl
from gpulab.audits.rounding import forward_error

A, B = "cpu", "cpu:threads=1"


def drawn(*shape, seed=0):
    """Normal numbers of torch's default type, which the step in float64 changes."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def seeded(make):
    torch.manual_seed(0)
    return make()


def recorded(step, setting=A):
    return gl.record(step, setting, progress=False)


def audited(step, a=A, b=B, **options):
    return gl.audit(step, a, b, progress=False, **options)


def faults(report):
    return [finding for finding in report.findings if finding.kind != "rounding"]


def under_b():
    return torch.get_num_threads() == 1


def compared(operation, args, out, **kwargs):
    """An operation's results beside those of float64."""
    return forward_error(operation, operation._schema.name.partition("::")[2].rstrip("_"), args, kwargs, out)


def ratio(seen):
    """An error in units of what rounding explains."""
    return seen.error / seen.bound if seen.bound else math.inf if seen.error else 0.0


class FaultyKernels(TorchDispatchMode):
    """Stands below the watcher as a device does: falsifies what float32 kernels named here return."""

    def __init__(self, always=False, **kernels):
        super().__init__()
        self.kernels, self.always = kernels, always

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = operation._schema.name.partition("::")[2]
        first = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
        faulty = name in self.kernels and first is not None and first.dtype == torch.float32
        if faulty and (self.always or under_b()):
            return self.kernels[name](operation, *args, **kwargs)
        return operation(*args, **kwargs)
