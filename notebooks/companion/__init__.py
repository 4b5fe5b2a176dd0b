"""What belongs to the notebooks: executing them, their widgets, tables, findings and figures."""

from gpulab._lazy import attach

HOMES = {
    "anomaly": "published_page published_runs published_table round_trips",
    "cuda_random": "cuda_uniform",
    "exercises": "check",
    "explorers": "buffer_explorer saddle_explorer seeds_explorer",
    "findings": "finding",
    "image_bytes": "encode_jpeg jpeg_decoders",
    "in_the_wild": "learn_cartpole public_questions",
    "learning": "atlas blurred_losses conditions false_alarms learning_table missing_colour_losses motion_finding "
    "repeat_losses title_runs",
    "old_gpu": "cards_finding",
    "first_windows": "FirstWindow recorded_windows",
    "saddle_points": "saddle_finding",
    "scale_out": "run_program scale_finding",
    "speed": "claims_table speed_finding",
    "widgets": "bit_explorer slice_explorer",
    "workloads": "measure_speed workload",
}
NAMES = {name: home for home, names in HOMES.items() for name in names.split()}

__all__ = [*NAMES]

__getattr__ = attach(__name__, NAMES)
