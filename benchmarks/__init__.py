"""Scripts that measure gpulab: its speed, its correctness, and what other libraries do.

They import what they share as `benchmarks.measuring`, which the editable installation of a clone finds. Without one,
`python -m benchmarks.speed.costs` from the root of the clone does the same as `python benchmarks/speed/costs.py`.
"""
