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
    from gpulab.errors import UsageError as UsageError
    from gpulab.numerics.emulation import emulate as emulate
    from gpulab.passports import passport as passport
    from gpulab.saddles.hessians import hessian as hessian
    from gpulab.search.reproduction import reproduce as reproduce
    from gpulab.settings import Setting as Setting
    from gpulab.settings import available_settings as available_settings
    from gpulab.settings import float32_products as float32_products
    from gpulab.settings import setting as setting
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

# Names that stood here in 0.1.0 and have moved into the packages.
ALIASES = {
    "Autoencoder": "models.autoencoders",
    "FactorTable": "companion.floating_point",
    "FirstWindow": "companion.first_windows",
    "Guard": "diagnostics.guards",
    "Hessian": "saddles.hessians",
    "LinearAutoencoder": "models.autoencoders",
    "Overwritten": "diagnostics.guards",
    "OverwrittenWarning": "errors",
    "PredNet": "models.prednet",
    "Reproduction": "search.reproduction",
    "SpectralDensity": "saddles.spectrum",
    "Trace": "diagnostics.traces",
    "Whitener": "models.autoencoders",
    "anomaly_finding": "companion.anomaly",
    "anomaly_table": "companion.anomaly",
    "available_decoders": "data.jpeg",
    "bit_explorer": "companion.widgets",
    "bounds": "device.rooflines",
    "cards_finding": "companion.old_gpu",
    "cards_table": "companion.old_gpu",
    "compare_decoders": "data.jpeg",
    "conversion_check": "device.operations:byte_round_trip",
    "covariance_spectrum": "companion.old_gpu",
    "critical_losses": "saddles.theory",
    "curvature_along": "saddles.curvature",
    "decode_jpeg": "data.jpeg",
    "encode_jpeg": "data.jpeg",
    "escape": "saddles.escapes",
    "escape_table": "saddles.escapes",
    "factor_table": "companion.floating_point",
    "find_critical_point": "saddles.critical",
    "first_bit": "numerics.sums",
    "first_window": "companion.anomaly",
    "flip_bit": "models.base",
    "fma": "numerics.sums",
    "format_bits": "numerics.sums",
    "fused_operations": "device.operations",
    "growth": "companion.growths",
    "index": "saddles.spectrum",
    "lanczos": "saddles.eigen",
    "landscape": "saddles.landscapes",
    "linear_autoencoder_saddle": "saddles.theory",
    "most_negative": "saddles.spectrum",
    "product_errors": "numerics.sums",
    "published_network": "companion.first_windows",
    "recorded_cards_audit": "companion.old_gpu",
    "recorded_curvature": "saddles.curvature",
    "recorded_escapes": "saddles.escapes",
    "recorded_measurements": "companion.floating_point",
    "recorded_prices": "companion.old_gpu",
    "recorded_rooflines": "device.rooflines",
    "repeatability": "device.operations",
    "round_to": "numerics.formats",
    "saddle_finding": "companion.saddle_points",
    "seeds_needed": "stats.power",
    "shuffled_sums": "numerics.sums",
    "slice_explorer": "companion.widgets",
    "spectral_density": "saddles.spectrum",
    "summation": "numerics.sums",
    "trace": "saddles.spectrum",
    "ulp_distance": "numerics.formats",
    "variance_components": "stats.variance",
    "working_threads": "settings",
}

__all__ = [*NAMES, *PACKAGES]

__getattr__ = attach(__name__, {**dict.fromkeys(PACKAGES, ""), **ALIASES, **NAMES})


def __dir__() -> list[str]:
    return sorted(__all__)
