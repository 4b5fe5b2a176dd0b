"""The public names and where they come from: for editors, type checkers and `__init__.py`, which imports them late."""

from gpulab import audits as audits
from gpulab import data as data
from gpulab import device as device
from gpulab import guards as guards
from gpulab import models as models
from gpulab import numerics as numerics
from gpulab import plots as plots
from gpulab import saddles as saddles
from gpulab import stats as stats
from gpulab import store as store
from gpulab import training as training
from gpulab.audits.audits import audit as audit
from gpulab.audits.recording import record as record
from gpulab.data.datasets import load as load
from gpulab.device.rooflines import roofline as roofline
from gpulab.errors import DataError as DataError
from gpulab.errors import GpulabError as GpulabError
from gpulab.errors import OverwrittenError as OverwrittenError
from gpulab.errors import OverwrittenWarning as OverwrittenWarning
from gpulab.errors import UsageError as UsageError
from gpulab.guards.guards import guard as guard
from gpulab.numerics.emulation import emulate as emulate
from gpulab.numerics.emulation import float32_products as float32_products
from gpulab.passports import passport as passport
from gpulab.saddles.hessians import hessian as hessian
from gpulab.settings import Setting as Setting
from gpulab.settings import available_settings as available_settings
from gpulab.settings import setting as setting
from gpulab.stats.verdicts import verdict as verdict
from gpulab.steps import Step as Step
from gpulab.store.tables import recorded_runs as recorded_runs
from gpulab.store.tables import runs as runs
from gpulab.training.experiment import Experiment as Experiment
from gpulab.training.experiment import seed_runs as seed_runs
from gpulab.training.profiles import profile as profile
from gpulab.training.run import train as train

__version__: str
PACKAGES: tuple[str, ...]
__all__: list[str]
