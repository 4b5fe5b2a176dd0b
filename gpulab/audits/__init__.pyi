from .audits import Audit as Audit
from .audits import audit as audit
from .compiled import CompiledAudit as CompiledAudit

# defined in gpulab.steps; lazy_loader takes names of this package only
from .compiled import (
    Step as Step,
)
from .recording import record as record
from .traces import Trace as Trace
