from ._experiment import Experiment as Experiment
from ._experiment import seed_runs as seed_runs
from ._profiles import profile as profile
from ._run import Run as Run
from ._run import train as train
