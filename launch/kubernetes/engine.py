"""The job as a JobSet on Kubernetes: one child Job a slice, one pod a host.

Renders a manifest and hands it to kubectl. What follows the end of a pod stands in the manifest, for JobSet to do.
"""

import argparse
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.kubernetes.jobset import CONTAINER, check_size, dump, render
from launch.options import SUBMITTED, add_grace_seconds, natural, positive
from runner.console import say
from runner.errors import EXIT_DONE, FailedError, InvalidError
from runner.spec import load_document, validate_spec

HELP = "run the job as a JobSet on Kubernetes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this engine."""
    add = parser.add_argument
    add("--image", required=True, help="container image with python, the runner and the job's own code")
    add("--dry-run", action="store_true", help="print the manifest and submit nothing")
    add("--name", help="of the JobSet; default: the spec's name")
    add("--namespace", help="default: that of kubectl's context")
    add("--nodes", type=positive, metavar="N", help="pods on CPUs, where the spec names no chips")
    add("--cpu", metavar="QUANTITY", help="CPUs that each pod asks for, such as 4")
    add("--memory", metavar="QUANTITY", help="memory that each pod asks for, such as 16Gi")
    add("--spot", action="store_true", help="on GKE's spot nodes")
    add("--node-selector", action="append", default=[], type=_pair, metavar="LABEL=VALUE", help="nodes must have it")
    add("--max-restarts", type=natural, default=100, metavar="N", help="of those that count; default 100")
    add_grace_seconds(parser, "from SIGTERM to SIGKILL")
    add("--workdir", metavar="PATH", help="in the container; default: the image's")
    add("--env", action="append", default=[], type=_pair, metavar="NAME=VALUE", help="a variable, for all to read")
    add("--env-from-secret", action="append", default=[], metavar="SECRET", help="all keys of a secret, as variables")
    add("--volume-claim", action="append", default=[], type=_pair, metavar="CLAIM=PATH", help="mount a claim's volume")
    add("--service-account", metavar="NAME", help="that the pods act as")
    add("--priority-class", metavar="NAME", help="of the pods")


def run(parsed: argparse.Namespace) -> int:
    """Submit the job, or print what would be submitted."""
    spec = validate_spec(load_document(parsed.spec, parsed.set))
    text = Path(parsed.spec).read_text(encoding="utf-8-sig")
    rendered = render(spec, text, parsed, None)
    if not parsed.dry_run:
        rendered = render(spec, text, parsed, _submitted(rendered["metadata"]))
    check_size(rendered, len(text.encode()))
    manifest = dump(rendered)
    if parsed.dry_run:
        say(manifest.rstrip("\n"))
    else:
        _kubectl("apply", "-f", "-", text=manifest)
    return EXIT_DONE


def _submitted(metadata: dict[str, str]) -> str | None:
    """When the JobSet was submitted, in Unix seconds: now, or what the pods of the one that is there were told.

    None if they were told nothing, since their environment cannot be changed any more.
    """
    namespace = [f"--namespace={metadata['namespace']}"] if "namespace" in metadata else []
    get = ["get", "jobset", metadata["name"], *namespace, "--ignore-not-found", "--output=json"]
    output = _kubectl(*get, stdout=subprocess.PIPE)
    if not output.strip():
        return str(int(time.time()))
    try:
        return next((variable.get("value") for variable in _variables(json.loads(output))), None)
    except (ValueError, LookupError, TypeError, AttributeError):
        raise FailedError(f"kubectl get: no JobSet that this command has made: {output!r:.100}") from None


def _variables(manifest: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Those of that name in the container of the job."""
    for replicated in manifest["spec"]["replicatedJobs"]:
        for container in replicated["template"]["spec"]["template"]["spec"]["containers"]:
            variables = container.get("env", []) if container["name"] == CONTAINER else []
            yield from (variable for variable in variables if variable["name"] == SUBMITTED)


def _kubectl(*arguments: str, text: str = "", stdout: int | None = None) -> str:
    """Its output if that is a pipe. Raises `InvalidError` if it cannot be run, `FailedError` if it fails."""
    try:
        result = subprocess.run(["kubectl", *arguments], input=text, stdout=stdout, text=True)
    except OSError as error:
        raise InvalidError(f"cannot run kubectl: {error.strerror}; --dry-run prints what it would be given") from None
    if result.returncode != 0:
        raise FailedError(f"kubectl {arguments[0]} ended with {result.returncode}")
    return result.stdout or ""


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text} needs the form NAME=VALUE")
    return name, value
