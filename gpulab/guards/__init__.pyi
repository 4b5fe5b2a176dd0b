from ._findings import Overwritten as Overwritten
from ._guard import Guard as Guard
from ._guard import guard as guard
