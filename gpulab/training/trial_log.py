"""A search that survives: Optuna's study in a file that one process at a time writes, line by line."""

from __future__ import annotations

import contextlib
import json
import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpulab.errors import DataError, GpulabError, UsageError
from gpulab.training.objective import optional
from gpulab.training.search import Question, key

NAME = "reproduce"


class Study:
    """The trials of one question, as a context: inside it, nobody else may use the file.

    A trial that a killed process left running, and one that failed before this process came, counts no
    longer: its point is one of `left`, and the losses that it had are kept.
    """

    def __init__(self, file: Path, question: Question) -> None:
        self.file, self.question = file, question
        self.optuna = optional("optuna")
        self.owner = optional("filelock").FileLock(f"{file}.owner", timeout=0)
        self.stack = contextlib.ExitStack()

    def __enter__(self) -> Study:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.owner.acquire()
        except optional("filelock").Timeout:
            raise UsageError(f"{self.file}: another process is at work on this study") from None
        except OSError as error:
            raise GpulabError(f"{self.file}: cannot be written: {error}") from None
        with contextlib.ExitStack() as stack:
            stack.callback(self.owner.release)
            stack.enter_context(self._quietly())
            self.study = self._opened()
            self._take_up()
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def tried(self) -> list[Any]:
        """The trials that count, in the order in which they began."""
        states = self.optuna.trial.TrialState
        every = self.study.get_trials(deepcopy=False, states=(states.COMPLETE, states.PRUNED, states.FAIL))
        aside = self._aside()
        return [trial for trial in every if trial.number not in aside and "passed over" not in trial.user_attrs]

    def left(self) -> list[dict[str, Any]]:
        """The points of trials that were killed or failed and have not been tried again."""
        aside, seen = self._aside(), {key(trial.params) for trial in self.tried()}
        points = [trial.params for trial in self.study.get_trials(deepcopy=False) if trial.number in aside]
        whole = {key(point): point for point in points if len(point) == len(self.question.factors)}
        return [point for text, point in whole.items() if text not in seen]

    def losses(self, point: Mapping[str, Any]) -> dict[int, float]:
        """The losses written down for a point, by seed; NaN for a diverged run."""
        found: dict[int, float] = {}
        for trial in self.study.get_trials(deepcopy=False):
            if key(trial.params) == key(point):
                found |= losses_of(trial)
        return found

    def begin(self, point: Mapping[str, Any]) -> Any:
        """A trial of this point."""
        samplers = self.optuna.samplers
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self.optuna.exceptions.ExperimentalWarning)
            self.study.sampler = samplers.PartialFixedSampler(dict(point), samplers.RandomSampler(seed=0))
        return self._ask(math.inf)

    def propose(self, within: float) -> Any:
        """A trial of a point that the sampler picks, ranges no further than `within` from the original."""
        # Seeded by what came before, so that a search that was interrupted goes the way of one that was not.
        seed = len(self.study.get_trials(deepcopy=False))
        self.study.sampler = self.optuna.samplers.TPESampler(seed=seed, n_startup_trials=1)
        return self._ask(within)

    def pass_over(self, trial: Any) -> None:
        """End a trial that is no news."""
        trial.set_user_attr("passed over", True)
        self.study.tell(trial, state=self.optuna.trial.TrialState.FAIL)

    def write_losses(self, trial: Any, losses: Mapping[int, float]) -> None:
        """Write down what is known of a trial."""
        trial.set_user_attr("losses", {str(seed): _json(loss) for seed, loss in sorted(losses.items())})

    def fail(self, trial: Any, error: BaseException) -> None:
        """End a trial that raised."""
        said = str(error) if isinstance(error, GpulabError) else f"{type(error).__name__}: {error}"
        trial.set_user_attr("error", said)
        self.study.tell(trial, state=self.optuna.trial.TrialState.FAIL)

    def finish(self, trial: Any, distance: float, violation: float, pruned: str) -> None:
        """End a trial; `violation` is 0 or less for one that is equivalent, `pruned` the reason or empty."""
        trial.set_constraint("equivalent", violation)
        if pruned:
            trial.set_user_attr("pruned", pruned)
            trial.report(distance, 0)
            self.study.tell(trial, state=self.optuna.trial.TrialState.PRUNED)
        else:
            self.study.tell(trial, distance)

    def _ask(self, within: float) -> Any:
        return self.study.ask({factor.name: factor.distribution(within) for factor in self.question.factors})

    def _opened(self) -> Any:
        Path(f"{self.file}.lock").unlink(missing_ok=True)  # Optuna's, of a process that was killed: we own the file
        _drop_half_a_line(self.file)
        journal = self.optuna.storages.journal
        try:
            storage = self.optuna.storages.JournalStorage(journal.JournalFileBackend(str(self.file)))
            if self.file.stat().st_size == 0:
                study = self.optuna.create_study(storage=storage, study_name=NAME, direction="minimize")
                study.set_user_attr("question", self.question.text)
            else:
                study = self.optuna.load_study(storage=storage, study_name=NAME)
            asked = dict(study.user_attrs["question"])
            for trial in study.trials:
                losses_of(trial)
        # A damaged file can make any of its readers stumble, over anything.
        except Exception as error:
            raise DataError(
                f"{self.file}: not a whole study of gl.reproduce ({type(error).__name__}: {error}); "
                "move it away to begin anew"
            ) from None
        wanted = json.loads(json.dumps(self.question.text))
        if other := [name for name in wanted if asked.get(name) != wanted[name]]:
            raise DataError(f"{self.file}: a study with another {', another '.join(other)}; name another file")
        return study

    def _take_up(self) -> None:
        """Let no longer count what a killed process left running, and what failed before."""
        states, aside = self.optuna.trial.TrialState, set(self._aside())
        for trial in self.study.get_trials(deepcopy=False):
            if trial.state == states.RUNNING:
                self.study.tell(trial.number, state=states.FAIL)
            if trial.state == states.RUNNING or "error" in trial.user_attrs:
                aside.add(trial.number)
        self.study.set_user_attr("aside", sorted(aside))

    def _aside(self) -> list[int]:
        return self.study.user_attrs.get("aside", [])

    @contextlib.contextmanager
    def _quietly(self) -> Iterator[None]:
        """Without a line of Optuna's log for each trial."""
        logging = self.optuna.logging
        before = logging.get_verbosity()
        logging.set_verbosity(logging.ERROR)
        try:
            yield
        finally:
            logging.set_verbosity(before)


def losses_of(trial: Any) -> dict[int, float]:
    """What a trial has written down, by seed; NaN for a diverged run."""
    kept = trial.user_attrs.get("losses", {})
    return {int(seed): math.nan if loss is None else float(loss) for seed, loss in kept.items()}


def _json(loss: float) -> float | None:
    """JSON has no NaN."""
    return loss if math.isfinite(loss) else None


def _drop_half_a_line(file: Path) -> None:
    """A process that was killed while it wrote leaves half a line; what is appended to it would be lost."""
    if not file.exists():
        return
    with file.open("rb+") as stream:
        text = stream.read()
        if text and not text.endswith(b"\n"):
            stream.truncate(text.rfind(b"\n") + 1)
