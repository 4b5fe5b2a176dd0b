from ._instruments import roofline as roofline
from ._runs import curves as curves
from ._runs import differences as differences
from ._runs import losses as losses
from ._saddles import escape_law as escape_law
from ._saddles import saddle_surface as saddle_surface
from ._saddles import spectrum as spectrum
from .film_strips import frames as frames
from .film_strips import predictions as predictions
from .film_strips import reconstructions as reconstructions

# defined in gpulab.picture; lazy_loader takes names of this package only
from .theme import (
    Picture as Picture,
)
