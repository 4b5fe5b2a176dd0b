from .film_strips import frames as frames
from .film_strips import predictions as predictions
from .film_strips import reconstructions as reconstructions
from .instruments import roofline as roofline
from .runs import curves as curves
from .runs import differences as differences
from .runs import losses as losses
from .saddles import escape_law as escape_law
from .saddles import saddle_surface as saddle_surface
from .saddles import spectrum as spectrum

# defined in gpulab.picture; lazy_loader takes names of this package only
from .theme import (
    Picture as Picture,
)
