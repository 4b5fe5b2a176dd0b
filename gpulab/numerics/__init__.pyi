from .emulation import emulate as emulate
from .formats import FORMATS as FORMATS
from .formats import round_to as round_to
