"""Feature: everything that one key of `config` switches on, in one file of `runner.train.features` or of an experiment.

A feature may have a branch of the train state that each step updates or by which it judges the step (`make_auxiliary`,
see `runner.train.auxiliary`), change the traced step (`wrap`), and take part in the run on the host. Its methods are
called in the order of the registry, and do nothing by default. No feature knows another one.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import jax

from runner.checkpoint.manifest import Manifest
from runner.config import TrainerConfig
from runner.data import SkippedBatches
from runner.errors import DivergedError
from runner.job import RestoreableJob
from runner.metrics.meta import Meta, RowValue
from runner.metrics.rows import Row
from runner.spec import Trajectory
from runner.storage import JsonObject
from runner.train.auxiliary import AuxiliaryState
from runner.train.evaluators import Evaluator, Validation
from runner.train.replay import ReplayedStep
from runner.train.state import TrainState
from runner.train.step import Batch

# (state, batch (S, B, ...), key of the step, S) -> (state, loss, meta)
TrainStep = Callable[[TrainState, Batch, jax.Array, int], tuple[TrainState, jax.Array, dict[str, jax.Array]]]
StepResults = tuple[TrainState, jax.Array, Meta]


class RewindError(DivergedError):
    """A feature asks for the run to go back to an earlier checkpoint. All hosts raise it at the same place.

    Attributes:
        feature: the feature, whose `rewind` chooses the checkpoint.
        first: first step of the cause.
        step: step at which the cause was known.
        reason: values of that step.
    """

    def __init__(self, feature: "Feature", first: int, step: int, reason: str):
        super().__init__(f"step {step}: training diverged: {reason}, from step {first} on")
        self.feature, self.first, self.step, self.reason = feature, first, step, reason


class ExecutableProgram(Protocol):
    """Program whose train step is compiled."""

    @property
    def executable(self) -> jax.stages.Compiled:
        """Compiled train step."""

    @property
    def replayed(self) -> ReplayedStep:
        """Compiled train step that can compute its gradients again, if a feature `compares_gradients`."""


class Feature:
    """Base of all features. Several are made of a config in which `is_on`; that of the whole run lives with its job.

    Attributes:
        key: dotted key below `config` that switches the feature on.
        compares_gradients: True if the compiled step must be able to compute its gradients with other devices, see
            `runner.train.replay`. It then takes further arguments, which `execute` gives it.
        derived_keys: keys of the trajectory that follow from its other keys, so that they are not compared.
        config: config of the run, or of one of its stages.
        run_config: config of the run, which precedes its stages.
        skipped: ranges of batches that the run has skipped because of the feature.
    """

    key: ClassVar[str]
    compares_gradients: ClassVar[bool] = False
    derived_keys: ClassVar[Sequence[str]] = ()

    def __init__(self, config: TrainerConfig[Any], run_config: TrainerConfig[Any]):
        self.config, self.run_config = config, run_config
        self.skipped: Sequence[SkippedBatches] = ()

    @staticmethod
    def is_on(config: TrainerConfig[Any]) -> bool:
        """Return True if the config switches the feature on."""
        raise NotImplementedError

    # Traced.

    def make_auxiliary(self) -> AuxiliaryState | None:
        """Return the branch of the train state that the feature keeps, by default none. May be called several times."""
        return None

    def wrap(self, step: TrainStep) -> TrainStep:
        """Return the train step with the feature; by default `step` itself, so that its program does not change.

        A replayed step runs twice, and a step without a target not at all. What must count each step once belongs into
        the `judge` or the `update` of the auxiliary state.
        """
        return step

    # Before the first step. `job` is the run's job.

    def select_micro_batches(self, sizes: Sequence[int], num_shards: int) -> list[int]:
        """Return those of the micro-batch sizes (examples per device) that the feature allows.

        Raises `InvalidError` if it allows none.
        """
        return [*sizes]

    def validate_newest(self, job: RestoreableJob, newest: Manifest) -> None:
        """Raise `ResumeError` if the run cannot go on from its newest checkpoint. Process 0 only."""

    def before_restore(self, job: RestoreableJob) -> None:
        """Complete what a killed attempt has begun. Called on every host."""

    def on_restored(self, job: RestoreableJob) -> None:
        """Adapt the job to its state, which was restored, initialised or loaded. Called on every host."""

    def identity(self) -> Trajectory:
        """Return keys of the run's trajectory that the feature adds, beyond those of the config."""
        return {}

    def is_discarded(self, saved: Trajectory, step: int) -> bool:
        """Return True if a state that was saved at `step` with this trajectory is no longer part of the run."""
        return False

    # During training, on every host.

    def execute(
        self, program: ExecutableProgram, step: int, state: TrainState, batch: Batch, key: jax.Array
    ) -> StepResults | None:
        """Make optimizer step `step` and return its results; None, the default, to run the compiled step as it is.

        The first feature that returns results has made the step.
        """
        return None

    def watch(self, step: int, loss: float, meta: Mapping[str, Any], values: dict[str, RowValue]) -> bool:
        """Look at the fetched results of a step. Return True if its update was skipped, so that it may be not finite.

        The feature may add to `values`, the metrics of its row. Raises `DivergedError` if the run must end, and
        `RewindError` if it must go back.
        """
        return False

    def is_suspect(self, row: Row) -> bool:
        """Return True if a `RewindError` of this feature may still discard the step of a row."""
        return False

    def rewind(
        self,
        job: RestoreableJob,
        cause: RewindError,
        data_start: int,
        batch_examples: int,
        list_rows_after: Callable[[int], Sequence[Row]],
    ) -> list[int]:
        """Return the steps of the checkpoints at which the run may continue after `cause`, the best one first.

        If it restores none of them, the run cannot go on. Raises `DivergedError` if it cannot go back.

        Args:
            job: the run's job.
            cause: error of this feature.
            data_start: start of the data of the stage in which the cause begins: that of the first one of successive
                stages with the same data and batch size.
            batch_examples: examples of a step in this stage.
            list_rows_after: function that returns the rows after a step.
        """
        raise NotImplementedError

    def make_evaluators(self, validation: Validation) -> Sequence[Evaluator]:
        """Return evaluators beside those of the job."""
        return ()

    def save_fields(self, state: TrainState) -> JsonObject:
        """Return fields for the manifest of a save of this state, below `features.<key>`. May wait for the device."""
        return {}

    def find_earliest_rewind(self, state: TrainState) -> int | None:
        """Return the earliest step to which `rewind` may go back from this state; None if it never does.

        Retention keeps a checkpoint of that step, or one before it. May wait for the device.
        """
        return None
