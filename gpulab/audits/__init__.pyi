from .audits import Audit as Audit
from .audits import audit as audit
from .compiled import CompiledAudit as CompiledAudit
from .recording import record as record
from .steps import Step as Step
from .traces import Trace as Trace
