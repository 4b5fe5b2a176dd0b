"""What belongs to the notebooks: executing them, their widgets, tables, findings and figures."""

from gpulab._lazy import attach

NAMES = {
    "spectrum": "old_gpu",
    "prices": "old_gpu",
    "divergence": "old_gpu",
    "factor_effects": "floating_point_figures",
    "decoded": "floating_point_figures",
    "shared_memory": "anomaly",
    "FactorTable": "floating_point",
    "anomaly_finding": "anomaly",
    "anomaly_table": "anomaly",
    "anomaly_verdicts": "anomaly",
    "bit_explorer": "widgets",
    "cards_finding": "old_gpu",
    "cards_table": "old_gpu",
    "covariance_spectrum": "old_gpu",
    "factor_table": "floating_point",
    "first_window": "anomaly",
    "published_network": "chainer_reference",
    "recorded_cards_audit": "old_gpu",
    "recorded_measurements": "floating_point",
    "recorded_prices": "old_gpu",
    "saddle_finding": "saddle_points",
    "slice_explorer": "widgets",
}

__all__ = [*NAMES]

__getattr__ = attach(__name__, NAMES)
