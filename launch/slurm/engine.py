"""The script for sbatch: its options, the variables of `batch_script.sh`, and that program below them.

The nodes and GPUs to ask SLURM for, from what a spec's accelerator is.

The job as a batch job of SLURM: one task a node, started again by the script itself after 75 and 76.

Renders a script for sbatch and submits it. What SLURM does by itself is left to it: it requeues a job whose node has
failed, and one that it preempts. It knows no exit codes, so the script is what starts the job again after them.
"""

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass

from launch.options import add_grace_seconds, grace_seconds, natural, positive, read_program, runner_arguments
from runner.accelerator import parse_accelerator
from runner.console import say, warn
from runner.errors import EXIT_DONE, InvalidError, RetryableError
from runner.spec import Document, ExecutionSpec, load_document, validate_spec


@dataclass(frozen=True)
class Allocation:
    """What the job asks of the cluster. `gpus_per_node` None = none are asked for."""

    num_nodes: int
    gpus_per_node: int | None = None
    takes_whole_nodes: bool = False


def allocate(document: Document, spec: ExecutionSpec, num_nodes: int | None, gpus_per_node: int | None) -> Allocation:
    """The nodes that the spec's accelerator needs. Raises `InvalidError` for what SLURM nodes are not."""
    name = spec.topology.accelerator if spec.topology is not None else "any"
    accelerator = parse_accelerator(name)
    if accelerator is None:
        return Allocation(num_nodes or 1, gpus_per_node)
    chip = accelerator.chip
    if chip.is_tpu:
        raise document.error(
            "topology.accelerator",
            f"{name} is a TPU slice, SLURM has nodes of GPUs or CPUs; launch it by jobset or tpu-vm",
        )
    if chip.chips_per_host is None:
        if gpus_per_node is not None:
            raise document.error("topology.accelerator", f"{name} has no GPUs; leave out --gpus-per-node")
        return Allocation(num_nodes or 1)
    per_node = gpus_per_node or accelerator.num_chips_per_host or chip.chips_per_host
    whole = per_node == chip.chips_per_host
    if accelerator.num_chips is None:
        return Allocation(num_nodes or 1, per_node, whole)
    num_gpus = accelerator.num_slices * accelerator.num_chips
    if num_gpus % per_node:
        raise document.error("topology.accelerator", f"{num_gpus} GPUs do not divide over nodes of {per_node}")
    if num_nodes not in (None, num_gpus // per_node):
        raise document.error(
            "topology.accelerator", f"{name} is {num_gpus // per_node} nodes of {per_node} GPUs, --nodes is {num_nodes}"
        )
    return Allocation(num_gpus // per_node, per_node, whole)


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


HELP = "submit the job to SLURM, or print its batch script"
_UNREACHABLE = ("Unable to contact slurm controller", "Socket timed out", "Zero Bytes were transmitted")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this engine."""
    parser.add_argument("--nodes", type=positive, metavar="N", help="where the spec's accelerator leaves it open; 1")
    parser.add_argument("--gpus-per-node", type=positive, metavar="N", help="default: as the accelerator's hosts have")
    parser.add_argument("--cpus-per-task", type=positive, metavar="N", help="cores of each node that the job may use")
    parser.add_argument("--time", metavar="T", help="limit of one start, as sbatch takes it")
    parser.add_argument("--partition", metavar="NAME")
    parser.add_argument("--account", metavar="NAME")
    parser.add_argument("--output", default="%x-%j.log", metavar="PATH", help="log of all starts; %%x-%%j.log")
    add_grace_seconds(parser, "from SIGTERM to the time limit")
    parser.add_argument("--max-restarts", type=natural, default=100, metavar="N", help="after 76; default 100")
    parser.add_argument("--python", default=sys.executable, metavar="PATH", help="on the nodes; default: this one")
    parser.add_argument(
        "--sbatch-option", action="append", default=[], metavar="OPTION", help="such as --sbatch-option=--qos=high"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the script, submit nothing")


def run(parsed: argparse.Namespace) -> int:
    """Render the job's script and submit it, or print it."""
    document = load_document(parsed.spec, parsed.set)
    spec = validate_spec(document)
    script = render(spec, allocate(document, spec, parsed.nodes, parsed.gpus_per_node), parsed)
    if parsed.dry_run:
        print(script, end="")
    else:
        say(f"submitted as job {_submit(script)}")
    return EXIT_DONE


def _submit(script: str) -> str:
    """Hand the script to sbatch; the job's id. Raises `InvalidError`, or `RetryableError` if SLURM does not answer."""
    if shutil.which("sbatch") is None:
        raise InvalidError("sbatch is not on the PATH; submit on a login node of the cluster, or print with --dry-run")
    result = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True)
    complaint = result.stderr.strip()
    if result.returncode == 0:
        if complaint:
            warn(complaint)
        return result.stdout.strip().partition(";")[0]
    line = complaint.rpartition("\n")[2] or f"sbatch ended with {result.returncode}"
    raise (RetryableError if any(words in complaint for words in _UNREACHABLE) else InvalidError)(line)
