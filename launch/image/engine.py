"""Engine `image`: build the container image of a job.

The image holds Python, the runner with the extras that the spec needs, the packages of the committed requirements file,
and the checked-out commit as the working directory (`launch.code`). The spec is only read for its extras, and is
submitted with the job; see `launch.kubernetes`.
"""

import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated, ClassVar

import typer

from launch.code import Code, RequirementsOption, RunnerOption, read_code
from launch.kubernetes.engine import IMAGE
from launch.options import DryRun, SpecOptions, fill_program, read_program
from runner.accelerator import parse_accelerator
from runner.console import say, write_text
from runner.errors import EXIT_DONE, FailedError, InvalidError, suggest_choices
from runner.spec import ExecutionSpec, parse_document, validate_spec
from runner.spec.imports import EXTRA_PACKAGES
from runner.storage import find_extra

_DEFAULT_BASE = "python:3.12-slim-bookworm"
BUILDERS = ("docker", "podman", "buildah")
_JOB = PurePosixPath("/job")  # the code in the image
_PACKAGES = "/opt/packages"  # wheel or archive of the runner in the image


@dataclass(frozen=True, kw_only=True)
class ImageArguments(SpecOptions):
    """Arguments of `launch image`."""

    free_texts: ClassVar[tuple[str, ...]] = (*SpecOptions.free_texts, "base")

    tag: Annotated[str, typer.Option(metavar="IMAGE", help="Name of the image, such as registry/job:1.")]
    base: Annotated[
        str, typer.Option(metavar="IMAGE", help="Image to begin with: Debian or Ubuntu with Python 3.11 or newer.")
    ] = _DEFAULT_BASE
    runner: RunnerOption = None
    requirements: RequirementsOption = None
    extra: Annotated[
        list[str], typer.Option(metavar="NAME", help="Further extra of the runner, such as parquet; repeatable.")
    ] = field(default_factory=list)
    builder: Annotated[
        str | None,
        typer.Option(
            metavar="PROGRAM", show_default="the first of docker, podman, buildah", help="Program that builds."
        ),
    ] = None
    push: Annotated[bool, typer.Option("--push", help="Push the image to its registry.")] = False
    dry_run: DryRun = False


def run(arguments: ImageArguments) -> int:
    """Build the image, or print its Dockerfile and the commands."""
    IMAGE.validate("--tag", arguments.tag)
    IMAGE.validate("--base", arguments.base)
    code = read_code(arguments.spec, arguments.runner, arguments.requirements)
    spec = validate_spec(parse_document(code.spec_text, arguments.spec, arguments.overrides))
    dockerfile = render(code, list_extras(spec, arguments.extra), arguments.base)
    wanted = [arguments.builder] if arguments.builder else [*BUILDERS]
    builder = next(filter(shutil.which, wanted), None)
    if builder is None and not arguments.dry_run:
        names = ", ".join(wanted)
        raise InvalidError(f"{names}: not on the PATH; install one, or print the Dockerfile with --dry-run")
    builder = builder or wanted[0]
    code.announce()
    commands = [[builder, "build", "--tag", arguments.tag, "CONTEXT"]]
    if arguments.push:
        commands.append([builder, "push", arguments.tag])
    if arguments.dry_run:
        write_text(dockerfile + "\n" + "".join(f"# {shlex.join(command)}\n" for command in commands), is_program=True)
        return EXIT_DONE
    with tempfile.TemporaryDirectory(prefix="launch-image-") as context:
        files = {"Dockerfile": dockerfile.encode(), "code.tar.gz": code.archive} | code.packaged_runner.files
        for name, content in files.items():
            Path(context, name).write_bytes(content)
        for command in commands:
            words = [context if word == "CONTEXT" else word for word in command]
            try:
                result = subprocess.run(words)
            except OSError as error:
                raise InvalidError(f"cannot run {builder}: {error.strerror}") from None
            if result.returncode != 0:
                raise FailedError(f"{shlex.join(words[:2])} ended with {result.returncode}")
    say(f"built {arguments.tag}" + " and pushed it" * arguments.push)
    return EXIT_DONE


def list_extras(spec: ExecutionSpec, further: Sequence[str]) -> list[str]:
    """Return the extras of the runner that a job needs on its machines: for its accelerator and its bucket."""
    accelerator = parse_accelerator(spec.topology.accelerator if spec.topology is not None else "any")
    extras = []
    if accelerator is not None and accelerator.name != "cpu":
        extras.append("tpu" if accelerator.chip.is_tpu else "cuda")
    extras += filter(None, [find_extra(spec.directory)])
    for name in further:
        if name not in EXTRA_PACKAGES:
            raise InvalidError(f"--extra {name}: no such extra{suggest_choices(name, [*EXTRA_PACKAGES])}")
    return list(dict.fromkeys([*extras, *further]))


def render(code: Code, extras: Sequence[str], base: str) -> str:
    """Return the Dockerfile."""
    words = code.packaged_runner.list_words(extras, ".", _PACKAGES)
    needs_git = any("git+" in text for text in (*words, code.requirements_text))
    file = code.packaged_runner.file
    return fill_program(
        read_program(__package__, "Dockerfile"),
        base=[base],
        tools=["git"] if needs_git else None,
        package=None if file is None else [file],
        runner=words,
        directory=[str(_JOB / code.directory)],
        requirements=None if code.requirements is None else [code.requirements],
    )
