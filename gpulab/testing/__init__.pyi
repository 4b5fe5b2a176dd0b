from ._assert_rounding import assert_rounding as assert_rounding
from ._assert_same import assert_same as assert_same
