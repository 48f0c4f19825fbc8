"""How a job counts its steps: in whole numbers, never backwards, never beyond the end. Else nothing is committed."""

from typing import Any

from runner.errors import MiscountError

_LONGEST_VALUE = 60  # characters of what stands in a step's place


def check_step(job: str, step: Any, last_step: int, total_steps: int) -> None:
    """Raise `MiscountError` unless `step` may stand where `last_step` was completed before.

    It may stay where it is, also beyond the total: where a checkpoint is that was made for a larger one.
    """
    if type(step) is not int:
        value = " ".join(repr(step).split())[:_LONGEST_VALUE]
        problem = f"is {value}, of type {type(step).__name__}; needs to be a plain int, from self.step += 1"
    elif step < last_step:
        problem = f"went back to {step}; only load may set it back"
    elif step > max(total_steps, last_step):
        problem = f"is {step}, beyond the end"
    else:
        return
    raise MiscountError(f"{job}: step {problem} (last step {last_step}, total_steps {total_steps}); it is not saved")


def check_end(job: str, step: Any, last_step: int, total_steps: int) -> None:
    """As `check_step`, and raise it unless the job has come to its end, now that `run` has returned."""
    check_step(job, step, last_step, total_steps)
    if step < total_steps:
        raise MiscountError(
            f"{job}: run returned at step {step} of {total_steps}: the job is not done; run must go on to total_steps"
        )
