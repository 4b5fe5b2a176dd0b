"""What belongs to the notebooks: executing them, their widgets, tables, findings and figures."""

from gpulab._lazy import attach

HOMES = {
    "anomaly": "anomaly_finding anomaly_table dose_finding dose_response first_window published_figure published_page "
    "published_runs published_table recorded_dose round_trips shared_memory",
    "atlases": "atlas atlas_table atlas_verdict",
    "cuda_random": "cuda_uniform",
    "exercises": "check",
    "explorers": "audit_explorer saddle_explorer seeds_explorer training_explorer",
    "findings": "finding",
    "image_bytes": "byte_round_trip decoded encode_jpeg jpeg_decoders numbers_of_bytes",
    "in_the_wild": "accuracies cartpole_runs copies_under_way delivered foreseen image_loader inbox learn_cartpole "
    "microphone pendulum public_questions spectrograms wild_finding",
    "learning": "blurred_losses false_alarms learning_table longer_runs missing_colour_losses motion_finding "
    "recorded_films repeat_losses title_runs",
    "old_gpu": "cards_finding cards_table covariance_spectrum divergence prices recorded_cards_audit recorded_prices "
    "spectrum",
    "first_windows": "FirstWindow published_network recorded_windows",
    "saddle_points": "saddle_finding",
    "scale_out": "atlas_plan batch_gains batch_law descent_losses large_batches program_source recorded_scale_out "
    "run_program scale_finding scaling_lines",
    "speed": "backends claims_table cost_table crossover end_to_end kernels ladder precision_verdict recorded_speed "
    "scaling shares small_work speed_finding speed_table",
    "variance": "VarianceComponents variance_components",
    "widgets": "bit_explorer slice_explorer",
    "workloads": "ceilings measure_speed workload",
}
NAMES = {name: home for home, names in HOMES.items() for name in names.split()}

__all__ = [*NAMES]

__getattr__ = attach(__name__, NAMES)
