"""Points of a space too large to list, proposed by Optuna, which is needed for nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from gpulab.training.functions import optional
from gpulab.training.search import Dimension, Point, SearchProblem
from gpulab.training.trial_log import Trial

PROPOSALS = 30  # that may in a row be no news before the search ends


def propose(
    problem: SearchProblem, tried: Iterable[Trial], within: float | None, number: int
) -> Iterator[tuple[int, Point]]:
    """Trial numbers from `number` on with a point each, in ranges no further than `within` from the original.

    Tree-structured Parzen estimators (Akiba et al. 2019) minimise the distance under the constraint that the verdict
    is equivalent. Each is seeded by its number, so that an interrupted search goes the way of one that was not.
    """
    optuna = optional("optuna")
    states = optuna.trial.TrialState
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study()
    optuna.logging.set_verbosity(verbosity)
    for trial in (trial for trial in tried if trial.state != "failed"):
        distance, finished = problem.distance(trial.point), trial.state == "finished"
        study.add_trial(
            optuna.create_trial(
                state=states.COMPLETE if finished else states.PRUNED,
                params=trial.point,
                distributions={d.name: _distribution(d, trial.within) for d in problem.dimensions},
                value=distance if finished else None,
                intermediate_values={} if finished else {0: distance},
                constraints={"equivalent": trial.violation},
            )
        )
    for seed in range(number, number + PROPOSALS):
        study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=1)
        proposal = study.ask({d.name: _distribution(d, within) for d in problem.dimensions})
        study.tell(proposal, state=states.FAIL)  # else the sampler takes it for one that is being trained
        yield seed, proposal.params


def _distribution(dimension: Dimension, within: float | None) -> Any:
    """What Optuna draws a value from."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not dimension.is_range:
        return CategoricalDistribution(dimension.values)
    low, high = dimension.others
    if within is not None:
        factor = 2.0 ** min(within, 60)
        low, high = max(low, dimension.original / factor), min(high, dimension.original * factor)
    if isinstance(dimension.original, int):
        return IntDistribution(math.ceil(low), math.floor(high), log=True)
    return FloatDistribution(low, high, log=True)
