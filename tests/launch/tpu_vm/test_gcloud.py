"""Errors of gcloud: which a further try may mend. Its answers: what is not in them is not known."""

import json
import re

import pytest

from launch.tpu_vm import gcloud
from launch.tpu_vm.gcloud import Gcloud, QueuedResource, ResourceState, find_error_line, raise_user_error
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
