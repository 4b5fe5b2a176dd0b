"""Thresholds of the audit, each with its justification. All are relative to the size of a value."""

from __future__ import annotations

FLOAT32_ROUNDOFF = 2.0**-24  # the unit roundoff of float32
# Two devices compute sketches of the same bits that differ by float64 rounding errors.
SAME_BITS_TOLERANCE = 2.0**-44
SAME_VALUE_TOLERANCE = 2.0**-20  # two correct float32 kernels may differ by a few roundings
# Half of float32's digits: no chain of roundings in one operation loses so many.
MIN_UNEXPLAINED_DIFFERENCE = 2.0**-12
# Two operations have the same inputs if the inputs differ too little to explain that difference.
SAME_INPUTS_TOLERANCE = MIN_UNEXPLAINED_DIFFERENCE / 64
# The relative error of data and weights that were rounded to bfloat16 or a shorter format.
SHORT_FORMAT_ROUNDOFF = 2.0**-6
BOUND_SLACK = 4.0  # two correct results may differ by this many times their error bounds
# Two float64 references of one value agree within the first tolerance, plus the second times the
# deviation of the recorded value from its reference. The deviation measures the condition of the
# value. The second tolerance is about 1,000 times the ratio of the two unit roundoffs.
REFERENCE_TOLERANCE = 1e-10
REFERENCE_TOLERANCE_PER_DEVIATION = 2e-6
# A value that is compared with a tolerance wider than this does not certify the values that it was
# computed from.
MAX_CERTIFYING_TOLERANCE = 1e-6
# With a tolerance wider than this, sums cannot show whether a value is a permutation or a part of
# another value.
MAX_SUM_MATCHING_TOLERANCE = 1e-4
CANCELLATION_RESIDUE = (
    1e-12  # the size of a sum in float64 whose terms cancel, relative to the largest term
)
MIN_DIGIT_LOSS_ERROR = 2.0**-4  # a result with this relative error has lost nearly all digits
MIN_CANCELLATION_GROWTH = (
    64.0  # the ratio of the relative error of such a result to that of its inputs
)
PURE_ROUNDING_RATIO = (
    1e3  # a value that is this many times its reference consists of rounding errors
)
# Two values without a float64 reference may differ by this: in float32, and in shorter formats.
INEXACT_TOLERANCES = 2.0**-12, 2.0**-6
INEXACT_FAULT_FACTOR = (
    16.0  # two values without a reference are reported as different beyond this multiple of it
)
# Data that two executions computed outside torch, for example with NumPy, may differ by the first
# tolerance. If earlier values were rounded to a short format, the data may differ by the second
# tolerance times the deviation of these values, up to the third tolerance.
EXTERNAL_DATA_TOLERANCE = 2.0**-17
EXTERNAL_TOLERANCE_PER_DEVIATION = 4.0
MAX_EXTERNAL_DATA_TOLERANCE = 2.0**-5
MAX_EXTERNAL_AMPLIFICATION = (
    1024.0  # values computed from external data may differ by this multiple of their difference
)
# Two results of a nondeterministic operation may differ by this multiple of the spread of repeated
# executions.
MAX_REPEAT_SPREAD_RATIO = 16.0
EXPLAINED_SHARE = (
    0.5  # a finding that explains at least this share of a difference explains the difference
)
# An update is lost if at least this share of the numbers that change in float64 keep their old
# value.
LOST_UPDATE_SHARE = 0.5
NEGLIGIBLE_SHARE = (
    0.01  # a finding that explains less than this share of the difference comes after rounding
)

SHORT_FORMATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
# Operations with discontinuities: if two inputs lie close to an edge, two correct results may lie
# on opposite sides of it. They include optimizers that divide a gradient by its size, so that only
# the sign of a gradient close to zero remains.
_DISCONTINUOUS_OPERATIONS = """
    adaptive_max_pool2d addcdiv amax amin aminmax argmax argmin bucketize ceil clamp clamp_max
    clamp_min cummax cummin elu_backward eq floor floor_divide fmod _foreach_addcdiv frac
    fractional_max_pool2d _fused_adam _fused_adamw ge gt hardswish hardswish_backward hardtanh
    hardtanh_backward huber_loss_backward isfinite kthvalue le leaky_relu_backward lt max
    max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices maximum
    median min minimum mode msort multinomial ne _prelu_kernel_backward relu remainder round
    searchsorted sgn sign smooth_l1_loss_backward sort threshold_backward _to_copy topk trunc
    _unique2 unique_consecutive where
"""
DISCONTINUOUS_OPERATIONS = frozenset(_DISCONTINUOUS_OPERATIONS.split())
