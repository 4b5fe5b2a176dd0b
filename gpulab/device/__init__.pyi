from .rooflines import Placement as Placement
from .rooflines import bounds as bounds
from .rooflines import place as place
from .rooflines import recorded_rooflines as recorded_rooflines
from .rooflines import roofline as roofline
