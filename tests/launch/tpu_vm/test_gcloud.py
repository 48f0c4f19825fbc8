"""Errors and responses of gcloud, and the shell programs of hosts, which quote all user input."""

import json
import re
import shlex
import subprocess

import pytest

from launch.tpu_vm import gcloud
from launch.tpu_vm.gcloud import (
    Gcloud,
    HostPrograms,
    HostStatus,
    QueuedResource,
    ResourceState,
    find_error_line,
    parse_statuses,
    raise_user_error,
)
from runner.errors import InvalidError

DENIED = "ERROR: (gcloud.compute.tpus.queued-resources.create) PERMISSION_DENIED: Permission 'tpu.nodes.create' denied"


@pytest.mark.parametrize(
    "errors",
    [
        DENIED,
        "ERROR: (gcloud.compute.tpus.queued-resources.list) You do not currently have an active account selected.",
        "ERROR: (gcloud.compute.tpus.x) There was a problem refreshing auth tokens: Reauthentication failed.",
    ],
)
def test_permanent_errors_are_distinguished_from_transient_ones(errors):
    with pytest.raises(InvalidError, match=re.escape(errors)):
        raise_user_error(f"Warning: x\n{errors}\n")
    raise_user_error(errors + " HTTPSConnectionPool: Max retries exceeded")
    raise_user_error(
        "me@host: Permission denied (publickey).\nERROR: (gcloud.compute.tpus.tpu-vm.ssh) exited with [255]."
    )
    assert find_error_line("") == "no error was given"


@pytest.mark.parametrize(
    ("answer", "created"),
    [
        ({}, None),
        ({"createTime": None}, None),
        ({"createTime": "soon"}, None),
        ({"createTime": 17}, None),
        ({"createTime": "2026-01-01T00:00:00Z"}, 1767225600),
        ({"createTime": "2026-01-01T00:00:00.987654321Z"}, 1767225600),
        ({"createTime": "2026-01-01T01:00:00+01:00"}, 1767225600),
        ({"createTime": "2026-01-01T00:00:00"}, 1767225600),
    ],
)
def test_the_request_time_is_parsed_from_the_response(monkeypatch, answer, created):
    text = json.dumps({"state": {"state": "ACTIVE"}} | answer)
    monkeypatch.setattr(gcloud, "execute", lambda command: (0, text, ""))
    assert Gcloud(QueuedResource("tiny", 1, ()), 0.1).read_state() == ResourceState("ACTIVE", created=created)


def test_host_programs_are_valid_bash_and_never_execute_user_words(tmp_path):
    special = ['it\'s $(touch hacked) `touch hacked`; "x"\n&& touch hacked', "a b"]
    packages = ["../../runner.tar.gz[tpu,gcs]", *special]
    host = HostPrograms(
        "tiny", "c0ffee", "tiny.tar.gz", ["00", "tiny.tar.gz"], packages, special[0], special, "tiny.environment"
    )
    for text in (host.attend(17), host.attend(None), host.job(), host.tail(None), host.tail(7), host.stop()):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
        printed = shlex.join(QueuedResource("tiny", 1, ()).ssh("tiny", "all", text))
        subprocess.run(["bash", "-n"], input=printed, text=True, check=True)
        assert shlex.split(printed)[-1] == f"--command={text}"
    job = host.job().replace('"$job/venv/bin/python"', "printf '%s\\n'")
    arrays = job[job.index("packages=") : job.index("trap ")]
    worker = job[job.index("printf", job.index("end 2")) :].partition("\ncode=")[0]
    program = f'{arrays}\nprintf \'%s\\n\' "${{packages[@]}}" "$directory"\n{worker}'
    output = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert output == "\n".join([*packages, special[0], "-u", "-m", "launch.worker", *special, ""])
    assert not list(tmp_path.iterdir())


def test_statuses_are_parsed_between_lines_of_gcloud():
    output = "SSH: Attempting to connect\ntpu-vm: worker 0 running of c0ffee\ntpu-vm: worker 10 ended 76 of c0ffee\nx\n"
    assert parse_statuses(output) == {0: HostStatus("running", None, "c0ffee"), 10: HostStatus("ended", 76, "c0ffee")}
    assert parse_statuses("tpu-vm: worker  empty\n") == {}
