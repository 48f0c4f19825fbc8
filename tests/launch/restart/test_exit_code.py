"""The combination of the exit codes of a job's processes."""

import pytest

from launch.supervisor import combine_exit_codes
from runner.process import STOP_SIGNALS


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([0], 0),
        ([0, 0], 0),
        ([75, 75], 75),
        ([0, 75], 75),
        ([-9, 76], 76),
        ([76, 76], 76),
        ([75, 76], 76),
        ([-9], 76),
        ([-6, 0], 76),
        ([-15, 75], 76),
        *(([-number, 75], 76) for number in STOP_SIGNALS),  # killed before it installed its handlers
        ([2, 2], 2),
        ([2, 76], 2),
        ([1, 76], 1),
        ([1, -9], 1),
        ([1, 2], 1),
        ([-11, 76], 1),
        ([3], 1),
        ([139, 0], 1),
    ],
)
def test_the_job_exits_with_its_most_specific_code(codes, code):
    assert combine_exit_codes(codes) == code
    assert combine_exit_codes(codes[::-1]) == code
