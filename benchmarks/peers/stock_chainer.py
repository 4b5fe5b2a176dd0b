"""Chainer 7.8 as its authors published it, on newer versions of Python, NumPy and CuPy.

Names that it needs and that no longer exist are replaced before it is imported. Chainer itself is
not changed.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
import types
import warnings
from pathlib import Path
from typing import Any

from gpulab.errors import GpulabError, UsageError

VERSION = "7.8.1"  # the version of all recorded runs
# 7.8.0, which the authors name, differs only in its support of CuPy.
VERSIONS = (
    "7.8.0",
    VERSION,
)
AUTHORS = "github.com/eijwat/prednet_in_chainer_py3"
INSTALL = (
    "pip install 'setuptools<70' wheel six filelock typing_extensions && "
    f"pip install --no-build-isolation --no-deps chainer=={VERSION}"
)
CLONE = f"git clone https://{AUTHORS}"
ON_A_GPU = "pip install cupy-cuda13x"  # or 12x, by the version of CUDA
HOW = f"""It needs Chainer {VERSION} (or 7.8.0) from the package index,
unchanged, and the authors' net.py:

    {INSTALL}

    {CLONE}

and on an NVIDIA GPU CuPy: {ON_A_GPU}"""
SWITCHES = {
    "CHAINER_CUDNN": "0",  # CuPy 14 has no cuDNN
    "CHAINER_USE_CUDNN": "never",
    "CHAINER_USE_IDEEP": "never",
    "CHAINER_DTYPE": "float32",
    "CHAINER_TYPE_CHECK": "0",  # a check of shapes in Python, which affects no number
    "CUPY_TF32": "0",
    "NVIDIA_TF32_OVERRIDE": "0",
}


def chainer() -> Any:
    """Import `chainer`; raise `GpulabError` with advice if it is not installed."""
    if "chainer" in sys.modules:
        return sys.modules["chainer"]
    if importlib.util.find_spec("chainer") is None:
        raise GpulabError(
            f"the published network needs Chainer {VERSION}, which is not installed: {INSTALL}"
        )
    if (installed := importlib.metadata.version("chainer")) not in VERSIONS:
        raise GpulabError(
            f"the published network needs Chainer {' or '.join(VERSIONS)}, not {installed}:"
            f" {INSTALL}"
        )
    os.environ.update(SWITCHES)
    os.environ.pop("CUPY_ENABLE_UMP", None)  # host arrays are copied to the GPU, never mapped
    # This module warns about versions of other packages. It needs pkg_resources and
    # numpy.distutils, which no longer exist.
    unchecked: Any = types.ModuleType("chainer._environment_check")
    unchecked.check = lambda: None
    sys.modules["chainer._environment_check"] = unchecked
    import numpy as np

    if not hasattr(np, "sctypes"):
        kinds = {
            "int": (np.int8, np.int16, np.int32, np.int64),
            "float": (np.float16, np.float32, np.float64),
        }
        np.sctypes = kinds  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module("chainer")
        importlib.import_module("chainer.functions.loss.mean_squared_error")
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="chainer")
    return module


def network(file: str | Path) -> Any:
    """Load the authors' `net.py`, unchanged, as a module.

    Raises:
        UsageError: If there is no such file.
        GpulabError: If it cannot be run.
    """
    path = Path(file)
    if path.is_dir():
        path /= "net.py"
    if not path.is_file():
        raise UsageError(
            f"{path}: no such file; the authors' net.py is in the folder PredNet of {AUTHORS}:"
            f" {CLONE}"
        )
    spec = importlib.util.spec_from_file_location("net", path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    try:
        spec.loader.exec_module(module)  # type: ignore[union-attr]
        module.PredNet  # noqa: B018
    except Exception as error:
        raise GpulabError(f"{path}: not the authors' network: {error!r:.200}") from None
    return module


def arrays(kind: str) -> Any:
    """Return NumPy for `cpu` and CuPy for `cuda`; raise `GpulabError` if CuPy finds no GPU."""
    if kind == "cpu":
        return importlib.import_module("numpy")
    cuda = chainer().backends.cuda
    if not cuda.available:
        why = getattr(cuda, "_resolution_error", "")
        raise GpulabError(f"the published network needs CuPy and an NVIDIA GPU ({why}): {ON_A_GPU}")
    return cuda.cupy
