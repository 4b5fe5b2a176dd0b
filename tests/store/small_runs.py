"""A history of two windows, for runs that nobody trained."""

import pandas as pd

HISTORY = pd.DataFrame({"window": [0, 1], "step": [1, 2], "loss": [0.5, 0.25], "seconds": [0.1, 0.2]})
