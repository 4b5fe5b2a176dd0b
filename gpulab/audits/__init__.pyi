from ._audit import Audit as Audit
from ._audit import audit as audit
from ._compiled import CompiledAudit as CompiledAudit

# defined in gpulab.steps; lazy_loader takes names of this package only
from ._compiled import (
    Step as Step,
)
from ._ranks import join_ranks as join_ranks
from ._recording import record as record
from ._running_step import StepRecording as StepRecording
from ._running_step import record_step as record_step
from ._traces import Trace as Trace
