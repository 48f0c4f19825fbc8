"""Jobs on TPU VMs, with a fake gcloud whose hosts are directories in which the shell programs really run."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.app import main
from launch.tpu_vm import engine
from launch.tpu_vm.engine import find_exit_code
from launch.tpu_vm.gcloud import HostStatus
from tests.support.job_process import DEADLINE_SECONDS
from tests.support.two_files import PROJECT, commit_all, git

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden"
SPEC = """\
name: tiny_run
job: experiments.counter:Counter
directory: gs://bucket/tiny
topology: {accelerator: v5e-8}
"""
TWO_SLICES = SPEC.replace("v5e-8", "2xv4-8").replace("gs://", "s3://")
STUBS = {  # commands of the hosts
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


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Git repository with committed specs, as the working directory."""
    path = tmp_path / "project"
    (path / "specs").mkdir(parents=True)
    (path / "pyproject.toml").write_text(PROJECT)
    (path / "specs" / "tiny.yaml").write_text(SPEC)
    (path / "specs" / "two.yaml").write_text(TWO_SLICES)
    (path / "specs" / "gpt2_124m.yaml").write_text((ROOT / "specs" / "gpt2_124m.yaml").read_text())
    commit_all(path)
    monkeypatch.chdir(path)
    return path


class FakeCloud:
    """The fake gcloud of one launch and the records of its hosts."""

    def __init__(self, path):
        self.path = path

    def set_up(self, job, lives=None, **failures):
        """Set the shell program of the job, the states of resources, and the errors of gcloud by subcommand."""
        (self.path / "job").write_text(job)
        (self.path / "lives.json").write_text(json.dumps(lives or [["ACTIVE"]]))
        (self.path / "fail.json").write_text(json.dumps(failures))

    def list_verbs(self):
        """Return the subcommands of all calls in order: create, describe, ..."""
        lines = (self.path / "calls.jsonl").read_text().splitlines()
        return [json.loads(line)[3] for line in lines]

    def count_starts(self):
        """Return the number of starts of the job by host."""
        found = {}
        for line in (self.path / "starts").read_text().split():
            found[line] = found.get(line, 0) + 1
        return found

    def list_submit_times(self):
        """Return the submit time that each start of the job got."""
        return (self.path / "submitted").read_text().splitlines()

    @property
    def has_resource(self):
        return (self.path / "resource.json").exists()


COUNT_STARTS = """\
echo "$NODE-$WORKER" >>"$STATE/starts"
echo "$RUNNER_SUBMITTED" >>"$STATE/submitted"
"""
REQUEST_TIMES = ("1767225600", "1767312000")  # creation times of the first and second resource of the fake gcloud


@pytest.fixture
def cloud(tmp_path, monkeypatch):
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
    yield FakeCloud(path)
    signal.signal(signal.SIGTERM, handler)
    for pid in path.glob("hosts/*/*/pid"):
        subprocess.run(["kill", "-9", "--", f"-{pid.read_text().strip()}"], capture_output=True)


def launch(*options, spec="specs/tiny.yaml"):
    return main(["tpu-vm", spec, "--zone", "us-west4-a", "--poll-seconds", "0.1", *options])


def test_a_job_runs_and_its_machines_are_deleted(repository, cloud, capsys):
    cloud.set_up(
        f'{COUNT_STARTS}sleep 0.3; echo "step $WORKER with $*"', [["ACCEPTED", "WAITING_FOR_RESOURCES", "ACTIVE"]]
    )
    assert launch("--set", "seed=3", "--max-restarts", "7", "--standby-seconds", "0") == 0
    output = capsys.readouterr().out
    states = re.findall(r"is (\w+)$", output, re.MULTILINE)
    assert states == ["ACCEPTED", "WAITING_FOR_RESOURCES", "ACTIVE"]
    assert "pip: -m pip install --quiet --editable .[tpu,gcs]\n" in output
    assert "step 0 with specs/tiny.yaml --set seed=3 --max-restarts 7 --standby-seconds 0\n" in output
    assert "step 1" not in output
    assert cloud.count_starts() == {"tiny-run-0": 1, "tiny-run-1": 1}
    verbs = cloud.list_verbs()
    assert [verb for verb in verbs if verb in ("create", "scp", "delete")] == ["create", "scp", "delete"]
    assert not cloud.has_resource


@pytest.mark.daily(1)
@pytest.mark.parametrize(("job", "code"), [("exit 76", 76), ("exit 137", 1)])
def test_the_exit_code_is_passed_on_and_the_machines_are_deleted(repository, cloud, job, code, capsys):
    cloud.set_up(
        f'[ "$WORKER" = 0 ] && sleep 30; echo "because of $WORKER"; {job}'
    )  # host 0 would wait, but host 1 fails
    assert launch() == code
    assert not cloud.has_resource
    assert "[1] because of 1\n" in capsys.readouterr().out


def test_a_preempted_job_is_restarted_on_new_machines(repository, cloud, capsys):
    job = f"""{COUNT_STARTS}echo "life $(cat "$STATE/created.json")"
    if [ "$(cat "$STATE/created.json")" = 1 ]; then touch "$STATE/preempt"; sleep 30; fi"""
    cloud.set_up(job, [["PROVISIONING", "ACTIVE"], ["ACTIVE"]])
    assert launch("--spot") == 0
    output = capsys.readouterr().out
    assert "was preempted" in output
    assert "life 2\n" in output
    assert cloud.list_submit_times() == [*[REQUEST_TIMES[0]] * 2, *[REQUEST_TIMES[1]] * 2]
    assert cloud.count_starts() == {"tiny-run-0": 2, "tiny-run-1": 2}
    verbs = cloud.list_verbs()
    assert [verb for verb in verbs if verb in ("create", "scp", "delete")] == ["create", "scp", "delete"] * 2


@pytest.mark.soak
def test_a_preempted_node_of_an_active_resource_is_detected(repository, cloud):
    job = '[ "$(cat "$STATE/created.json")" = 2 ] || { echo PREEMPTED >"$STATE/node_state"; sleep 30; }'
    cloud.set_up(job)
    assert launch() == 0
    assert cloud.list_verbs().count("create") == 2


@pytest.mark.soak
def test_a_stopped_job_is_restarted_on_the_same_machines(repository, cloud):
    cloud.set_up(f"{COUNT_STARTS}[ -e stopped ] || {{ touch stopped; exit 75; }}")
    assert launch() == 0
    assert cloud.count_starts() == {"tiny-run-0": 2, "tiny-run-1": 2}
    assert cloud.list_submit_times() == [REQUEST_TIMES[0]] * 4
    assert cloud.list_verbs().count("create") == 1


def test_broken_connections_are_retried_without_a_second_start(repository, cloud, capsys):
    broken = "ERROR: (gcloud.compute.tpus.tpu-vm.ssh) [/usr/bin/ssh] exited with return code [255]."
    cloud.set_up(
        f"{COUNT_STARTS}sleep 0.3; echo done", ssh=["Permission denied (publickey).\n" + broken, broken], scp=[broken]
    )
    assert launch() == 0
    assert cloud.count_starts() == {"tiny-run-0": 1, "tiny-run-1": 1}
    assert capsys.readouterr().out.count("done\n") == 1


def start_in_background(cloud, *options):
    command = [
        sys.executable,
        "-m",
        "launch",
        "tpu-vm",
        "specs/tiny.yaml",
        "--zone",
        "z",
        "--skip-checks",
        "--poll-seconds",
        "0.1",
    ]
    return subprocess.Popen(
        [*command, *options],
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_file(path):
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.02)


def test_an_interrupted_launch_leaves_the_job_and_the_next_attaches(repository, cloud, capsys):
    cloud.set_up(f"""{COUNT_STARTS}echo before; touch "$STATE/begun"
    while [ ! -e "$STATE/go" ]; do sleep 0.05; done; echo after""")
    process = start_in_background(cloud)
    wait_for_file(cloud.path / "begun")
    while "before" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 75
    assert "continues" in output
    assert "gcloud compute tpus queued-resources delete tiny-run --zone=z --force --quiet" in output
    assert cloud.has_resource
    (repository / "specs" / "tiny.yaml").write_text(SPEC + "seed: 5\n")
    git(repository, "commit", "-qam", "Another seed")
    (cloud.path / "go").touch()
    assert launch() == 0
    captured = capsys.readouterr()
    assert "attached to the job on tiny-run, of commit " in captured.out
    assert "is shipped only if machines are requested again" in captured.err
    assert "before\n" in captured.out
    assert captured.out.count("after\n") == 1
    assert cloud.count_starts() == {"tiny-run-0": 1, "tiny-run-1": 1}
    assert not cloud.has_resource


@pytest.mark.soak
def test_kept_machines_are_reused_by_the_next_launch(repository, cloud, capsys):
    cloud.set_up(f'{COUNT_STARTS}[ "$WORKER" = 0 ] && sleep 30; exit 1')
    assert launch("--keep") == 1
    assert "the machines stay. To delete them: gcloud compute tpus queued-resources delete" in capsys.readouterr().out
    assert cloud.has_resource
    cloud.set_up(f"{COUNT_STARTS}echo anew")
    assert launch() == 0
    output = capsys.readouterr().out
    assert "tiny-run exists already" in output
    assert output.count("anew") == output.count("started on 2 of 2 hosts") == 1
    assert cloud.count_starts() == {"tiny-run-0": 2, "tiny-run-1": 2}
    assert cloud.list_submit_times() == [
        *[REQUEST_TIMES[0]] * 2,
        "",
        "",
    ]  # the second launch did not request the machines
    assert cloud.list_verbs().count("scp") == 1


def test_a_failed_request_is_reported_with_its_reason_and_deleted(repository, cloud, capsys):
    cloud.set_up("", [["WAITING_FOR_RESOURCES", "FAILED"]])
    assert launch() == 76
    assert capsys.readouterr().err.splitlines()[-1] == "tiny-run FAILED: no more v5e in this zone today"
    assert not cloud.has_resource


@pytest.mark.soak
def test_a_suspended_resource_of_an_earlier_launch_is_replaced(repository, cloud):
    cloud.set_up("")
    (cloud.path / "resource.json").write_text(json.dumps({"states": ["SUSPENDED"]}))
    assert launch() == 0
    verbs = cloud.list_verbs()
    assert [verb for verb in verbs if verb in ("create", "delete")] == ["delete", "create", "delete"]


def test_machines_deleted_by_the_user_are_not_requested_again(repository, cloud, capsys):
    cloud.set_up('rm "$STATE/resource.json"; sleep 1')
    assert launch() == 75
    assert "was deleted by somebody else" in capsys.readouterr().err
    assert cloud.list_verbs().count("create") == 1


DENIED = "ERROR: (gcloud.compute.tpus.queued-resources.create) PERMISSION_DENIED: Permission 'tpu.nodes.create' denied"


def test_a_missing_permission_exits_with_2_and_the_line_of_gcloud(repository, cloud, capsys):
    missing = "ERROR: (gcloud.compute.tpus.queued-resources.create) NOT_FOUND: network 'big' was not found"
    for line in (DENIED, missing):
        cloud.set_up("", create=["WARNING: something else\n" + line + "\n- '@type': more"])
        assert launch() == 2
        assert capsys.readouterr().err.splitlines()[-1] == line


def test_a_missing_gcloud_is_reported_in_one_line(repository, monkeypatch, capsys):
    monkeypatch.setattr(engine.shutil, "which", lambda name: None)
    assert launch() == 2
    assert "gcloud is not on the PATH" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("accelerator", ["any", "h100-8", "cpu", "tpu7x-8", "v5e", "v5e-12", "v9-1"])
def test_unsupported_accelerators_are_rejected_in_one_line(repository, accelerator, capsys):
    assert launch("--set", f"topology.accelerator={accelerator}", "--dry-run") == 2
    *before, line = capsys.readouterr().err.splitlines()
    assert line.startswith(f"--set topology.accelerator={accelerator}: ")
    assert all("accelerator" not in other for other in before)


def test_a_run_directory_on_the_machines_is_rejected(repository, capsys):
    assert launch("--set", "directory=runs/here") == 2
    assert "runs/here is on the disk of a TPU VM, which is deleted with it" in capsys.readouterr().err


def test_uncommitted_changes_are_reported_as_not_shipped(repository, tmp_path, monkeypatch, capsys):
    assert launch("--dry-run") == 0
    assert "UNCOMMITTED" not in capsys.readouterr().err
    (repository / "specs" / "tiny.yaml").write_text(SPEC.replace("gs://", "local/"))  # the committed version counts
    (repository / "new.yaml").write_text(SPEC)
    assert launch("--dry-run") == 0
    errors = capsys.readouterr().err
    assert "UNCOMMITTED CHANGES ARE NOT SHIPPED (2): specs/tiny.yaml, new.yaml" in errors
    assert "(All of it)" in errors
    assert launch("--dry-run", spec="new.yaml") == 2
    assert "new.yaml is not in commit" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert launch("--dry-run") == 2
    assert re.search("has no git commit.*; run git init, git add", capsys.readouterr().err)


def replace_digests(text):
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
    output = replace_digests(capsys.readouterr().out)
    if "UPDATE_GOLDEN" in os.environ:
        (GOLDEN / name).write_text(output)
    assert output == (GOLDEN / name).read_text()


@pytest.mark.soak
def test_the_environment_file_reaches_every_host_but_no_command_line(repository, cloud, tmp_path, capsys):
    secret = tmp_path / "keys"
    secret.write_text("TOKEN='se cret'\nRUNNER_SUBMITTED=17\n")
    cloud.set_up(f'{COUNT_STARTS}[ "$TOKEN" = "se cret" ] && [ "$(stat -c %a ~/tiny-run.environment)" = 600 ]')
    assert launch("--environment-file", str(secret), spec="specs/two.yaml") == 0
    assert set(cloud.count_starts()) == {"tiny-run-0-0", "tiny-run-0-1", "tiny-run-1-0", "tiny-run-1-1"}
    assert cloud.list_submit_times() == ["17"] * 4  # the user's value wins
    assert "se cret" not in (cloud.path / "calls.jsonl").read_text() + capsys.readouterr().out
    assert launch("--environment-file", str(tmp_path / "none")) == 2


@pytest.mark.parametrize(
    ("name", "resource"),
    [("gpt2_124m", "gpt2-124m"), ("7B.Run_", "run-7b-run"), ("x" * 99, "x" * 60)],
)
def test_the_resource_name_is_valid_for_google_cloud(name, resource):
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
def test_the_job_ends_with_its_first_host_or_any_failed_host(codes, code):
    hosts = {
        (0, index): HostStatus("running" if value is None else "ended", value) for index, value in enumerate(codes)
    }
    assert find_exit_code(hosts) == code
