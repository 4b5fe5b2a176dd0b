from .runs import history as history
from .runs import pack as pack
from .runs import recorded_runs as recorded_runs
from .runs import write_run as write_run
