"""No process outlives the test that started it, unless it is meant to."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import leftover

SLEEP = "import time; time.sleep(1000)"
# A process with a child in a session of its own, which no signal to its parent or group would reach.
NESTED = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture(scope="module")
def kept() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", SLEEP], env=leftover.outliving(os.environ))
    yield process.pid
    process.kill()
    process.wait()


def test_a_process_is_found_however_deep_and_ended(kept: int) -> None:
    before = leftover.find()
    process = subprocess.Popen([sys.executable, "-c", NESTED], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    assert leftover.find() - before == {process.pid, child}
    process.kill()
    process.wait()
    assert leftover.find() - before == {child}
    leftover.end_all_but(before)
    assert leftover.find() == before
    os.kill(kept, 0)


def test_what_a_test_leaves_is_ended_after_it(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    pytester.makeconftest("from tests.conftest import _kill_remaining_processes")
    pytester.makepyfile(f"""
        import subprocess, sys
        from pathlib import Path

        def test_that_fails():
            process = subprocess.Popen([sys.executable, "-c", {SLEEP!r}])
            Path("left").write_text(str(process.pid))
            raise AssertionError

        def test_after_it():
            status = Path(f"/proc/{{Path('left').read_text()}}/status")
            assert not status.exists() or "State:\\tZ" in status.read_text()
    """)
    pytester.runpytest_subprocess("-n", "0").assert_outcomes(passed=1, failed=1)
