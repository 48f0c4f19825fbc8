"""Engine `jobset`: renders the manifest of a JobSet and passes it to kubectl.

JobSet carries out everything that follows the end of a pod, as the manifest tells it.
"""

import json
import subprocess
import time
from pathlib import Path

from launch.kubernetes.jobset import CONTAINER, JobSetArguments, dump, render, validate_size
from launch.options import SUBMIT_TIME_VARIABLE
from runner.console import say
from runner.errors import EXIT_DONE, FailedError, InvalidError
from runner.spec import load_document, validate_spec


def run(arguments: JobSetArguments) -> int:
    """Submit the job, or print what would be submitted."""
    spec = validate_spec(load_document(arguments.spec, arguments.overrides))
    text = Path(arguments.spec).read_text(encoding="utf-8-sig")
    manifest = render(spec, text, arguments, None)
    if not arguments.dry_run:
        metadata = manifest["metadata"]
        manifest = render(spec, text, arguments, _find_submit_time(metadata["name"], metadata.get("namespace")))
    validate_size(manifest, len(text.encode()))
    if arguments.dry_run:
        say(dump(manifest).rstrip("\n"))
    else:
        _kubectl("apply", "-f", "-", text=dump(manifest))
    return EXIT_DONE


def _find_submit_time(name: str, namespace: str | None) -> str | None:
    """Return when the JobSet was submitted, in Unix seconds.

    That is now for a new JobSet. The environment of pods cannot be changed, so an existing JobSet keeps its time, or
    None if its pods were given none.
    """
    where = [] if namespace is None else [f"--namespace={namespace}"]
    get = ["get", "jobset", name, *where, "--ignore-not-found", "--output=json"]
    output = _kubectl(*get, stdout=subprocess.PIPE)
    if not output.strip():
        return str(int(time.time()))
    try:
        for replicated in json.loads(output)["spec"]["replicatedJobs"]:
            for container in replicated["template"]["spec"]["template"]["spec"]["containers"]:
                for variable in container.get("env", []) if container["name"] == CONTAINER else []:
                    if variable["name"] == SUBMIT_TIME_VARIABLE:
                        return variable.get("value")
        return None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise FailedError(f"kubectl get: the JobSet {name} was not made by this command: {output!r:.100}") from None


def _kubectl(*arguments: str, text: str = "", stdout: int | None = None) -> str:
    """Run kubectl and return its output if `stdout` is a pipe.

    Raises:
        InvalidError: kubectl cannot be run.
        FailedError: kubectl has failed; it has printed why.
    """
    try:
        result = subprocess.run(["kubectl", *arguments], input=text, stdout=stdout, text=True)
    except OSError as error:
        raise InvalidError(f"cannot run kubectl: {error.strerror}; --dry-run prints the manifest instead") from None
    if result.returncode != 0:
        raise FailedError(f"kubectl {arguments[0]} ended with {result.returncode}")
    return result.stdout or ""
