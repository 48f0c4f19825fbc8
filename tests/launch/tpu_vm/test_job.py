"""When a job on several hosts has ended, and how."""

import pytest

from launch.tpu_vm.host import HostStatus
from launch.tpu_vm.job import find_exit_code


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([None, None], None),
        ([None, 0], None),
        ([0, None], 0),
        ([0, 0], 0),
        ([None, 76], 76),
        ([76, 1], 1),
        ([0, 2], 2),
        ([None, 137], 1),
    ],
)
def test_the_job_has_ended_when_its_first_host_is_done_or_any_has_given_up(codes, code):
    hosts = {
        (0, index): HostStatus("running" if value is None else "ended", value) for index, value in enumerate(codes)
    }
    assert find_exit_code(hosts) == code
