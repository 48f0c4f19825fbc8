"""The command line of `python -m launch`: its engines, their help and exit codes, and `main`."""

import sys
from collections.abc import Sequence

from launch import local
from launch.image import engine as image
from launch.image.engine import ImageArguments
from launch.kubernetes import engine as kubernetes
from launch.kubernetes.engine import JobSetArguments
from launch.local import LocalArguments
from launch.slurm import engine as slurm
from launch.slurm.engine import SlurmArguments
from launch.sweep import command as sweep
from launch.sweep import ladder
from launch.sweep.command import SweepArguments
from launch.sweep.ladder import LadderArguments
from launch.tpu_vm import engine as tpu_vm
from launch.tpu_vm.engine import TpuVmArguments
from runner.command_line import CommandLine
from runner.console import finish_output, protect_streams, warn
from runner.errors import EXIT_PREEMPTED, RunnerError

_SUBMIT_EXIT_CODES = "0 submitted; 1 the engine's command failed; 2 invalid command line or spec, or no such command"

COMMANDS = CommandLine(
    "launch",
    "runner-launch",
    "Run the job that a spec describes on an engine.",
    "`python -m launch ENGINE --help` describes an engine and the exit codes.",
)
COMMANDS.add(
    "local",
    LocalArguments,
    "Run the job as processes on this machine",
    "those of the job: 0 done, 1 failed, 2 invalid, 75 preempted by a signal, 76 retryable after all restarts.",
    "Restarts the job after 75 and 76. Lines of output begin with the number of their process.",
)
COMMANDS.add(
    "slurm",
    SlurmArguments,
    "Submit the job to SLURM",
    f"{_SUBMIT_EXIT_CODES}; 75 stopped by Ctrl-C; 76 SLURM does not answer.",
    "Renders a batch script that runs one task per node, and requeues the job after 75 and 76.",
)
COMMANDS.add(
    "jobset",
    JobSetArguments,
    "Submit the job to Kubernetes as a JobSet",
    f"{_SUBMIT_EXIT_CODES}; 75 stopped by Ctrl-C.",
    "Renders a manifest with one child Job per slice and one pod per host, and passes it to kubectl.",
)
COMMANDS.add(
    "tpu-vm",
    TpuVmArguments,
    "Run the job on TPU VMs of Google Cloud",
    "those of the job; 75 the command was stopped, and the job goes on; 76 the machines cannot be had or reached.",
    "Requests the machines through a queued resource, ships the committed code, follows the log, and deletes the "
    "machines at the end. Run again, the command re-attaches to the job.",
)
COMMANDS.add(
    "image",
    ImageArguments,
    "Build the container image of the job",
    "0 built; 1 the builder failed; 2 invalid command line or spec, or no such command; 75 stopped by Ctrl-C.",
    "Builds an image of Python, the runner, the packages of requirements.txt and the committed code, with docker, "
    "podman or buildah.",
)
COMMANDS.add(
    "sweep",
    SweepArguments,
    "Run many settings of the job, each as a run of its own",
    "0 all runs have ended; 1 some failed; 2 invalid command line, spec or setting; 75 stopped, state saved: run the "
    "same command again; 76 retryable.",
    "Options of the engine follow after --. Run again, the command goes on; a finished run costs nothing.",
)
COMMANDS.add(
    "ladder",
    LadderArguments,
    "Train a family of models, and forecast the loss of a larger one",
    "0 done; 2 invalid command line or spec, or the directory holds something else; others: those of the job.",
    "Width, heads, tokens, batch and learning rate follow from the depth. A scaling law is fitted to the losses, and "
    "its forecast written into the directory of the larger run before that begins. Run again, the command continues.",
)


def main(words: Sequence[str] | None = None) -> int:
    """Parse and carry out a command line, by default that of the process, and return its exit code."""
    if words is None:  # this process is the program
        protect_streams()
        words = sys.argv[1:]
    try:
        try:
            arguments = COMMANDS.parse(words)
        except SystemExit:  # after --help
            finish_output()
            raise
        match arguments:
            case LocalArguments():
                return local.run(arguments)
            case SlurmArguments():
                return slurm.run(arguments)
            case JobSetArguments():
                return kubernetes.run(arguments)
            case TpuVmArguments():
                return tpu_vm.run(arguments)
            case ImageArguments():
                return image.run(arguments)
            case SweepArguments():
                return sweep.run(arguments, COMMANDS.parse)
            case LadderArguments():
                return ladder.run(arguments, COMMANDS.parse)
        raise AssertionError(f"no engine for {arguments}")
    except KeyboardInterrupt:  # Ctrl-C in slurm, jobset or image; the other engines handle their signals
        warn("stopped before the end; look whether the job was submitted before you run the command again")
        return EXIT_PREEMPTED
    except RunnerError as error:
        warn(str(error))
        return error.exit_code
