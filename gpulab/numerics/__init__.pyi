from ._emulation import emulate as emulate
from ._formats import FORMATS as FORMATS
from ._formats import round_to as round_to
