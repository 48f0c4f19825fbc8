"""A host on which the write of a save fails: process 0 learns of it at once, and the next save is not affected."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from runner.checkpoint import arrays
from runner.checkpoint.arrays import WRITE_ERRORS, ArrayWriter, WriteResult
from runner.checkpoint.blocks import Blocks
from runner.distributed.agreement import Hosts
from runner.storage import LocalStore
from tests.support.coordinator import MemoryCoordinator, run_on_all_hosts

DEADLINE_SECONDS = 60.0  # of a save; a message that is missing is waited for this long
FAILING = "fails"  # name of a leaf that the copy or the write of a host refuses


def fail_if_named(function: Any) -> Any:
    def call(*arguments: Any) -> Any:
        if any(FAILING in argument for argument in arguments if isinstance(argument, dict)):
            raise OSError("there is no space")
        return function(*arguments)

    return call


class OneRowWriter(ArrayWriter):
    """Writer of one simulated process, which has one element of each leaf."""

    def _write_part(self, target: str, blocks: Blocks, deadline: float) -> dict[str, Any]:
        row = self._hosts.process_id
        own = {name: [([row], block[row : row + 1])] for name, ((_, block),) in blocks.items()}
        return super()._write_part(target, own, deadline)


def write(writer: ArrayWriter, step: int, fails: bool, error: Exception | None = None) -> Exception | WriteResult:
    """Write one save; return its result, or the error with which it ends on this host."""
    leaves = {"leaf": jnp.arange(3.0)} | ({FAILING: jnp.arange(3.0)} if fails else {})
    finish = writer.start(f"checkpoints/{step}/arrays.1", leaves, error)
    try:
        return finish(DEADLINE_SECONDS)
    except WRITE_ERRORS as caught:
        return caught


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("place", ["before", "copy_to_host", "write_packs"])
def test_every_host_reports_its_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, failing: int
) -> None:
    if place != "before":
        monkeypatch.setattr(arrays, place, fail_if_named(getattr(arrays, place)))
    store = LocalStore(tmp_path / "run")

    def save_twice(hosts: Hosts) -> list[Exception | WriteResult]:
        writer = OneRowWriter(store, hosts, tmp_path / f"staging.{hosts.process_id}")
        is_failing = hosts.process_id == failing
        error = OSError("there is no space") if is_failing and place == "before" else None
        return [write(writer, 1, is_failing and error is None, error), write(writer, 2, False)]

    ends = run_on_all_hosts(MemoryCoordinator(3).hosts(), save_twice)
    assert all(str(first).endswith("there is no space") for first, _ in ends)
    assert all(isinstance(second, WriteResult) for _, second in ends)
    assert len(ends[0][1].files) == 6
