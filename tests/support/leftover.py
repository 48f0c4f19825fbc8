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

DEADLINE_SECONDS = 600.0
_NUM_LOOKS = 1000
_VARIABLE = "RUNNER_TESTS_STARTED_BY"
_VALUE = uuid.uuid4().hex
_MARK = f"{_VARIABLE}={_VALUE}".encode()
_added: set[int] = set()
_others: set[int] = set()  # living processes without the mark: each is looked at once, not after every test

os.environ[_VARIABLE] = _VALUE


def outliving(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that may outlive the test that starts it."""
    return {name: value for name, value in variables.items() if name != _VARIABLE}


def add(process: int) -> None:
    """Count a process among those of this test that is forked, so that its first environment is another's."""
    _added.add(process)


def find() -> set[int]:
    """Ids of the living processes that bear the mark or were added."""
    living = {int(name) for name in os.listdir("/proc") if name.isdecimal()}
    _others.intersection_update(living)
    _added.intersection_update(living)
    found = {process for process in living - _others if process in _added or _is_marked(process)}
    _others.update(living - found)
    return found


def _is_marked(process: int) -> bool:
    """Ask the environment that the process was started with: not there yet while it is being started."""
    directory = Path(f"/proc/{process}")
    with contextlib.suppress(OSError):  # it has ended, is the kernel's, or is another user's
        for _ in range(_NUM_LOOKS):
            os.readlink(directory / "exe")
            has_started = bool((directory / "cmdline").read_bytes())
            environment = (directory / "environ").read_bytes()
            if has_started or environment:
                return _MARK in environment.split(b"\0")
            time.sleep(0.001)
    return False


def end_all_but(spared: set[int]) -> None:
    """kill -9, again for what they start while they die, until all of them are dead."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    dying: set[int] = set()
    while left := (find() - spared) | {process for process in dying if not is_dead(process)}:
        assert time.monotonic() < deadline, f"processes {sorted(left)} do not die"
        for process in left - dying:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        dying |= left
        time.sleep(0.001)


def list_children(process: int) -> list[int]:
    """Ids of the processes that its main thread has started, the oldest first."""
    return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def is_dead(process: int) -> bool:
    """Whether it is gone, or waits for its parent to take note."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
