"""The programs that hosts run take no word of the user for code, and what they answer is found."""

import shlex
import subprocess

from launch.tpu_vm.gcloud import QueuedResource
from launch.tpu_vm.host import HostPrograms, HostStatus, parse_statuses


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
