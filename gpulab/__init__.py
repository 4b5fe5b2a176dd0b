"""gpulab: does the device change what a neural network learns, and if so, which factor does it?

What most people call stands here, the rest in the packages, as in scipy and torch. Names are imported when
first used, so that `import gpulab` is light and the environment of a setting can still be put in force
before torch loads.
"""

from __future__ import annotations

import os

from gpulab._lazy import attach

# OpenMP's threads wait by spinning, which brings two programs that share the cores nearly to a standstill, unless
# they give up sooner; alone that costs a few per cent. It is read when torch loads.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

TYPE_CHECKING = False  # as typing's, which takes a while to load: the command line must hear Ctrl-C by then

if TYPE_CHECKING:
    from gpulab import companion as companion
    from gpulab import data as data
    from gpulab import device as device
    from gpulab import diagnostics as diagnostics
    from gpulab import models as models
    from gpulab import numerics as numerics
    from gpulab import plots as plots
    from gpulab import saddles as saddles
    from gpulab import search as search
    from gpulab import stats as stats
    from gpulab import training as training
    from gpulab.data.datasets import load as load
    from gpulab.device.rooflines import roofline as roofline
    from gpulab.diagnostics.audits import audit as audit
    from gpulab.diagnostics.guards import guard as guard
    from gpulab.diagnostics.steps import Step as Step
    from gpulab.diagnostics.traces import record as record
    from gpulab.errors import DataError as DataError
    from gpulab.errors import GpulabError as GpulabError
    from gpulab.errors import OverwrittenError as OverwrittenError
    from gpulab.errors import OverwrittenWarning as OverwrittenWarning
    from gpulab.errors import UsageError as UsageError
    from gpulab.numerics.emulation import emulate as emulate
    from gpulab.passports import passport as passport
    from gpulab.saddles.hessians import hessian as hessian
    from gpulab.search.reproduction import reproduce as reproduce
    from gpulab.settings import Setting as Setting
    from gpulab.settings import available_settings as available_settings
    from gpulab.settings import float32_products as float32_products
    from gpulab.settings import setting as setting
    from gpulab.settings import working_threads as working_threads
    from gpulab.stats.verdicts import verdict as verdict
    from gpulab.training.experiment import Experiment as Experiment
    from gpulab.training.protocol import profile as profile
    from gpulab.training.run import train as train
    from gpulab.training.seeds import seed_runs as seed_runs
    from gpulab.training.store import recorded_runs as recorded_runs
    from gpulab.training.store import runs as runs

__version__ = "0.2.0"

NAMES = {
    "DataError": "errors",
    "Experiment": "training.experiment",
    "GpulabError": "errors",
    "OverwrittenError": "errors",
    "OverwrittenWarning": "errors",
    "Setting": "settings",
    "Step": "diagnostics.steps",
    "UsageError": "errors",
    "audit": "diagnostics.audits",
    "available_settings": "settings",
    "emulate": "numerics.emulation",
    "float32_products": "settings",
    "guard": "diagnostics.guards",
    "hessian": "saddles.hessians",
    "load": "data.datasets",
    "passport": "passports",
    "profile": "training.protocol",
    "record": "diagnostics.traces",
    "recorded_runs": "training.store",
    "reproduce": "search.reproduction",
    "roofline": "device.rooflines",
    "runs": "training.store",
    "seed_runs": "training.seeds",
    "setting": "settings",
    "train": "training.run",
    "verdict": "stats.verdicts",
    "working_threads": "settings",
}
PACKAGES = (
    "companion",
    "data",
    "device",
    "diagnostics",
    "models",
    "numerics",
    "plots",
    "saddles",
    "search",
    "stats",
    "training",
)

__all__ = [*NAMES, *PACKAGES]

__getattr__ = attach(__name__, {**dict.fromkeys(PACKAGES, ""), **NAMES})


def __dir__() -> list[str]:
    return sorted(__all__)
