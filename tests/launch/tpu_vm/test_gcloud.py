"""Errors of gcloud: which a further try may mend."""

import re

import pytest

from launch.tpu_vm.gcloud import check, first_line
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
        check(f"Warning: x\n{errors}\n")
    check(errors + " HTTPSConnectionPool: Max retries exceeded")
    check("me@host: Permission denied (publickey).\nERROR: (gcloud.compute.tpus.tpu-vm.ssh) exited with [255].")
    assert first_line("") == "no error was given"
