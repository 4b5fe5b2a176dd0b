"""Scripts that measure gpulab's speed and correctness, and compare it with other libraries.

Run them from the root of a clone: `python benchmarks/speed/costs.py`. They import
`benchmarks.measuring`, which an editable installation of the clone makes importable. Without an
editable installation, set `PYTHONPATH=.`.
"""
