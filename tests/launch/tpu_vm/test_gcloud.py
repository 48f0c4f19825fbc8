"""Errors and answers of gcloud, and the programs that hosts run, which take no word of the user for code."""

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
def test_errors_that_the_user_must_mend_are_told_from_those_that_pass(errors):
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
def test_when_a_resource_was_asked_for_is_what_the_answer_says(monkeypatch, answer, created):
    text = json.dumps({"state": {"state": "ACTIVE"}} | answer)
    monkeypatch.setattr(gcloud, "execute", lambda command: (0, text, ""))
    assert Gcloud(QueuedResource("tiny", 1, ()), 0.1).read_state() == ResourceState("ACTIVE", created=created)


def test_every_text_that_a_shell_reads_is_a_program_and_takes_no_word_of_the_user_for_code(tmp_path):
    nasty = ['it\'s $(touch hacked) `touch hacked`; "x"\n&& touch hacked', "a b"]
    host = HostPrograms("tiny", "c0ffee", "tiny.tar.gz", "00", ("tpu", "gcs"), nasty, "tiny.environment")
    for text in (host.attend(17), host.attend(None), host.job(), host.tail(None), host.tail(7), host.stop()):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
        printed = shlex.join(QueuedResource("tiny", 1, ()).ssh("tiny", "all", text))
        subprocess.run(["bash", "-n"], input=printed, text=True, check=True)
        assert shlex.split(printed)[-1] == f"--command={text}"
    line = next(line for line in host.job().splitlines() if "launch.worker" in line)
    program = (
        host.job()[host.job().index(line) :].partition("\ncode=")[0].replace("../venv/bin/python", "printf '%s\\n'")
    )
    output = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert output == "\n".join(["-u", "-m", "launch.worker", *nasty, ""])
    assert not list(tmp_path.iterdir())


def test_answers_are_found_among_gclouds_own_lines():
    output = "SSH: Attempting to connect\ntpu-vm: worker 0 running of c0ffee\ntpu-vm: worker 10 ended 76 of c0ffee\nx\n"
    assert parse_statuses(output) == {0: HostStatus("running", None, "c0ffee"), 10: HostStatus("ended", 76, "c0ffee")}
    assert parse_statuses("tpu-vm: worker  empty\n") == {}
