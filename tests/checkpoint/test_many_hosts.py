"""What the hosts of a pod read and write together, as `tests.benchmarks.scale` counts it."""

from collections import Counter
from pathlib import Path

import pytest

from tests.benchmarks.scale import Pod


def save_and_restore(num_hosts: int, scratch: Path) -> tuple["Counter[str]", "Counter[str]"]:
    pod = Pod(num_hosts, 2, 3, scratch)
    pod.save()
    saved, pod.requests = pod.requests, Counter()
    pod.restore_one()
    return saved, pod.requests


def test_a_save_makes_two_objects_for_each_host_and_a_restore_reads_one_table(tmp_path: Path) -> None:
    small, large = (save_and_restore(number, tmp_path / str(number)) for number in (3, 12))
    for (saved, restored), num_hosts in ((small, 3), (large, 12)):
        assert saved["put"] == 2 * num_hosts + 1, "arrays and table of each host, and the manifest"
        # On the mesh that has saved them a host needs what it has written itself.
        num_blocks = 2 * 3
        assert restored == {"list": 1, "get": 1 + 1 + num_blocks}


@pytest.mark.parametrize("act", ["start", "reduce_places", "gather_names", "find_parts", "stop", "save"])
def test_calls_and_bytes_of_the_coordinator_grow_with_the_hosts(act: str, tmp_path: Path) -> None:
    calls, num_bytes = [], []
    for num_hosts in (4, 16):
        pod = Pod(num_hosts, 2, 3, tmp_path / str(num_hosts))
        getattr(pod, act)()
        calls.append(pod.coordinator.num_calls)
        num_bytes.append(pod.coordinator.num_bytes)
    assert calls[1] <= 4 * 1.3 * calls[0]
    if act != "gather_names":  # whose values all differ, so each process needs as many as there are
        assert num_bytes[1] <= 4 * 1.3 * num_bytes[0]
