"""Which processes tests have started, however deep: all inherit a variable that names this process of pytest.

A process that is to live for the whole session is started with the environment `outliving`.
"""

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

DEADLINE_SECONDS = 120.0
_VARIABLE = "RUNNER_TESTS_STARTED_BY"
_VALUE = uuid.uuid4().hex
_MARK = f"{_VARIABLE}={_VALUE}".encode()
_others: set[int] = set()  # living processes without the mark: each is looked at once, not after every test

os.environ[_VARIABLE] = _VALUE


def outliving(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that may outlive the test that starts it."""
    return {name: value for name, value in variables.items() if name != _VARIABLE}


def find() -> set[int]:
    """Ids of the living processes that bear the mark."""
    living = {int(name) for name in os.listdir("/proc") if name.isdecimal()}
    _others.intersection_update(living)
    found = {process for process in living - _others if _is_marked(process)}
    _others.update(living - found)
    return found


def _is_marked(process: int) -> bool:
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        return _MARK in Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    return False


def end_all_but(spared: set[int]) -> None:
    """kill -9, again for what they start while they die, until none is left."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while left := find() - spared:
        assert time.monotonic() < deadline, f"processes {sorted(left)} do not die"
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.001)
