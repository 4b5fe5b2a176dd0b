from .findings import Overwritten as Overwritten
from .guards import Guard as Guard
from .guards import guard as guard
