"""A host on which the write of a save fails: process 0 learns of it at once, and the next save is not affected."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from runner.checkpoint import arrays
from runner.checkpoint.arrays import WRITE_ERRORS, BlockWriter, OrbaxWriter
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


def write(writer: BlockWriter, step: int, fails: bool, error: Exception | None = None) -> Exception | None:
    """Write one save; return the error with which it ends on this host."""
    leaves = {"leaf": jnp.arange(4.0)} | ({FAILING: jnp.arange(4.0)} if fails else {})
    finish = writer.start(f"checkpoints/{step}/arrays.1", leaves, error)
    try:
        finish(DEADLINE_SECONDS)
    except WRITE_ERRORS as caught:
        return caught
    return None


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("place", ["before", "copy_to_host", "write_blocks"])
def test_every_host_reports_its_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, failing: int
) -> None:
    if place != "before":
        monkeypatch.setattr(arrays, place, fail_if_named(getattr(arrays, place)))
    store = LocalStore(tmp_path / "run")

    def save_twice(hosts: Hosts) -> list[Exception | None]:
        writer = BlockWriter(store, hosts, tmp_path / f"staging.{hosts.process_id}")
        is_failing = hosts.process_id == failing
        error = OSError("there is no space") if is_failing and place == "before" else None
        return [write(writer, 1, is_failing and error is None, error), write(writer, 2, False)]

    ends = run_on_all_hosts(MemoryCoordinator(3).hosts(), save_twice)
    assert all(str(first).endswith("there is no space") for first, _ in ends if first is not None)
    assert {process for process, (first, _) in enumerate(ends) if first is not None} == {0, failing}
    assert [second for _, second in ends] == [None] * 3


@pytest.mark.parametrize("error", [OSError("no space"), ValueError("not on this disk"), RuntimeError("no memory")])
@pytest.mark.parametrize("is_early", [True, False], ids=["before", "at the start"])
def test_orbax_reports_a_write_that_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, is_early: bool
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    writer = OrbaxWriter(LocalStore(tmp_path / "run"), Hosts.single_process())
    with monkeypatch.context() as patch:
        if not is_early:
            patch.setattr(type(writer._orbax), "save", fail)
        finish = writer.start("checkpoints/1/arrays.1", {"leaf": jnp.arange(4.0)}, error if is_early else None)
        with pytest.raises(type(error), match=str(error)):
            finish(DEADLINE_SECONDS)
    result = writer.start("checkpoints/2/arrays.1", {"leaf": jax.device_put(jnp.arange(4.0))})(DEADLINE_SECONDS)
    assert result.files
    writer.close()
