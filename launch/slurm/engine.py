"""Engine `slurm`: the job as a batch job of one task per node or GPU, which its script starts again after 75 and 76.

Renders a script for sbatch (its options, the variables of `batch_script.sh`, and that program below them) and submits
it. SLURM itself requeues a job whose node has failed, and a job that it preempts. It does not react to exit codes, so
the script does: it requeues the job after 75, and restarts it in the same allocation after 76, in a standby if one
waits.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import typer

from launch.checks import SkipChecks, check_job
from launch.options import (
    SUBMIT_TIME_VARIABLE,
    DryRun,
    Exclude,
    GraceSeconds,
    LaunchArguments,
    Nodes,
    find_grace_seconds,
    read_program,
    runner_arguments,
)
from runner.accelerator import parse_accelerator
from runner.console import say, warn, write_text
from runner.errors import EXIT_DONE, InvalidError, RetryableError
from runner.spec import Document, ExecutionSpec, load_document, validate_spec

LINGER_SECONDS = 120  # time for the other tasks to end by themselves once one has ended
_EARLY_SECONDS = 60  # by which SLURM may send a signal too early
_UNREACHABLE = ("Unable to contact slurm controller", "Socket timed out", "Zero Bytes were transmitted")


@dataclass(frozen=True, kw_only=True)
class SlurmArguments(LaunchArguments):
    """Arguments of `launch slurm`."""

    free_texts: ClassVar[tuple[str, ...]] = (*LaunchArguments.free_texts, "sbatch_option", "srun_option")

    nodes: Nodes = None
    spare_nodes: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Further nodes of the allocation, idle until they replace one that has failed."
        ),
    ] = 0
    gpus_per_node: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="GPUs of each node. Default: those of the accelerator's usual hosts."),
    ] = None
    tasks_per_node: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Processes of each node: one for all of its GPUs, or as many as it has GPUs."
        ),
    ] = 1
    cpus_per_task: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Cores of each process; by default all where nodes are whole."),
    ] = None
    time: Annotated[str | None, typer.Option(metavar="T", help="Time limit of one start, in sbatch's format.")] = None
    partition: Annotated[str | None, typer.Option(metavar="NAME", help="Partition of the cluster.")] = None
    account: Annotated[str | None, typer.Option(metavar="NAME", help="Account that the job is charged to.")] = None
    exclude: Exclude = field(default_factory=list)
    output: Annotated[str, typer.Option(metavar="PATH", help="Log of all starts.")] = "%x-%j.log"
    grace_seconds: GraceSeconds = None
    python: Annotated[str, typer.Option(metavar="PATH", show_default="this one", help="Python of the nodes.")] = (
        sys.executable
    )
    sbatch_option: Annotated[
        list[str],
        typer.Option(metavar="OPTION", help="Option for sbatch, as in --sbatch-option=--qos=high; repeatable."),
    ] = field(default_factory=list)
    srun_option: Annotated[
        list[str],
        typer.Option(
            metavar="OPTION", help="Option for srun, as in --srun-option=--container-image=registry#job:1; repeatable."
        ),
    ] = field(default_factory=list)
    is_skip_checks: SkipChecks = False
    dry_run: DryRun = False


@dataclass(frozen=True)
class Allocation:
    """Resources that the job requests from the cluster."""

    num_nodes: int
    gpus_per_node: int | None = None  # number of GPUs of each node; None to request none
    takes_whole_nodes: bool = False  # True if no other job may share a node


def run(arguments: SlurmArguments) -> int:
    """Render the job's script, and submit or print it."""
    document = load_document(arguments.spec, arguments.overrides)
    spec = validate_spec(document)
    allocation = allocate(document, spec, arguments.nodes, arguments.gpus_per_node)
    script = render(spec, allocation, arguments)
    if not arguments.is_skip_checks:
        check_job(arguments, has_shared_files=True, topology=find_topology(spec, allocation))
    if arguments.dry_run:
        write_text(script, is_program=True)
    else:
        say(f"submitted as job {submit(script)}")
    return EXIT_DONE


def find_topology(spec: ExecutionSpec, allocation: Allocation) -> str | None:
    """Return the accelerator with its number, which the options give, or None if the spec names it."""
    accelerator = None if spec.topology is None else parse_accelerator(spec.topology.accelerator)
    if accelerator is not None and accelerator.num_chips is not None:
        return None
    # The batch must divide over this number of devices.
    name = "cpu" if accelerator is None else accelerator.name
    return f"{name}-{allocation.num_nodes * (allocation.gpus_per_node or 1)}"


def submit(script: str) -> str:
    """Submit a batch script, and return the id of its job. Raises `InvalidError`, or `RetryableError`."""
    if shutil.which("sbatch") is None:
        raise InvalidError("sbatch is not on the PATH; submit on a login node of the cluster, or print with --dry-run")
    result = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True)
    complaint = result.stderr.strip()
    if result.returncode != 0:
        # sbatch gives hints first and the error last.
        line = complaint.rpartition("\n")[2] or f"sbatch ended with {result.returncode}"
        raise (RetryableError if any(words in complaint for words in _UNREACHABLE) else InvalidError)(line)
    if complaint:
        warn(complaint)
    return result.stdout.strip().partition(";")[0]


def allocate(document: Document, spec: ExecutionSpec, num_nodes: int | None, gpus_per_node: int | None) -> Allocation:
    """Return the nodes that the spec's accelerator needs.

    The numbers are those of the options. The document is the origin of the spec, for messages.

    Raises:
        SpecError: the accelerator cannot be allocated by SLURM, or contradicts the options.
    """
    name = spec.topology.accelerator if spec.topology is not None else "any"
    accelerator = parse_accelerator(name)
    if accelerator is None:
        return Allocation(num_nodes or 1, gpus_per_node)
    key, chip = "topology.accelerator", accelerator.chip
    if chip.is_tpu:
        raise document.error(
            key, f"{name} is a TPU slice, but SLURM has nodes of GPUs or CPUs; launch it with jobset or tpu-vm"
        )
    if chip.chips_per_host is None:
        if gpus_per_node is not None:
            raise document.error(key, f"{name} has no GPUs; leave out --gpus-per-node")
        return Allocation(num_nodes or 1)
    is_even = accelerator.num_chips is not None and accelerator.num_chips % accelerator.hosts_per_slice == 0
    per_node = gpus_per_node or (is_even and accelerator.num_chips_per_host) or chip.chips_per_host
    # A job that takes all GPUs of a node may take its cores and memory too; one that takes some must share.
    is_whole_node = per_node == chip.chips_per_host
    if accelerator.num_chips is None:
        return Allocation(num_nodes or 1, per_node, is_whole_node)
    # A slice is a notion of TPUs; for GPUs `2xh100-8` is simply 16 of them.
    num_gpus = accelerator.num_slices * accelerator.num_chips
    if num_gpus % per_node:
        raise document.error(
            key,
            f"{num_gpus} GPUs do not divide into nodes of {per_node}; use "
            f"{accelerator.name}-{max(num_gpus // per_node, 1) * per_node}, or "
            f"{accelerator.name}-{(num_gpus // per_node + 1) * per_node}, or give another --gpus-per-node",
        )
    if num_nodes not in (None, num_gpus // per_node):
        raise document.error(
            key,
            f"{name} is {num_gpus // per_node} nodes of {per_node} GPUs, but --nodes is {num_nodes}; leave out --nodes",
        )
    return Allocation(num_gpus // per_node, per_node, is_whole_node)


@dataclass(frozen=True)
class JobArray:
    """Runs of a sweep as the tasks of one array job."""

    tasks: Mapping[int, Sequence[str]]  # overrides by index of the task
    at_once: int | None  # number of tasks that may run at the same time
    comment: str  # by which the queue finds its tasks


def render(
    spec: ExecutionSpec, allocation: Allocation, arguments: SlurmArguments, array: JobArray | None = None
) -> str:
    """Return the batch script, of one job or of an array."""
    notice_seconds = find_grace_seconds(arguments.grace_seconds, spec.checkpoint)
    if arguments.tasks_per_node not in (1, allocation.gpus_per_node):
        gpus = "no GPUs" if allocation.gpus_per_node is None else f"{allocation.gpus_per_node} GPUs"
        choice = "1" if allocation.gpus_per_node is None else f"1 or {allocation.gpus_per_node}"
        raise InvalidError(
            f"--tasks-per-node {arguments.tasks_per_node}: a node of this job has {gpus}, and a process uses all of "
            f"them or one; use {choice}"
        )
    if arguments.time is not None and _parse_time(arguments.time) <= notice_seconds + _EARLY_SECONDS:
        raise InvalidError(
            f"--time {arguments.time} leaves no time to train, since SIGTERM comes {notice_seconds} s before its end, "
            f"or up to {_EARLY_SECONDS} s sooner; give more time, or fewer --grace-seconds"
        )
    options = [
        f"--job-name={spec.name}",
        f"--nodes={allocation.num_nodes + arguments.spare_nodes}",
        f"--ntasks-per-node={arguments.tasks_per_node}",
        "--requeue",
        "--open-mode=append",
        f"--output={arguments.output}",
        f"--signal=TERM@{notice_seconds}",
    ]
    if arguments.spare_nodes:
        options.append("--no-kill")  # SLURM would end a job that has lost a node
    # srun must not kill the other tasks at once: they end by themselves, with an exit code that gives the reason.
    step_options = ["--label", "--kill-on-bad-exit=0", f"--wait={LINGER_SECONDS}"]
    if allocation.gpus_per_node is not None:
        options.append(f"--gpus-per-node={allocation.gpus_per_node}")
    if allocation.takes_whole_nodes:
        # 0 stands for all memory of the node; sbatch would else give the default for one task.
        options += ["--exclusive", "--mem=0"]
    if arguments.cpus_per_task is not None:
        options.append(f"--cpus-per-task={arguments.cpus_per_task}")
        step_options.append(f"--cpus-per-task={arguments.cpus_per_task}")  # srun does not inherit it from sbatch
    for option in arguments.srun_option:
        _validate_option("--srun-option", option)
    step_options += arguments.srun_option
    # The batch script itself runs outside of the containers of its steps, where `--python` may not exist.
    has_container = any(option.startswith("--container") for option in arguments.srun_option)
    optional = {"time": arguments.time, "partition": arguments.partition, "account": arguments.account}
    for node in arguments.exclude:
        if re.fullmatch(r"[A-Za-z0-9._\[\],-]+", node) is None:
            raise InvalidError(f"--exclude {node!r:.100}: needs the name of a node, or a list such as node[1-3]")
    if arguments.exclude:
        options.append(f"--exclude={','.join(arguments.exclude)}")
    options += [f"--{name}={value}" for name, value in optional.items() if value is not None]

    def format_job(overrides: Sequence[str]) -> list[str]:
        command = [arguments.python, *runner_arguments(arguments.spec, overrides)]
        # A standby gets what follows `python -m runner`, and the variable that the script sets at each restart.
        line = json.dumps({"variables": {SUBMIT_TIME_VARIABLE: "@submit_time@"}, "words": command[3:]})
        return [f"command=({' '.join(map(_quote, command))})", f"standby_line={_quote(line)}"]

    command, standby_line = format_job(arguments.overrides)
    program, first = read_program(__package__, "batch_script.sh"), list[str]()
    if array is not None:
        limit = "" if array.at_once is None else f"%{array.at_once}"
        options += [f"--array={','.join(map(str, array.tasks))}{limit}", f"--comment={array.comment}"]
        # SLURM gives one task the id of the whole array, so commands name a task by its index.
        first = ["job_id=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"]
        program = program.replace("$SLURM_JOB_ID", "$job_id")
        tasks = {index: " ".join(format_job(overrides)) for index, overrides in array.tasks.items()}
        cases = [f"  {index}) {assignments} ;;" for index, assignments in tasks.items()]
        command, standby_line = "\n".join(["case $SLURM_ARRAY_TASK_ID in", *cases, "esac"]), ""
    lines = [
        "#!/bin/bash",
        "# Rendered by python -m launch slurm: the same command on every node, again and again until it is done.",
        *map(_format_directive, [*options, *arguments.sbatch_option]),
        "set -u",
        f"name={spec.name}",
        *first,
        command,
        f"own_python={_quote(sys.executable if has_container else arguments.python)}",
        *([standby_line] if standby_line else []),
        f"step_options=({shlex.join(step_options)})",
        f"max_restarts={arguments.max_restarts}",
        f"num_nodes={allocation.num_nodes}",
        f"num_tasks={allocation.num_nodes * arguments.tasks_per_node}",
        f"num_spare_nodes={arguments.spare_nodes}",
        f"standby_seconds={arguments.standby_seconds}",
    ]
    return "\n".join(lines) + "\n\n" + program


def _parse_time(text: str) -> int:
    """Return the seconds of sbatch's formats: minutes, minutes:seconds, [days-]hours:minutes:seconds, days-hours."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        raise InvalidError(f"--time {text}: needs MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS:MINUTES:SECONDS")
    days, first, second, third = (int(part or 0) for part in match.groups())
    # One or two numbers without days are minutes and seconds, unlike the hours and minutes of any longer form.
    if match[1] is None and match[4] is None:
        return 60 * first + second
    return 86400 * days + 3600 * first + 60 * second + third


def _quote(text: str) -> str:
    """Return a word for bash on one line.

    sbatch refuses a script with a carriage return, and would read options in the lines of a value.
    """
    if text.isprintable():
        return shlex.quote(text)
    escaped = (
        character
        if character.isprintable() and character not in "\\'"
        else "".join(f"\\x{byte:02x}" for byte in character.encode())
        for character in text
    )
    return f"$'{''.join(escaped)}'"


def _validate_option(name: str, option: str) -> None:
    """Raise `InvalidError` if the value of an option of the command line is no option of SLURM."""
    if not option.startswith("-") or not option.isprintable():
        raise InvalidError(
            f"{name}={option!r}: needs one option of {name[2:].partition('-')[0]}, such as {name}=--qos=high"
        )


def _format_directive(option: str) -> str:
    """Return a line with an option for sbatch, whose quoting is that of a shell but for backslashes."""
    _validate_option("--sbatch-option", option)
    escaped = option.replace("\\", "\\\\")
    return f"#SBATCH {shlex.quote(escaped)}"
