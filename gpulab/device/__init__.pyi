from ._roofline import Placement as Placement
from ._roofline import bounds as bounds
from ._roofline import place as place
from ._roofline import recorded_rooflines as recorded_rooflines
from ._roofline import roofline as roofline
