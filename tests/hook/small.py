"""A job with hooks that takes no time."""

from typing import Any

from tests.support.tiny_jobs import make_gpt
from tests.test_values import TrainLookup


def job(directory: Any, *hooks: Any, job_class: type[TrainLookup] = TrainLookup, **changes: Any) -> TrainLookup:
    """A table of tokens that trains for 8 steps, with a row each and an evaluation every other step."""
    return make_gpt(
        directory, job_class, **{"config.eval.every_steps": 2, "config.eval.batches": 1, "hooks": [*hooks], **changes}
    )
