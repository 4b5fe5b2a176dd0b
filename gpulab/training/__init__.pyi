from .experiment import Experiment as Experiment
from .experiment import seed_runs as seed_runs
from .profiles import profile as profile
from .run import Run as Run
from .run import train as train
