"""From where on a difference says something: the thresholds of an audit, each with its reason; all are relative."""

from __future__ import annotations

ROUNDOFF = 2.0**-24  # of float32
SAME_BITS = 2.0**-44  # two devices make sketches of the same bits, which differ by float64's roundings
SAME_VALUE = 2.0**-20  # two right float32 kernels may be a few roundings apart
UNEXPLAINED = 2.0**-12  # half of float32's digits: no chain of roundings in one operation loses as many
SAME_INPUTS = UNEXPLAINED / 64  # what two operations were given counts as the same where it explains no such difference
SHORT_SIZE = 2.0**-6  # of data and weights that were rounded to bfloat16, or shorter
ROOM = 4.0  # how many times as far as their bounds say two right results may be apart
# Two float64 references coincide within this, and within this share of what the setting's own roundings made of them:
# how far these led measures the condition of the value. It is about 1,000 times the ratio of the two units.
COINCIDES = 1e-10
COINCIDES_BY_ROUNDING = 2e-6
SHARP = 1e-6  # values that are compared less sharply say nothing about those that they were made of
SHARP_ENOUGH = 1e-4  # for sums to tell whether a value is another one in another order, or a part of it
CANCELLED = 1e-12  # what is left of a sum in float64 whose terms cancel, relative to them
DIGITS_LOST = 2.0**-4  # a result that is so far from its reference has lost nearly all digits
CANCELLATION = 64.0  # how many times as large as those of its inputs the relative error of such a result is
NOTHING_BUT_ROUNDING = 1e3  # a value that is so many times its reference consists of roundings
INEXACT = 2.0**-12, 2.0**-6  # how far two values may be apart without a float64 reference: in float32, and in less
FAR = 16.0  # how many times as far as that two values without a reference are apart to be called different
# Data that two executions computed outside of torch, such as by NumPy, may be so far apart; and where values before
# them were rounded to a short format, so many times as far as these are off, up to a limit.
FROM_OUTSIDE = 2.0**-17
OUTSIDE_BY_ROUNDING, MOST_FROM_OUTSIDE = 4.0, 2.0**-5
AMPLIFIED = 1024.0  # how many times as far as what entered from outside values that follow from it may be apart
REPEATS = 16.0  # times the spread of an operation that does not repeat itself two results of it may be apart
EXPLAINED = 0.5  # the share of a difference that must go back to other findings for it to be explained by them
LOST_SHARE = 0.5  # of the numbers that an update moves in float64; if it leaves as many as they were, it is lost
LITTLE = 0.01  # the share of a difference that answers no question about it

SHORT = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
# What decides: where two inputs lie next to an edge, two right results lie on either side of it. So does an optimizer
# that divides a gradient by its size: of a gradient of next to nothing there remains the sign.
_DECIDES = """
    adaptive_max_pool2d addcdiv amax amin aminmax argmax argmin bucketize ceil clamp clamp_max clamp_min cummax cummin
    elu_backward eq floor floor_divide fmod _foreach_addcdiv frac fractional_max_pool2d _fused_adam _fused_adamw ge gt
    hardswish hardswish_backward hardtanh hardtanh_backward huber_loss_backward isfinite kthvalue le leaky_relu_backward
    lt max max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices maximum median min minimum
    mode msort multinomial ne _prelu_kernel_backward relu remainder round searchsorted sgn sign smooth_l1_loss_backward
    sort threshold_backward _to_copy topk trunc _unique2 unique_consecutive where
"""
DECIDES = frozenset(_DECIDES.split())
