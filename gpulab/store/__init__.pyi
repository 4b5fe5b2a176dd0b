from .runs import write_run as write_run
from .tables import history as history
from .tables import pack as pack
from .tables import recorded_runs as recorded_runs
