"""The job on TPU VMs: a fake gcloud hands out hosts that are directories, where the shell text is really run."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.__main__ import main
from launch.tpu_vm import engine
from launch.tpu_vm.engine import find_exit_code
from launch.tpu_vm.gcloud import HostStatus
from tests.support.job_process import DEADLINE_SECONDS

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden"
SPEC = """\
name: tiny_run
job: experiments.counter:Counter
directory: gs://bucket/tiny
topology: {accelerator: v5e-8}
"""
TWO_SLICES = SPEC.replace("v5e-8", "2xv4-8").replace("gs://", "s3://")
STUBS = {  # on the hosts
    "curl": 'echo "$WORKER"',
    "python3.13": r"""
if [ "$1" = -c ]; then exit 0; fi
mkdir -p "$3/bin" && cp "$STATE/stubs/venv-python" "$3/bin/python"
""",
    "venv-python": r"""
if [ "$2" = pip ]; then echo "pip: $*"; exit; fi
[ -e "$4" ] || exit 9  # in the code as it was shipped
. "$STATE/job" "${@:4}"
""",
}


def git(repository, *arguments):
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "-C", str(repository), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A project with committed specs, and the working directory."""
    path = tmp_path / "project"
    (path / "specs").mkdir(parents=True)
    (path / "specs" / "tiny.yaml").write_text(SPEC)
    (path / "specs" / "two.yaml").write_text(TWO_SLICES)
    (path / "specs" / "gpt2_124m.yaml").write_text((ROOT / "specs" / "gpt2_124m.yaml").read_text())
    git(path, "init", "-q")
    git(path, "add", ".")
    git(path, "commit", "-qm", "All of it")
    monkeypatch.chdir(path)
    return path


class World:
    """What surrounds one launch: the fake gcloud and its hosts."""

    def __init__(self, path):
        self.path = path

    def script(self, job, lives=None, **failures):
        """What the job does on each host (shell text), and what gcloud shows and fails with."""
        (self.path / "job").write_text(job)
        (self.path / "lives.json").write_text(json.dumps(lives or [["ACTIVE"]]))
        (self.path / "fail.json").write_text(json.dumps(failures))

    def verbs(self):
        """Every call in order: create, describe ..."""
        lines = (self.path / "calls.jsonl").read_text().splitlines()
        return [json.loads(line)[3] for line in lines]

    def starts(self):
        """How often the job was started, by host."""
        found = {}
        for line in (self.path / "starts").read_text().split():
            found[line] = found.get(line, 0) + 1
        return found

    def submitted(self):
        """What each start of the job was told of when it was submitted."""
        return (self.path / "submitted").read_text().splitlines()

    @property
    def is_there(self):
        return (self.path / "resource.json").exists()


COUNT = """\
echo "$NODE-$WORKER" >>"$STATE/starts"
echo "$RUNNER_SUBMITTED" >>"$STATE/submitted"
"""
REQUESTED = ("1767225600", "1767312000")  # the first day and the second, on which the fake gcloud is asked


@pytest.fixture
def world(tmp_path, monkeypatch):
    path = tmp_path / "world"
    (path / "stubs").mkdir(parents=True)
    (path / "bin").mkdir()
    for name, text in STUBS.items():
        (path / "stubs" / name).write_text(f"#!/bin/bash\n{text}")
        (path / "stubs" / name).chmod(0o755)
    gcloud = path / "bin" / "gcloud"
    gcloud.write_text(f'#!/bin/sh\nexec {sys.executable} -SE {ROOT}/tests/support/fake_gcloud.py "$@"\n')
    gcloud.chmod(0o755)
    monkeypatch.setenv("FAKE_GCLOUD", str(path))
    monkeypatch.setenv("PATH", f"{path / 'bin'}:{os.environ['PATH']}")
    handler = signal.getsignal(signal.SIGTERM)
    yield World(path)
    signal.signal(signal.SIGTERM, handler)
    for pid in path.glob("hosts/*/*/pid"):
        subprocess.run(["kill", "-9", "--", f"-{pid.read_text().strip()}"], capture_output=True)


def launch(*options, spec="specs/tiny.yaml"):
    return main(["tpu-vm", spec, "--zone", "us-west4-a", "--poll-seconds", "0.1", *options])


def test_a_job_is_queued_shipped_run_shown_and_its_machines_deleted(repository, world, capsys):
    world.script(f'{COUNT}sleep 0.3; echo "step $WORKER with $*"', [["ACCEPTED", "WAITING_FOR_RESOURCES", "ACTIVE"]])
    assert launch("--set", "seed=3", "--max-restarts", "7") == 0
    output = capsys.readouterr().out
    states = re.findall(r"is (\w+)$", output, re.MULTILINE)
    assert states == ["ACCEPTED", "WAITING_FOR_RESOURCES", "ACTIVE"]
    assert "pip: -m pip install --quiet --editable ./code[tpu,gcs]\n" in output
    assert "step 0 with specs/tiny.yaml --set seed=3 --max-restarts 7\n" in output
    assert "step 1" not in output
    assert world.starts() == {"tiny-run-0": 1, "tiny-run-1": 1}
    verbs = world.verbs()
    assert [verb for verb in verbs if verb in ("create", "scp", "delete")] == ["create", "scp", "delete"]
    assert not world.is_there


@pytest.mark.parametrize(("job", "code"), [("exit 76", 76), ("exit 137", 1)])
def test_the_codes_of_the_job_come_through_and_the_machines_are_deleted(repository, world, job, code, capsys):
    world.script(f'[ "$WORKER" = 0 ] && sleep 30; echo "because of $WORKER"; {job}')  # the first waits in vain
    assert launch() == code
    assert not world.is_there
    assert "[1] because of 1\n" in capsys.readouterr().out


def test_a_preempted_job_gets_new_machines_and_is_started_there(repository, world, capsys):
    job = f"""{COUNT}echo "life $(cat "$STATE/created.json")"
    if [ "$(cat "$STATE/created.json")" = 1 ]; then touch "$STATE/preempt"; sleep 30; fi"""
    world.script(job, [["PROVISIONING", "ACTIVE"], ["ACTIVE"]])
    assert launch("--spot") == 0
    output = capsys.readouterr().out
    assert "was preempted" in output
    assert "life 2\n" in output
    assert world.submitted() == [*[REQUESTED[0]] * 2, *[REQUESTED[1]] * 2]
    assert world.starts() == {"tiny-run-0": 2, "tiny-run-1": 2}
    verbs = world.verbs()
    assert [verb for verb in verbs if verb in ("create", "scp", "delete")] == ["create", "scp", "delete"] * 2


@pytest.mark.soak
def test_a_preempted_node_is_noticed_while_the_resource_still_says_active(repository, world):
    job = '[ "$(cat "$STATE/created.json")" = 2 ] || { echo PREEMPTED >"$STATE/node_state"; sleep 30; }'
    world.script(job)
    assert launch() == 0
    assert world.verbs().count("create") == 2


@pytest.mark.soak
def test_a_job_that_was_asked_to_stop_is_started_again_on_the_same_machines(repository, world):
    world.script(f"{COUNT}[ -e stopped ] || {{ touch stopped; exit 75; }}")
    assert launch() == 0
    assert world.starts() == {"tiny-run-0": 2, "tiny-run-1": 2}
    assert world.submitted() == [REQUESTED[0]] * 4
    assert world.verbs().count("create") == 1


def test_connections_that_break_are_made_again_and_nothing_starts_twice(repository, world, capsys):
    broken = "ERROR: (gcloud.compute.tpus.tpu-vm.ssh) [/usr/bin/ssh] exited with return code [255]."
    world.script(
        f"{COUNT}sleep 0.3; echo done", ssh=["Permission denied (publickey).\n" + broken, broken], scp=[broken]
    )
    assert launch() == 0
    assert world.starts() == {"tiny-run-0": 1, "tiny-run-1": 1}
    assert capsys.readouterr().out.count("done\n") == 1


def start_in_background(world, *options):
    command = [sys.executable, "-m", "launch", "tpu-vm", "specs/tiny.yaml", "--zone", "z", "--poll-seconds", "0.1"]
    return subprocess.Popen(
        [*command, *options],
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def await_file(path):
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.02)


def test_a_launch_that_is_left_leaves_the_job_running_and_the_next_one_attaches(repository, world, capsys):
    world.script(f"""{COUNT}echo before; touch "$STATE/begun"
    while [ ! -e "$STATE/go" ]; do sleep 0.05; done; echo after""")
    process = start_in_background(world)
    await_file(world.path / "begun")
    while "before" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 75
    assert "continues" in output
    assert "gcloud compute tpus queued-resources delete tiny-run --zone=z --force --quiet" in output
    assert world.is_there
    (repository / "specs" / "tiny.yaml").write_text(SPEC + "seed: 5\n")
    git(repository, "commit", "-qam", "Another seed")
    (world.path / "go").touch()
    assert launch() == 0
    captured = capsys.readouterr()
    assert "attached to the job on tiny-run, of commit " in captured.out
    assert "is shipped only if machines are requested again" in captured.err
    assert "before\n" in captured.out
    assert captured.out.count("after\n") == 1
    assert world.starts() == {"tiny-run-0": 1, "tiny-run-1": 1}
    assert not world.is_there


@pytest.mark.soak
def test_kept_machines_stay_the_rest_of_the_job_is_stopped_and_the_next_launch_starts_anew(repository, world, capsys):
    world.script(f'{COUNT}[ "$WORKER" = 0 ] && sleep 30; exit 1')
    assert launch("--keep") == 1
    assert "the machines stay. To delete them: gcloud compute tpus queued-resources delete" in capsys.readouterr().out
    assert world.is_there
    world.script(f"{COUNT}echo anew")
    assert launch() == 0
    output = capsys.readouterr().out
    assert "tiny-run exists already" in output
    assert output.count("anew") == output.count("started on 2 of 2 hosts") == 1
    assert world.starts() == {"tiny-run-0": 2, "tiny-run-1": 2}
    assert world.submitted() == [*[REQUESTED[0]] * 2, "", ""]  # the second did not wait for them
    assert world.verbs().count("scp") == 1


def test_a_request_that_failed_is_one_line_with_its_reason_and_is_not_left_behind(repository, world, capsys):
    world.script("", [["WAITING_FOR_RESOURCES", "FAILED"]])
    assert launch() == 76
    assert capsys.readouterr().err.splitlines()[-1] == "tiny-run FAILED: no more v5e in this zone today"
    assert not world.is_there


@pytest.mark.soak
def test_what_an_earlier_launch_has_left_suspended_is_replaced(repository, world):
    world.script("")
    (world.path / "resource.json").write_text(json.dumps({"states": ["SUSPENDED"]}))
    assert launch() == 0
    verbs = world.verbs()
    assert [verb for verb in verbs if verb in ("create", "delete")] == ["delete", "create", "delete"]


def test_machines_that_somebody_deletes_are_not_requested_again(repository, world, capsys):
    world.script('rm "$STATE/resource.json"; sleep 1')
    assert launch() == 75
    assert "was deleted by somebody else" in capsys.readouterr().err
    assert world.verbs().count("create") == 1


DENIED = "ERROR: (gcloud.compute.tpus.queued-resources.create) PERMISSION_DENIED: Permission 'tpu.nodes.create' denied"


def test_a_permission_that_is_missing_ends_with_2_and_gclouds_own_line(repository, world, capsys):
    missing = "ERROR: (gcloud.compute.tpus.queued-resources.create) NOT_FOUND: network 'big' was not found"
    for line in (DENIED, missing):
        world.script("", create=["WARNING: something else\n" + line + "\n- '@type': more"])
        assert launch() == 2
        assert capsys.readouterr().err.splitlines()[-1] == line


def test_no_gcloud_is_one_line(repository, monkeypatch, capsys):
    monkeypatch.setattr(engine.shutil, "which", lambda name: None)
    assert launch() == 2
    assert "gcloud is not on the PATH" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("accelerator", ["any", "h100-8", "cpu", "tpu7x-8", "v5e", "v5e-12", "v9-1"])
def test_what_queued_resources_do_not_have_is_refused_in_one_line(repository, accelerator, capsys):
    assert launch("--set", f"topology.accelerator={accelerator}", "--dry-run") == 2
    *before, line = capsys.readouterr().err.splitlines()
    assert line.startswith(f"--set topology.accelerator={accelerator}: ")
    assert all("accelerator" not in other for other in before)


def test_a_directory_that_would_go_with_the_machines_is_refused(repository, capsys):
    assert launch("--set", "directory=runs/here") == 2
    assert "runs/here is on the disk of a TPU VM, which is deleted with it" in capsys.readouterr().err


def test_what_is_not_committed_is_said_not_to_be_shipped(repository, tmp_path, monkeypatch, capsys):
    assert launch("--dry-run") == 0
    assert "UNCOMMITTED" not in capsys.readouterr().err
    (repository / "specs" / "tiny.yaml").write_text(SPEC.replace("gs://", "local/"))  # the committed one counts
    (repository / "new.yaml").write_text(SPEC)
    assert launch("--dry-run") == 0
    errors = capsys.readouterr().err
    assert "UNCOMMITTED CHANGES ARE NOT SHIPPED (2): specs/tiny.yaml, new.yaml" in errors
    assert "(All of it)" in errors
    assert launch("--dry-run", spec="new.yaml") == 2
    assert "new.yaml is not in commit" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert launch("--dry-run") == 2
    assert "has no git commit" in capsys.readouterr().err


def normal(text):
    return re.sub(r"\b[0-9a-f]{64}\b", "SHA256", re.sub(r"\b[0-9a-f]{40}\b|\b[0-9a-f]{12}\b", "COMMIT", text))


GOLDENS = {
    "tpu_vm_gpt2_124m.txt": ["--spot", "--set", "directory=gs://bucket/gpt2_124m", "--project", "my-project"],
    "tpu_vm_two_slices.txt": ["--network", "big", "--service-account", "a@b.c", "--internal-ips", "--keep"],
}


@pytest.mark.parametrize("name", GOLDENS)
def test_a_dry_run_prints_every_command_and_runs_none(repository, name, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    spec = "specs/gpt2_124m.yaml" if "gpt2" in name else "specs/two.yaml"
    assert launch(*GOLDENS[name], "--dry-run", spec=spec) == 0
    output = normal(capsys.readouterr().out)
    if "UPDATE_GOLDEN" in os.environ:
        (GOLDEN / name).write_text(output)
    assert output == (GOLDEN / name).read_text()


@pytest.mark.soak
def test_the_environment_file_reaches_every_host_of_every_slice_and_no_command(repository, world, tmp_path, capsys):
    secret = tmp_path / "keys"
    secret.write_text("TOKEN='se cret'\nRUNNER_SUBMITTED=17\n")
    world.script(f'{COUNT}[ "$TOKEN" = "se cret" ] && [ "$(stat -c %a ~/tiny-run.environment)" = 600 ]')
    assert launch("--environment-file", str(secret), spec="specs/two.yaml") == 0
    assert set(world.starts()) == {"tiny-run-0-0", "tiny-run-0-1", "tiny-run-1-0", "tiny-run-1-1"}
    assert world.submitted() == ["17"] * 4  # the user's word is the last
    assert "se cret" not in (world.path / "calls.jsonl").read_text() + capsys.readouterr().out
    assert launch("--environment-file", str(tmp_path / "none")) == 2


@pytest.mark.parametrize(
    ("name", "resource"),
    [("gpt2_124m", "gpt2-124m"), ("7B.Run_", "run-7b-run"), ("x" * 99, "x" * 60)],
)
def test_the_name_of_a_run_becomes_one_that_google_cloud_accepts(name, resource):
    assert engine.make_resource_name(name) == resource


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
