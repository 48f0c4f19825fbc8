"""The script for sbatch: its options, the variables of `batch_script.sh`, and that program below them."""

import argparse
import re
import shlex

from launch.options import grace_seconds, runner_arguments
from launch.shell import read_program
from launch.slurm.allocation import Allocation
from runner.errors import InvalidError
from runner.spec import ExecutionSpec

LINGER_SECONDS = 120  # what tasks get to end by themselves once the first has ended
_EARLY_SECONDS = 60  # by which SLURM may send a signal too early


def render(spec: ExecutionSpec, nodes: Allocation, parsed: argparse.Namespace) -> str:
    """The batch script."""
    notice_seconds = grace_seconds(parsed, spec.checkpoint)
    if parsed.time is not None and _time_seconds(parsed.time) <= notice_seconds + _EARLY_SECONDS:
        raise InvalidError(
            f"--time {parsed.time} leaves no time to train: SIGTERM comes {notice_seconds} s before its end, or up to "
            f"{_EARLY_SECONDS} s sooner; give more time, or fewer --grace-seconds"
        )
    options = [
        f"--job-name={spec.name}",
        f"--nodes={nodes.num_nodes}",
        "--ntasks-per-node=1",
        "--requeue",
        "--open-mode=append",
        f"--output={parsed.output}",
        f"--signal=TERM@{notice_seconds}",
    ]
    step_options = ["--label", "--kill-on-bad-exit=0", f"--wait={LINGER_SECONDS}"]
    if nodes.gpus_per_node is not None:
        options.append(f"--gpus-per-node={nodes.gpus_per_node}")
    if nodes.takes_whole_nodes:
        options += ["--exclusive", "--mem=0"]
    if parsed.cpus_per_task is not None:
        options.append(f"--cpus-per-task={parsed.cpus_per_task}")
        step_options.append(f"--cpus-per-task={parsed.cpus_per_task}")  # srun does not take it over
    for key in ("time", "partition", "account"):
        if getattr(parsed, key) is not None:
            options.append(f"--{key}={getattr(parsed, key)}")
    command = [parsed.python, *runner_arguments(parsed.spec, parsed.set)]
    lines = [
        "#!/bin/bash",
        "# Rendered by python -m launch slurm: the same command on every node, again and again until it is done.",
        *map(_directive, [*options, *parsed.sbatch_option]),
        "set -u",
        f"name={spec.name}",
        f"command=({' '.join(map(_bash_word, command))})",
        f"step_options=({shlex.join(step_options)})",
        f"max_restarts={parsed.max_restarts}",
    ]
    return "\n".join(lines) + "\n\n" + read_program(__package__, "batch_script.sh")


def _time_seconds(text: str) -> int:
    """Seconds of a time as sbatch takes it: minutes, minutes:seconds, [days-]hours:minutes:seconds, days-hours."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        raise InvalidError(f"--time {text}: needs MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS:MINUTES:SECONDS")
    days, first, second, third = (int(part or 0) for part in match.groups())
    if match[1] is None and match[4] is None:
        return 60 * first + second
    return 86400 * days + 3600 * first + 60 * second + third


def _bash_word(text: str) -> str:
    """A word for bash, on one line: sbatch refuses a script with a carriage return, and reads options in its lines."""
    if text.isprintable():
        return shlex.quote(text)
    plain = (character if character.isprintable() and character not in "\\'" else None for character in text)
    escaped = (
        known or "".join(f"\\x{byte:02x}" for byte in character.encode())
        for known, character in zip(plain, text, strict=True)
    )
    return f"$'{''.join(escaped)}'"


def _directive(option: str) -> str:
    """A line of options for sbatch, whose quotes are a shell's but for backslashes."""
    if not option.startswith("-") or not option.isprintable():
        raise InvalidError(
            f"--sbatch-option={option!r}: needs one option of sbatch, such as --sbatch-option=--qos=high"
        )
    escaped = option.replace("\\", "\\\\")
    return f"#SBATCH {shlex.quote(escaped)}"
