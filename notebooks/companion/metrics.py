"""The metrics by which runs are compared, by name. Unlike `learning`, it does not import torch."""

from __future__ import annotations

# The metrics of the comparisons. All but the first, which needs no threshold chosen by us, were
# planned in data/README.md before the runs on the anomaly were made. They were not planned for
# comparisons of a CPU with a GPU.
BEAT = "share of seeds that beat repeating the last frame"
ALL, STUCK = "final loss of all seeds", "share of seeds that did not learn"
LEARNED = "final loss of the seeds that learned"
METRICS = (BEAT, ALL, STUCK, LEARNED)
FAMILY = ("experiment", "profile", "setting", "loader")
