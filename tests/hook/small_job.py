"""A small and fast job with hooks."""

from typing import Any

from tests.support.tiny_jobs import make_gpt
from tests.test_values import TrainLookup


def make_job(directory: Any, *hooks: Any, job_class: type[TrainLookup] = TrainLookup, **changes: Any) -> TrainLookup:
    """Return a lookup-table job of 8 steps, with a row per step and an evaluation every other step."""
    return make_gpt(
        directory, job_class, **{"config.eval.every_steps": 2, "config.eval.batches": 1, "hooks": [*hooks], **changes}
    )
