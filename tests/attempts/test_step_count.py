"""Validation of a job's step."""

import jax.numpy as jnp
import numpy as np
import pytest

from runner.errors import MiscountError
from runner.lifecycle import validate_end, validate_step


@pytest.mark.parametrize(("step", "last_step"), [(0, 0), (1, 0), (13, 12), (12, 12), (40, 12), (40, 40), (50, 50)])
def test_a_step_can_stay_or_increase_up_to_the_end(step, last_step):
    validate_step("a:Job", step, last_step, total_steps=40)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (13.0, "is 13.0, of type float"),
        (float("nan"), "is nan, of type float"),
        (True, "is True, of type bool"),
        ("13", "is '13', of type str"),
        (None, "is None, of type NoneType"),
        (np.int64(13), "of type int64"),
        (np.float32(13), "of type float32"),
        (np.array(13), "of type ndarray"),
        (jnp.int32(13), "of type ArrayImpl"),
        (np.zeros((100, 100)), "of type ndarray"),
        (11, "went back to 11; only load may"),
        (-1, "went back to -1"),
        (41, "is 41, beyond the end"),
    ],
    ids=str,
)
def test_an_invalid_step_is_rejected_in_one_line(step, words):
    with pytest.raises(MiscountError) as caught:
        validate_step("a:Job", step, last_step=12, total_steps=40)
    (line,) = str(caught.value).splitlines()
    assert line.startswith("a:Job: step ")
    assert words in line
    assert "(last step 12, total_steps 40)" in line
    assert caught.value.exit_code == 1


def test_a_step_beyond_a_lowered_end_cannot_increase():
    with pytest.raises(MiscountError, match="is 51, beyond the end"):
        validate_step("a:Job", 51, last_step=50, total_steps=40)


def test_the_end_is_the_last_step():
    validate_end("a:Job", 40, last_step=40, total_steps=40)
    validate_end("a:Job", 50, last_step=50, total_steps=40)
    with pytest.raises(MiscountError, match=r"^a:Job: run returned at step 39 of 40: the job is not done"):
        validate_end("a:Job", 39, last_step=39, total_steps=40)
