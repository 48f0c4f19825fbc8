"""The job as a batch job of SLURM: one task a node, started again by the script itself after 75 and 76.

Renders a script for sbatch and submits it. What SLURM does by itself is left to it: it requeues a job whose node has
failed, and one that it preempts. It knows no exit codes, so the script is what starts the job again after them.
"""

import argparse
import shutil
import subprocess
import sys

from launch.options import add_grace_seconds, natural, positive
from launch.slurm.allocation import allocate
from launch.slurm.batch_script import render
from runner.errors import EXIT_DONE, InvalidError, RetryableError
from runner.spec import load_document, validate_spec
from runner.terminal import say, warn

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
