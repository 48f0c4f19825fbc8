import os
import signal
import subprocess
import tempfile

import pytest

from tests.support import forked_python, leftover
from tests.support.job_process import DEADLINE_SECONDS
from tests.support.simulated_devices import environment

WAITING = ["runner", "specs/counter.yaml", "--set", "config.step_seconds=60", "--set"]


def start(arguments, variables):
    with tempfile.TemporaryFile() as output:
        return forked_python.start(arguments, variables, output, output)


def test_a_forked_process_has_its_own_status_streams_and_program_name(tmp_path):
    done = forked_python.run(["runner", "--version"], environment(1), DEADLINE_SECONDS)
    assert (done.returncode, done.stdout.split()[0], done.stderr) == (0, "runner", "")
    done = forked_python.run(["runner", "no-such-command"], environment(1), DEADLINE_SECONDS)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("python -m runner: ")
    merged = forked_python.run(["runner", "no-such-command"], environment(1), DEADLINE_SECONDS, merge_streams=True)
    assert (merged.stdout, merged.stderr) == (done.stderr, "")


def test_a_forked_process_is_waited_for_killed_and_found(tmp_path):
    process = start([*WAITING, f"directory={tmp_path / 'run'}"], environment(1))
    assert isinstance(process, forked_python.ForkedProcess)
    assert process.pid in leftover.find()
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.kill()
    assert process.wait(DEADLINE_SECONDS) == process.returncode == -signal.SIGKILL
    process.send_signal(signal.SIGKILL)  # harmless after the end
    assert process.pid not in leftover.find()


@pytest.mark.parametrize(
    ("changes", "is_forked"),
    [
        ({}, True),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "RUNNER_CACHE": "/tmp/x"}, True),
        ({"JAX_ENABLE_X64": "1"}, False),
        ({"PYTHONHASHSEED": "3"}, False),
        ({"HOME": "/nowhere"}, False),
    ],
)
def test_a_process_with_variables_that_an_import_may_read_is_executed(changes, is_forked):
    process = start(["runner", "--version"], environment(1) | changes)
    assert isinstance(process, forked_python.ForkedProcess) == is_forked
    assert process.wait(DEADLINE_SECONDS) == 0


def test_a_forked_process_has_the_environment_and_devices_of_its_request(tmp_path):
    words = ["runner", "specs/counter.yaml", "--set", f"directory={tmp_path / 'run'}", "--set", "config.total_steps=1"]
    done = forked_python.run(words, environment(3), DEADLINE_SECONDS, merge_streams=True)
    assert done.returncode == 0, done.stdout
    assert '"devices": 3' in (tmp_path / "run" / "events.jsonl").read_text()
    assert os.environ["XLA_FLAGS"] != environment(3)["XLA_FLAGS"]
