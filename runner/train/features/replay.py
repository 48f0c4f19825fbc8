"""Replayed steps of a run (`config.train.replay_every_steps`); see `runner.train.replay` for what a replay does."""

from typing import Any

import jax

from runner.attempts.attempt import Attempt
from runner.checkpoint.save import Checkpointer
from runner.config import TrainerConfig
from runner.errors import DeviceError
from runner.job import RestoreableJob
from runner.process import report_faulty_host
from runner.train.feature import ExecutableProgram, Feature, StepResults
from runner.train.replay import DeviceFault
from runner.train.state import TrainState
from runner.train.step import Batch


class Replay(Feature):
    """Replays of the first step after a restore, and then of every `replay_every_steps`.

    Attributes:
        verified_step: last step that a replay has verified, or that was restored.
    """

    key = "train.replay_every_steps"
    compares_gradients = True

    def __init__(self, config: TrainerConfig[Any], run_config: TrainerConfig[Any]):
        super().__init__(config, run_config)
        self._job: RestoreableJob | None = None  # from the first restore on
        self._is_just_restored = True
        self.verified_step = 0

    @staticmethod
    def is_on(config: TrainerConfig[Any]) -> bool:
        """Return True if the config asks for replays."""
        return config.train.replay_every_steps is not None

    def on_restored(self, job: RestoreableJob) -> None:
        """Replay the next step, and begin to verify at the restored one."""
        self._job, self._is_just_restored, self.verified_step = job, True, job.step

    def execute(
        self, program: ExecutableProgram, step: int, state: TrainState, batch: Batch, key: jax.Array
    ) -> StepResults:
        """Make optimizer step `step`, and wait for the device if it is replayed.

        Raises `DeviceError` if the gradients differ. What was saved since the last replay is discarded.
        """
        every_steps = self.config.train.replay_every_steps
        assert every_steps is not None, "the feature is on"
        assert self._job is not None, "the job has a state"
        if not self._is_just_restored and step % every_steps != 0:
            return program.replayed.run(state, batch, key)
        state, loss, meta, fault = program.replayed.compare(state, batch, key)
        if fault is not None:
            raise _discard_unverified(self._job.attempt, self._job.checkpointer, fault, step, self.verified_step)
        self._is_just_restored, self.verified_step = False, step
        return state, loss, meta


def _discard_unverified(
    attempt: Attempt, checkpointer: Checkpointer, fault: DeviceFault, step: int, verified: int
) -> DeviceError:
    """Discard what was saved after step `verified`, and return the error that ends the run."""
    processes = sorted({device.process_index for device in fault.devices})
    attempt.record(
        "device_fault",
        step,
        devices=[device.id for device in fault.devices],
        processes=processes,
        hosts=[attempt.environment["hosts"][process] for process in processes] if attempt.hosts.is_main else [],
        parameters=fault.parameters,
        verified=verified,
    )
    if processes == [attempt.hosts.process_id]:
        report_faulty_host()
    # Checkpoints since then may hold wrong updates.
    if checkpointer.discard_after(verified, f"at step {step}, {fault}"):
        follows = f"checkpoints after step {verified} are in quarantine"
    else:
        follows = f"no checkpoint of step {verified} or earlier is left, so the newest one is kept"
    return DeviceError(f"step {step}: {fault}; the update was not applied, and {follows}")
