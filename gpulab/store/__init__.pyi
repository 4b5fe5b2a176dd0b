from ._run_store import write_run as write_run
from ._tables import history as history
from ._tables import pack as pack
from ._tables import recorded_runs as recorded_runs
