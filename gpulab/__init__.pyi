"""The public names and where they are defined, for editors, type checkers and `__init__.py`, which
imports them on first use.
"""

from . import audits as audits
from . import data as data
from . import device as device
from . import guards as guards
from . import models as models
from . import numerics as numerics
from . import plots as plots
from . import saddles as saddles
from . import stats as stats
from . import store as store
from . import testing as testing
from . import training as training
from .audits._audit import audit as audit
from .audits._recording import record as record
from .audits._running_step import record_step as record_step
from .data._datasets import load as load
from .device._roofline import roofline as roofline
from .errors import DataError as DataError
from .errors import GpulabError as GpulabError
from .errors import OverwrittenError as OverwrittenError
from .errors import OverwrittenWarning as OverwrittenWarning
from .errors import UsageError as UsageError
from .guards._guard import guard as guard
from .numerics._emulation import emulate as emulate
from .numerics._emulation import float32_products as float32_products
from .passports import passport as passport
from .saddles._hessian import hessian as hessian
from .settings import Setting as Setting
from .settings import available_settings as available_settings
from .settings import setting as setting
from .stats._verdict import verdict as verdict
from .steps import Step as Step
from .store._tables import recorded_runs as recorded_runs
from .store._tables import runs as runs
from .training._experiment import Experiment as Experiment
from .training._experiment import seed_runs as seed_runs
from .training._profiles import profile as profile
from .training._run import train as train

__version__: str
PACKAGES: tuple[str, ...]
__all__: list[str]
