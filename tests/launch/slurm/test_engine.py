"""The SLURM batch script: its content, and its behaviour after each exit code, with fake SLURM commands."""

import contextlib
import itertools
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.app import main
from launch.options import read_program
from launch.slurm import engine
from runner.process import STOP_SIGNALS
from tests.support.job_process import DEADLINE_SECONDS

SCHEDULER_SIGNALS = [number for number in STOP_SIGNALS if number != signal.SIGINT]
ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden"
RENDERED_OPTIONS = {
    "slurm_gpt_nano.sh": ["specs/gpt_nano.yaml", "--nodes", "2", "--cpus-per-task", "4"],
    "slurm_gpt2_124m.sh": [
        *("specs/gpt2_124m.yaml", "--set", "topology.accelerator=h100-16", "--set", "directory=/data/it's here"),
        *("--time", "1-00:00:00", "--grace-seconds", "600", "--partition", "gpu", "--account", "lab", "--max-restarts"),
        *("7", "--output", "logs/%x-%j.log", "--sbatch-option=--qos=high", "--sbatch-option=--comment=two words"),
    ],
}


def dry_run(capsys, *arguments, python="/opt/env/bin/python"):
    assert main(["slurm", *arguments, "--python", python, "--dry-run"]) == 0
    return capsys.readouterr().out


def get_error_line(capsys, *arguments):
    """Return the single error line of a rejected command."""
    assert main(["slurm", *arguments, "--dry-run"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    return line


@pytest.fixture(autouse=True)
def _change_to_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("name", RENDERED_OPTIONS)
def test_the_script_equals_the_golden_file(name, capsys):
    assert dry_run(capsys, *RENDERED_OPTIONS[name]) == (GOLDEN / name).read_text()


@pytest.mark.parametrize(
    ("nodes", "line"),
    [
        (["n1"], "--exclude=n1"),
        (["n1", "n[3-5],n7"], "'--exclude=n1,n[3-5],n7'"),
        (["n1;x"], "--exclude 'n1;x'"),
        (["n1 n2"], "--exclude 'n1 n2'"),
        (["a\nb"], "--exclude"),
    ],
    ids=["one", "several", "semicolon", "blank", "line"],
)
def test_excluded_nodes_become_one_option_of_sbatch(nodes, line, capsys):
    words = ["specs/gpt_nano.yaml", "--nodes", "2", *(word for node in nodes for word in ("--exclude", node))]
    if len(nodes) == 1 and nodes != ["n1"]:
        assert line in get_error_line(capsys, *words)
    else:
        assert f"#SBATCH {line}\n" in dry_run(capsys, *words)


def test_options_of_srun_are_those_of_each_step(capsys):
    options = ["--srun-option=--mpi=none", "--srun-option=--comment=it's two words"]
    script = dry_run(capsys, "specs/gpt_nano.yaml", "--nodes", "2", *options)
    (line,) = [line for line in script.splitlines() if line.startswith("step_options=")]
    program = f'{line}; printf "%s\n" "${{step_options[@]}}"'
    words = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True).stdout.splitlines()
    assert words[-2:] == ["--mpi=none", "--comment=it's two words"]
    assert "own_python=/opt/env/bin/python\n" in script


def test_the_script_uses_the_python_outside_of_a_container(capsys):
    script = dry_run(capsys, "specs/gpt_nano.yaml", "--nodes", "2", "--srun-option=--container-image=registry#job:1")
    assert f"own_python={sys.executable}\n" in script
    assert "command=(/opt/env/bin/python -m runner specs/gpt_nano.yaml)" in script


@pytest.mark.parametrize("name", RENDERED_OPTIONS)
def test_the_script_is_valid_bash(name):
    result = subprocess.run(["bash", "-n", GOLDEN / name], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("accelerator", "options", "directives"),
    [
        ("any", [], ["--nodes=1"]),
        ("any", ["--nodes", "3", "--gpus-per-node", "4"], ["--nodes=3", "--gpus-per-node=4"]),
        ("cpu-4", ["--nodes", "2"], ["--nodes=2"]),
        ("h100-16", [], ["--nodes=2", "--gpus-per-node=8", "--exclusive", "--mem=0"]),
        ("h100-16", ["--nodes", "2"], ["--nodes=2", "--gpus-per-node=8", "--exclusive", "--mem=0"]),
        ("h200-4", [], ["--nodes=1", "--gpus-per-node=4"]),
        ("a100-16", ["--gpus-per-node", "4"], ["--nodes=4", "--gpus-per-node=4"]),
        ("2xh100-8", [], ["--nodes=2", "--gpus-per-node=8", "--exclusive", "--mem=0"]),
        ("b200", ["--nodes", "5"], ["--nodes=5", "--gpus-per-node=8", "--exclusive", "--mem=0"]),
    ],
)
def test_nodes_and_gpus_are_derived_from_the_accelerator(accelerator, options, directives, capsys):
    script = dry_run(capsys, "specs/gpt_nano.yaml", "--set", f"topology.accelerator={accelerator}", *options)
    asked = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    kinds = ("--nodes", "--gpus", "--exclusive", "--mem")
    assert [option for option in asked if option.startswith(kinds)] == directives


def test_a_job_has_one_process_per_node_or_one_per_gpu(capsys):
    words = ("specs/gpt_nano.yaml", "--set", "topology.accelerator=h100-16", "--spare-nodes", "1")
    one, each = dry_run(capsys, *words), dry_run(capsys, *words, "--tasks-per-node", "8")
    assert "#SBATCH --ntasks-per-node=1\n" in one
    assert "\nnum_tasks=2\n" in one
    assert "#SBATCH --ntasks-per-node=8\n" in each
    assert "\nnum_tasks=16\n" in each
    assert '--ntasks="$num_tasks"' in each


def test_the_notice_before_the_time_limit_is_derived_from_the_spec(capsys):
    needs = ["specs/gpt_nano.yaml", "--set", "checkpoint.grace_seconds=90"]
    assert "#SBATCH --signal=TERM@90\n" in dry_run(capsys, *needs)
    assert "#SBATCH --signal=TERM@30\n" in dry_run(capsys, *needs, "--grace-seconds", "30")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["specs/none.yaml"], "specs/none.yaml: cannot read the spec"),
        (["specs/gpt_nano.yaml", "--set", "sed=1"], "did you mean seed"),
        (["specs/gpt2_124m.yaml"], "v5e-16 is a TPU slice, but SLURM has nodes"),
        (
            ["specs/gpt_nano.yaml", "--set", "topology.accelerator=h100-9"],
            "9 GPUs do not divide into nodes of 8; use h100-8, or h100-16",
        ),
        (["specs/gpt_nano.yaml", "--set", "topology.accelerator=h100-16", "--nodes", "3"], "2 nodes of 8 GPUs"),
        (["specs/gpt_nano.yaml", "--set", "topology.accelerator=cpu", "--gpus-per-node", "1"], "cpu has no GPUs"),
        (["specs/gpt_nano.yaml", "--tasks-per-node", "4"], "--tasks-per-node 4: a node of this job has no GPUs"),
        (
            ["specs/gpt_nano.yaml", "--set", "topology.accelerator=h100-16", "--tasks-per-node", "4"],
            "has 8 GPUs, and a process uses all of them or one; use 1 or 8",
        ),
        (["specs/gpt_nano.yaml", "--time", "6"], "--time 6 leaves no time to train, since SIGTERM comes 300 s before"),
        (["specs/gpt_nano.yaml", "--time", "soon"], "--time soon: needs MINUTES"),
        (["specs/gpt_nano.yaml", "--sbatch-option=qos=high"], "needs one option of sbatch"),
        (["specs/gpt_nano.yaml", "--sbatch-option=--qos=high\nrm x"], "needs one option of sbatch"),
        (["specs/gpt_nano.yaml", "--srun-option=mpi=none"], "needs one option of srun"),
        (["specs/gpt_nano.yaml", "--srun-option=--mpi\nrm x"], "needs one option of srun"),
    ],
)
def test_invalid_submissions_are_rejected_in_one_line(arguments, line, capsys):
    assert line in get_error_line(capsys, *arguments)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("2:30", 150),
        ("1:00:30", 3630),
        ("1-6", 108000),
        ("1-6:30", 109800),
        ("2-00:00:01", 172801),
    ],
)
def test_time_limits_are_parsed_like_sbatch(text, seconds):
    assert engine._parse_time(text) == seconds


# Runs of the script with fake commands that record their calls.

RECORD_CALL = """#!/bin/bash
echo "$(basename "$0") $*" >>"$CALLS/calls"
"""
COMMANDS = {
    "srun": RECORD_CALL
    + """[[ $* != *" true" ]] || exec test ! -e "$CALLS/dead_$(sed -E 's/.*--nodelist=([^ ]+) .*/\\1/' <<<"$*")"
[[ ! ( $* == *" --overlap "* && -e $CALLS/overlap_fails ) ]] || exit 1
while [[ $1 != bash ]]; do shift; done
"$@" <&0 &
task=$!
trap 'echo "srun SIGTERM" >>"$CALLS/calls"' TERM
wait $task; code=$?
[[ ! -e $CALLS/srun_code ]] || code=$(cat "$CALLS/srun_code")
exit $code
""",
    "scontrol": RECORD_CALL
    + '[[ $1 != show ]] || exec cut -d " " -f 1 "$CALLS/nodes"\n'
    + "[[ ! -e $CALLS/scontrol_fails ]]\n",
    "scancel": RECORD_CALL + 'kill -TERM $(cat "$CALLS/task_pids")\n',
    "squeue": RECORD_CALL
    + '[[ $* == *%V* ]] && exec cat "$CALLS/submitted"\n'
    + '[[ $* == *%N* ]] && exec echo "n[1-9]"\ncat "$CALLS/state"\n',
    "sinfo": RECORD_CALL + 'cat "$CALLS/nodes"\n',
    "sleep": RECORD_CALL + '[[ ! -e $CALLS/pauses ]] || read -rt 30 <>"$CALLS/pipe"\n',
    "python": """#!/bin/bash
if [[ $2 == *read_progress* ]]; then
  [[ ! -e $CALLS/unreadable ]] || exit 1
  [[ ! -e $CALLS/progresses ]] || exec wc -l <"$CALLS/starts"
  exec echo 7
fi
[[ $1 != -c ]] || exec echo $([[ -e $CALLS/no_memory ]] && echo False || echo True)
if [[ -v RUNNER_STANDBY ]]; then
  echo $$ >>"$CALLS/standbys"
  read -r line <&3 || { echo 76 >>"$CALLS/standby_codes"; exit 76; }
  [[ -n $line ]] || { echo 0 >>"$CALLS/standby_codes"; exit 0; }
  echo "$line" >>"$CALLS/lines"
fi
printf '%s\\n' "$@" >"$CALLS/arguments"
echo "$RUNNER_SUBMITTED" >"$CALLS/environment"
trap 'echo told >>"$CALLS/told"' TERM HUP USR1 USR2
echo $$ $PPID >"$CALLS/task_pids.new" && mv "$CALLS/task_pids.new" "$CALLS/task_pids"
while [[ -e $CALLS/waits && ! ( -e $CALLS/told && -e $CALLS/may_end ) ]]; do read -rt 0.02 <>"$CALLS/pipe"; done
echo started >>"$CALLS/starts"
code=$(sed -n "$(wc -l <"$CALLS/starts")p" "$CALLS/code")
exit "${code:-$(tail -n 1 "$CALLS/code")}"
""",
}


class FakeSlurm:
    """A directory with fake SLURM commands, their state and records, and the script of a job."""

    def __init__(self, directory: Path, script: str):
        self.directory = directory
        (directory / "bin").mkdir()
        for name, text in COMMANDS.items():
            path = directory / "bin" / name
            path.write_text(text)
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        os.mkfifo(directory / "pipe")
        (directory / "script.sh").write_text(script)
        self.write("state", "RUNNING")
        self.write("nodes", "n1 allocated")
        self.write("submitted", "2026-11-02T03:04:05")

    def write(self, name: str, text: object) -> None:
        (self.directory / name).write_text(f"{text}\n")

    def read(self, name: str) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return (self.directory / name).read_text().splitlines()
        return []

    def calls(self, name: str) -> list[str]:
        return [line.partition(" ")[2] for line in self.read("calls") if line.startswith(f"{name} ")]

    def start(self, *codes: int, num_restarts: int = 0) -> subprocess.Popen[str]:
        """Start the script as SLURM does; its command exits with these codes in turn, then with the last one."""
        self.write("code", "\n".join(map(str, codes)))
        for name in ("calls", "told", "task_pids", "starts", "standbys", "standby_codes", "lines"):
            (self.directory / name).unlink(missing_ok=True)
        variables = dict(os.environ, CALLS=str(self.directory), SLURM_JOB_ID="42", SLURM_JOB_NODELIST="n[1-2]")
        variables["PATH"] = f"{self.directory}/bin:{variables['PATH']}"
        if num_restarts:
            variables["SLURM_RESTART_COUNT"] = str(num_restarts)
        command = ["bash", self.directory / "script.sh"]
        return subprocess.Popen(
            command, cwd=self.directory, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def run(self, *codes: int, num_restarts: int = 0) -> tuple[int, str]:
        """Run the script and return its exit code and output."""
        process = self.start(*codes, num_restarts=num_restarts)
        output, _ = process.communicate(timeout=DEADLINE_SECONDS)
        return process.returncode, output

    def start_waiting(self, code: int) -> subprocess.Popen[str]:
        """Start the script; its command exits with `code` only after SIGTERM and a call of `end`."""
        self.write("waits", "")
        process = self.start(code)
        self.wait_until(lambda: self.read("task_pids"))
        return process

    def wait_until(self, happens: Callable[[], object]) -> None:
        """Wait until a fake command has done something."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not happens():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def end(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        """Let the command end, and return the script's exit code and output."""
        self.write("may_end", "")
        output, _ = process.communicate(timeout=DEADLINE_SECONDS)
        return process.returncode, output


@pytest.fixture
def slurm(tmp_path, capsys):
    overrides = ["--set", "directory=a b/$HOME/it's", "--max-restarts", "2"]
    spec = tmp_path / "my specs" / "gpt nano.yaml"
    spec.parent.mkdir()
    spec.write_text((ROOT / "specs/gpt_nano.yaml").read_text())
    return FakeSlurm(tmp_path, dry_run(capsys, str(spec), *overrides, python=str(tmp_path / "bin/python")))


def test_the_runner_gets_its_arguments_unchanged(slurm):
    assert slurm.run(0) == (0, "")
    spec = str(slurm.directory / "my specs" / "gpt nano.yaml")
    assert slurm.read("arguments") == ["-m", "runner", spec, "--set", "directory=a b/$HOME/it's"]


@pytest.mark.parametrize("code", [0, 1, 2])
def test_a_final_code_ends_the_job(slurm, code):
    assert slurm.run(code) == (code, "")
    assert slurm.calls("scontrol") == []


@pytest.mark.parametrize(("code", "final"), [(139, 1), (127, 1), (3, 1)])
def test_an_unknown_code_is_a_failure(slurm, code, final):
    assert slurm.run(code)[0] == final
    assert slurm.calls("scontrol") == []


def test_a_preemption_requeues_the_job_and_does_not_count(slurm):
    for num_restarts in range(5):
        assert slurm.run(75, num_restarts=num_restarts) == (75, "launch: preempted; starting again\n")
        assert slurm.calls("scontrol") == ["requeue 42"]
    assert list(slurm.directory.glob("*.restarts")) == []


HERE = "launch: ended with 76; restart {} of 2, on the same nodes in {} s\n"
IN_QUEUE = "launch: ended with 76; restart {} of 2, in the queue\n"


@pytest.mark.daily(3)
@pytest.mark.parametrize("code", [76, 137, 134, *(128 + number for number in STOP_SIGNALS)])
def test_retryable_codes_and_kills_restart_the_command_on_the_same_nodes_and_count(slurm, code):
    assert slurm.run(code, 0) == (0, HERE.format(1, 1))
    assert slurm.calls("sleep") == ["1"]
    assert time.time() - 60 < int(slurm.read("environment")[0]) <= time.time()
    exhausted = "launch: ended with 76 after 2 restarts without a commit; --max-restarts allows no more\n"
    assert slurm.run(code) == (76, HERE.format(1, 1) + HERE.format(2, 2) + exhausted)
    assert len(slurm.read("starts")) == 3
    assert slurm.calls("scontrol") == []
    assert list(slurm.directory.glob("*.restarts")) == []


def test_a_commit_begins_a_new_count_of_restarts(slurm):
    slurm.write("progresses", "")
    assert slurm.run(76, 76, 76, 76, 0) == (0, "".join(HERE.format(1, 2**num_ends) for num_ends in range(4)))


def test_the_script_reads_the_time_of_the_newest_commit(tmp_path, monkeypatch):
    (program,) = re.findall(r"^find_last_commit='(.*?)'$", read_program("launch.slurm", "batch_script.sh"), re.M | re.S)
    words = ["specs/counter.yaml", "--set", f"directory={tmp_path}"]
    command = [sys.executable, "-c", program, *words]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "0\n"
    record = {
        "format": 1,
        "attempt": 1,
        "step": 5,
        "total_steps": 9,
        "committed": 1700000000.25,
        "hosts": None,
        "done": None,
    }
    (tmp_path / "progress.json").write_text(json.dumps(record))
    assert subprocess.run(command, capture_output=True, text=True).stdout == "1700000000250\n"


def test_commits_that_cannot_be_read_do_not_reset_the_count(slurm):
    slurm.write("unreadable", "")
    assert slurm.run(76)[1].endswith("after 2 restarts without a commit; --max-restarts allows no more\n")


def test_restarts_are_counted_over_requeues(slurm):
    assert slurm.run(76, 75) == (75, HERE.format(1, 1) + "launch: preempted; starting again\n")
    assert slurm.run(76, 1, num_restarts=1) == (1, HERE.format(2, 1))


@pytest.mark.parametrize(
    ("states", "are_healthy"),
    [
        (["allocated", "allocated"], True),
        (["mixed", "mixed"], True),
        (["mixed-", "allocated+"], True),
        (["allocated*", "allocated"], False),
        (["allocated", "down*"], False),
        (["draining", "drained"], False),
        (["fail", "idle"], False),
        (["allocated"], False),
        ([], False),
    ],
)
def test_a_job_whose_nodes_are_not_healthy_is_requeued(slurm, states, are_healthy):
    script = slurm.directory / "script.sh"
    script.write_text(script.read_text().replace("num_nodes=1", "num_nodes=2"))
    # A node is listed once for each partition that it is in.
    lines = [f"n{number} {state}" for number, state in enumerate(states, 1)]
    slurm.write("nodes", "\n".join([*lines, *lines]))
    code, output = slurm.run(76, 0)
    assert (code, output) == ((0, HERE.format(1, 1)) if are_healthy else (76, IN_QUEUE.format(1)))
    assert slurm.calls("scontrol") == ([] if are_healthy else ["requeue 42"])
    assert slurm.calls("sinfo") == ["--noheader --Node --nodes=n[1-9] --format=%N %T"]


@pytest.mark.parametrize(
    ("states", "dead", "chosen"),
    [
        ({}, [], "n1,n2"),
        ({"n1": "down*"}, [], "n2,n3"),
        ({"n2": "draining"}, [], "n1,n3"),
        ({}, ["n2"], "n1,n3"),
        ({}, ["n1", "n2"], "n3,n4"),
        ({"n2": "idle"}, ["n3"], "n1,n4"),  # taken out of the job, and back in service
        ({"n2": "fail", "n3": "fail"}, ["n1"], None),
    ],
)
def test_a_node_that_fails_is_replaced_by_a_spare_one(slurm, states, dead, chosen):
    script = slurm.directory / "script.sh"
    text = script.read_text().replace("num_spare_nodes=0", "num_spare_nodes=2")
    text = text.replace("num_nodes=1", "num_nodes=2").replace("num_tasks=1", "num_tasks=2")
    script.write_text(text)
    slurm.write("nodes", "\n".join(f"n{number} {states.get(f'n{number}', 'allocated')}" for number in range(1, 5)))
    for node in dead:
        slurm.write(f"dead_{node}", "")
    where = "the same nodes" if chosen == "n1,n2" else chosen
    code, output = slurm.run(76, 0)
    if chosen is None:
        assert (code, output) == (76, IN_QUEUE.format(1))
    else:
        assert (code, output) == (0, HERE.replace("the same nodes", where).format(1, 1))
    steps = [call for call in slurm.calls("srun") if "bash -c" in call]
    lists = [re.search(r"--nodes=2 --ntasks=2 --nodelist=(\S+)", call)[1] for call in steps]
    assert lists == ["n1,n2", *([chosen] if chosen else [])]


def test_only_some_nodes_are_tried_at_a_time(slurm):
    script = slurm.directory / "script.sh"
    text = (
        script.read_text().replace("num_spare_nodes=0", "num_spare_nodes=19").replace("max_probes=64", "max_probes=4")
    )
    script.write_text(text)
    slurm.write("nodes", "\n".join(f"n{number} allocated" for number in range(1, 21)))
    srun = slurm.directory / "bin" / "srun"
    probe = 'if [[ $* == *" true" ]]; then echo begin >>"$CALLS/probes"; read -rt 0.1 <>"$CALLS/pipe"; ' + (
        'echo end >>"$CALLS/probes"; exit 0; fi\n'
    )
    srun.write_text(srun.read_text().replace(RECORD_CALL, RECORD_CALL + probe))
    assert slurm.run(76, 0) == (0, HERE.format(1, 1))
    running = list(itertools.accumulate(1 if line == "begin" else -1 for line in slurm.read("probes")))
    assert (len(running), running[-1]) == (40, 0)
    assert 2 <= max(running) <= 4


def test_spare_nodes_are_allocated_and_the_job_survives_the_loss_of_one(capsys):
    script = dry_run(capsys, "specs/gpt_nano.yaml", "--nodes", "3", "--spare-nodes", "2")
    assert "#SBATCH --nodes=5\n" in script
    assert "#SBATCH --no-kill\n" in script
    assert "\nnum_nodes=3\nnum_tasks=3\nnum_spare_nodes=2\n" in script
    assert "--no-kill" not in dry_run(capsys, "specs/gpt_nano.yaml", "--nodes", "3")


def test_a_job_that_ends_at_once_again_and_again_is_requeued(slurm):
    script = slurm.directory / "script.sh"
    script.write_text(script.read_text().replace("max_restarts=2", "max_restarts=9"))
    code, output = slurm.run(76)
    assert code == 76
    assert output.splitlines()[-1] == "launch: ended with 76; restart 5 of 9, in the queue"
    assert slurm.calls("sleep") == ["1", "2", "4", "8", "0"]
    # One that has trained for a while in between starts over.
    script.write_text(script.read_text().replace("quick_seconds=60", "quick_seconds=0"))
    assert "restart 9 of 9, on the same nodes in 1 s" in slurm.run(76, num_restarts=1)[1]


@pytest.mark.parametrize(("state", "requeues"), [("RUNNING", ["requeue 42"]), ("COMPLETING", [])])
def test_a_signal_between_two_starts_ends_the_pause(slurm, state, requeues):
    slurm.write("pauses", "")
    process = slurm.start(76)
    slurm.wait_until(lambda: slurm.calls("sleep"))
    slurm.write("state", state)
    (slurm.directory / "pauses").unlink()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 75
    assert slurm.calls("scontrol") == requeues
    assert len(slurm.read("starts")) == 1
    assert output.startswith(HERE.format(1, 1))


def test_a_job_that_was_told_to_stop_is_requeued_after_any_end(slurm):
    process = slurm.start_waiting(76)
    process.send_signal(signal.SIGTERM)
    slurm.wait_until(lambda: slurm.read("told"))
    assert slurm.end(process) == (76, IN_QUEUE.format(1))
    assert slurm.calls("scontrol") == ["requeue 42"]


def test_a_new_job_with_the_same_number_starts_a_new_count(slurm):
    slurm.run(76, 75)
    assert "restart 1 of 2" in slurm.run(76, 0)[1]


@pytest.mark.parametrize(("task_codes", "code"), [([76, 202], 1), ([201, 76], 2), ([137, 202], 1), ([75, 76], 76)])
def test_the_job_exits_with_the_most_specific_code_of_its_tasks(slurm, task_codes, code):
    slurm.write("srun_code", max(task_codes))
    assert slurm.run(0)[0] == code


@pytest.mark.parametrize("code", [1, 143, 137])
def test_a_failure_of_srun_itself_is_retryable(slurm, code):
    slurm.write("srun_code", code)
    assert slurm.run(0)[0] == 76
    assert len(slurm.calls("srun")) == 3


def list_state_queries(slurm: FakeSlurm) -> list[str]:
    return [call for call in slurm.calls("squeue") if "--format=%T" in call]


@pytest.mark.parametrize(("submitted", "seconds"), [("2026-11-02T03:04:05", "1793588645"), ("", ""), ("soon", "")])
def test_the_command_gets_the_submit_time(slurm, submitted, seconds, monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    slurm.write("submitted", submitted)
    assert slurm.run(0)[0] == 0
    assert slurm.read("environment") == [seconds]


@pytest.mark.parametrize("number", SCHEDULER_SIGNALS)
def test_a_signal_to_the_shell_reaches_the_tasks_once_but_not_srun(slurm, number):
    process = slurm.start_waiting(75)
    for num_signals in (1, 2):
        process.send_signal(number)
        slurm.wait_until(lambda count=num_signals: len(list_state_queries(slurm)) == count and slurm.read("told"))
    assert slurm.end(process) == (75, "launch: preempted; starting again\n")
    assert slurm.calls("scancel") == ["--signal=TERM 42"]
    assert slurm.read("told") == ["told"]
    assert "SIGTERM" not in slurm.calls("srun")
    assert slurm.calls("scontrol") == ["requeue 42"]


@pytest.mark.parametrize(
    ("code", "number"),
    [(0, signal.SIGTERM), (76, signal.SIGTERM), *((75, number) for number in SCHEDULER_SIGNALS)],
)
def test_a_job_ended_by_slurm_is_not_requeued(slurm, code, number):
    slurm.write("state", "COMPLETING")
    process = slurm.start_waiting(code)
    process.send_signal(number)
    for pid in slurm.read("task_pids")[0].split():
        os.kill(int(pid), number)
    assert slurm.end(process) == (code, f"launch: ended with {code}; SLURM decides whether the job starts again\n")
    assert slurm.calls("scontrol") == slurm.calls("scancel") == []


def test_a_failing_requeue_is_retried_and_then_reported(slurm):
    slurm.write("scontrol_fails", "")
    code, output = slurm.run(75)
    assert code == 75
    assert output.splitlines()[-1] == "launch: cannot requeue job 42; requeue it by hand"
    assert slurm.calls("scontrol") == ["requeue 42"] * 4
    assert slurm.calls("sleep") == ["0", "10", "30", "60"]


# A standby.


class StandbyScript:
    """The script of a job whose first attempt has run for longer than its standby needs to wait."""

    def __init__(self, slurm: FakeSlurm, has_standby: bool = True, seconds: int = 1, code: int = 0):
        self.slurm, script = slurm, slurm.directory / "script.sh"
        script.write_text(script.read_text().replace("standby_seconds=30", f"standby_seconds={seconds}"))
        slurm.write("waits", "")
        self.process = slurm.start(code)
        began = time.monotonic()
        slurm.wait_until(lambda: slurm.read("task_pids"))
        if has_standby:
            slurm.wait_until(lambda: slurm.read("standbys"))
        time.sleep(max(began + 3.5 - time.monotonic(), 0))

    def kill_command(self) -> tuple[int, str]:
        """Kill the command, whose successor ends at once; return the script's exit code and last line."""
        self.kill(self.slurm.read("task_pids")[0].split()[0])
        (self.slurm.directory / "waits").unlink()  # after the kill, or the command may end first
        output, _ = self.process.communicate(timeout=DEADLINE_SECONDS)
        return self.process.returncode, output.splitlines(keepends=True)[-1]  # bash tells of the kill

    def kill(self, pid: str) -> None:
        os.kill(int(pid), signal.SIGKILL)

    def num_steps(self) -> int:
        return sum(call.startswith("--label ") for call in self.slurm.calls("srun"))


def assert_took_the_line(slurm: FakeSlurm) -> None:
    (line,) = map(json.loads, slurm.read("lines"))
    spec = str(slurm.directory / "my specs" / "gpt nano.yaml")
    assert line["words"] == [spec, "--set", "directory=a b/$HOME/it's"]
    assert time.time() - 60 < int(line["variables"]["RUNNER_SUBMITTED"]) <= time.time()


def test_a_restart_takes_the_standby(slurm):
    script = StandbyScript(slurm)
    assert script.kill_command() == (0, HERE.format(1, 1))
    assert_took_the_line(slurm)
    assert script.num_steps() == 2
    assert len(slurm.read("standbys")) == len(slurm.read("starts")) == 1


@pytest.mark.soak
def test_a_killed_standby_is_replaced_by_a_process_that_gets_its_line(slurm):
    script = StandbyScript(slurm)
    script.kill(slurm.read("standbys")[0])
    assert script.kill_command() == (0, HERE.format(1, 1))
    assert_took_the_line(slurm)
    assert script.num_steps() == 2
    assert len(slurm.read("standbys")) == 2


@pytest.mark.soak
def test_a_standby_without_memory_begins_with_its_line(slurm):
    slurm.write("no_memory", "")
    script = StandbyScript(slurm, has_standby=False)
    assert slurm.read("standbys") == []
    assert script.kill_command() == (0, HERE.format(1, 1))
    assert_took_the_line(slurm)
    assert script.num_steps() == 2


@pytest.mark.parametrize("cause", ["age", pytest.param("off", marks=pytest.mark.soak), "step", "nodes"])
@pytest.mark.soak
def test_a_restart_without_a_usable_standby_starts_a_step(slurm, cause):
    if cause == "step":
        slurm.write("overlap_fails", "")
    if cause == "nodes":
        script = slurm.directory / "script.sh"
        script.write_text(script.read_text().replace("num_spare_nodes=0", "num_spare_nodes=1"))
        slurm.write("nodes", "n1 allocated\nn2 allocated")
    script = StandbyScript(slurm, has_standby=cause == "nodes", seconds={"age": 30, "off": 0}.get(cause, 1))
    slurm.write("nodes", "n2 allocated")
    code, output = script.kill_command()
    where = "n2" if cause == "nodes" else "the same nodes"
    assert (code, output) == (0, HERE.replace("the same nodes", where).format(1, 1))
    assert slurm.read("lines") == []
    assert script.num_steps() == {"age": 2, "off": 2}.get(cause, 3)
    assert slurm.read("standby_codes") == (["0"] if cause == "nodes" else [])
    assert slurm.read("arguments")[:2] == ["-m", "runner"]
    assert len(slurm.read("arguments")) == 5


@pytest.mark.soak
@pytest.mark.parametrize("code", [0, 75, None])
def test_a_standby_ends_with_the_script(slurm, code):
    script = StandbyScript(slurm, code=code or 0)
    if code is None:
        script.process.kill()
    else:
        script.process.send_signal(signal.SIGTERM)
        slurm.wait_until(lambda: slurm.read("told"))
    slurm.write("may_end", "")
    slurm.write("told", "")
    script.process.communicate(timeout=DEADLINE_SECONDS)
    slurm.wait_until(lambda: slurm.read("standby_codes"))
    # A line that is lost must not look like the end of the job.
    assert slurm.read("standby_codes") == ["76" if code is None else "0"]


# Submission.


@pytest.fixture
def submit(tmp_path, monkeypatch, capsys):
    """Submit a job to an sbatch that the test writes; return the exit code and output."""

    def act(sbatch: str | None) -> tuple[int, str, str]:
        if sbatch is not None:
            path = tmp_path / "sbatch"
            path.write_text(f"#!/bin/bash\n{sbatch}\n")
            path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path) if sbatch is None else f"{tmp_path}:/usr/bin:/bin")
        code = main(["slurm", "specs/gpt_nano.yaml"])
        output = capsys.readouterr()
        return code, output.out, output.err

    return act


def test_sbatch_gets_the_script_on_standard_input(submit, tmp_path, capsys):
    assert submit(f"echo \"$@\" >{tmp_path}/arguments; cat >{tmp_path}/script; echo '42;cluster'") == (
        *(0, "submitted as job 42\n", ""),
    )
    assert (tmp_path / "arguments").read_text() == "--parsable\n"
    assert (tmp_path / "script").read_text() == dry_run(capsys, "specs/gpt_nano.yaml", python=sys.executable)


def test_a_missing_sbatch_is_reported_with_an_alternative(submit):
    code, output, line = submit(None)
    assert (code, output) == (2, "")
    assert line == "sbatch is not on the PATH; submit on a login node of the cluster, or print with --dry-run\n"


@pytest.mark.parametrize(
    ("complaint", "code"),
    [
        ("sbatch: error: Batch job submission failed: Invalid partition name specified", 2),
        ("sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)", 76),
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", 76),
    ],
)
def test_errors_of_sbatch_are_passed_on(submit, complaint, code):
    assert submit(f"cat >/dev/null; echo '{complaint}' >&2; exit 1") == (code, "", f"{complaint}\n")
