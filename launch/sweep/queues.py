"""Runs of a sweep as jobs of a queue: an array job of SLURM, or a JobSet each.

Runs that have ended are not submitted, nor those that wait or run in the queue.
"""

import subprocess
from collections.abc import Sequence
from dataclasses import replace

from launch.kubernetes import engine as kubernetes
from launch.kubernetes.engine import JobSetArguments
from launch.options import LaunchArguments
from launch.slurm import engine as slurm
from launch.slurm.engine import JobArray, SlurmArguments
from launch.sweep.points import format_setting_line
from launch.sweep.record import SweepRecord
from runner.console import say, write_text
from runner.errors import EXIT_DONE, InvalidError, RetryableError
from runner.history.sweep import SweepRun
from runner.spec import Document, ExecutionSpec, load_document, validate_spec


def find_topology(document: Document, spec: ExecutionSpec, arguments: LaunchArguments) -> str | None:
    """Return the accelerator of a job whose spec names no number of chips, as the options of the engine give it."""
    if isinstance(arguments, SlurmArguments):
        allocation = slurm.allocate(document, spec, arguments.nodes, arguments.gpus_per_node)
        return slurm.find_topology(spec, allocation)
    return kubernetes.find_topology(arguments) if isinstance(arguments, JobSetArguments) else None


def submit(record: SweepRecord, arguments: LaunchArguments, at_once: int | None, *, is_dry: bool) -> int:
    """Submit all runs that have not ended, or print what would be submitted; return the exit code."""
    runs = record.sweep.runs
    left = [run for run in runs if not record.is_done(run) and record.find_divergence(run) is None]
    if not is_dry:
        say(f"sweep: {len(runs) - len(left)} of {len(runs)} runs in {record.store.url} have ended")
    if not left:
        return EXIT_DONE
    if isinstance(arguments, SlurmArguments):
        _submit_array(record, left, arguments, at_once, is_dry=is_dry)
    elif isinstance(arguments, JobSetArguments):
        jobs = [replace(arguments, overrides=record.list_overrides(run), dry_run=is_dry) for run in left]
        kubernetes.submit(jobs)
        if not is_dry:
            names = {run.name: f"{record.sweep.name}-{run.name}" for run in left}
            record.write(replace(record.sweep, submitted={**record.sweep.submitted, **names}))
    return EXIT_DONE


def _submit_array(
    record: SweepRecord, left: Sequence[SweepRun], arguments: SlurmArguments, at_once: int | None, *, is_dry: bool
) -> None:
    comment = record.plain_name
    queued = {} if is_dry else _find_queued(comment)
    for run in left if not is_dry else ():
        if run.name in queued:
            say(f"sweep: {run.name}: is in the queue as {queued[run.name]}: {format_setting_line(run.values)}")
    new = [run for run in left if run.name not in queued]
    if not new:
        return
    document = load_document(arguments.spec, record.list_overrides(new[0]))
    spec = validate_spec(document).model_copy(update={"name": record.sweep.name})
    allocation = slurm.allocate(document, spec, arguments.nodes, arguments.gpus_per_node)
    if arguments.output == SlurmArguments.output:
        arguments = replace(arguments, output="%x-%A_%a.log")
    array = JobArray({int(run.name): record.list_overrides(run) for run in new}, at_once, comment)
    script = slurm.render(spec, allocation, arguments, array)
    if is_dry:
        write_text(script, is_program=True)
        return
    number = slurm.submit(script)
    ids = {run.name: f"{number}_{int(run.name)}" for run in new}
    record.write(replace(record.sweep, submitted={**record.sweep.submitted, **ids}))
    say(f"sweep: {len(new)} runs submitted as array job {number}")


def _find_queued(comment: str) -> dict[str, str]:
    """Return the ids of the tasks in the queue by run. Raises `InvalidError`, or `RetryableError`.

    The queue is asked for the comment, since a command that was killed may have submitted a job and recorded none.
    """
    command = ["squeue", "--me", "--noheader", "--array", "--format=%i %k"]
    try:
        found = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise InvalidError(f"cannot run squeue: {error.strerror}; submit on a login node of the cluster") from None
    if found.returncode != 0:
        raise RetryableError(f"squeue ended with {found.returncode}: {found.stderr.strip()[-200:]}")
    lines = [line.split() for line in found.stdout.splitlines()]
    tasks = [line[0] for line in lines if line[1:] == [comment]]
    return {f"{int(task.rpartition('_')[2]):03d}": task for task in tasks if task.rpartition("_")[2].isdecimal()}
