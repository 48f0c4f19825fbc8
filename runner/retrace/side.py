"""Two runs compared with different code: each run is repeated in a process of its own.

A process imports one version of a module only. So `CodeComputer` starts a command for each part of a comparison, with
the modules of a directory before others, and gets rows, digests and arrays in files of a scratch directory. One
process at a time holds the devices. The files are data: nothing in them is executed.
"""

import contextlib
import json
import os
import subprocess
import sys
import tarfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from runner.console import say, silence
from runner.errors import EXIT_DONE, EXIT_FAILED, EXIT_INVALID, FailedError, InvalidError, RetryableError, RunnerError
from runner.process import make_code_environment, start_process
from runner.retrace.against import Arrays, Place, RunReplay, StepComputer
from runner.retrace.scratch import RetraceRequest
from runner.storage import JsonObject

_REQUEST, _RESULT, _ARRAYS = "request.json", "result.json", "arrays.bin"
_STDERR = 2  # standard output is that of the result
_STOP_SECONDS = 4.0  # for a process to end when the command is interrupted
_GIT_SECONDS = 600.0


class CodeComputer(StepComputer):
    """Steps of runs computed by other processes, each with the modules of the `code` of its request."""

    def __init__(self, directory: Path, code_name: str, is_quiet: bool):
        """Use a scratch directory, which holds the arrays that `collect` returns; they are read when they are used.

        `code_name` stands for the code of the second run in messages.
        """
        self._directory, self._code_name, self._is_quiet, self._number = directory, code_name, is_quiet, 0

    def replay(self, request: RetraceRequest, other: RunReplay | None = None) -> RunReplay:
        """Repeat a run in a process of its own."""
        found, _ = self._compute(request, {"other": None if other is None else other.to_json()})
        return RunReplay.from_json(found["replay"])

    def collect(self, request: RetraceRequest, num_examples: int) -> Arrays:
        """Return the arrays of the step of a request, which a process of its own writes to a file."""
        found, path = self._compute(request, {"num_examples": num_examples})
        return read_arrays(path, found["arrays"])

    def _compute(self, request: RetraceRequest, values: JsonObject) -> tuple[JsonObject, Path]:
        """Run `compute_side` in a process, and return its result and the file of its arrays."""
        self._number += 1
        directory = self._directory / str(self._number)
        directory.mkdir(parents=True)
        record = {"request": asdict(request), "is_quiet": self._is_quiet, **values}
        (directory / _REQUEST).write_text(json.dumps(record))
        command = [sys.executable, "-m", "runner", "replay", request.directory, "--step", str(request.step)]
        variables = dict(os.environ) if request.code is None else make_code_environment(request.code)
        where = request.directory if request.code is None else f"{request.directory} with the code of {self._code_name}"
        say(f"{where}: repeats its steps up to {request.step}")
        process = start_process([*command, "--side", str(directory)], variables, _STDERR)
        try:
            code = process.wait()
        except BaseException:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
        result = directory / _RESULT
        found = json.loads(result.read_text()) if result.exists() else {}
        if code == EXIT_DONE and "error" not in found and found:
            if not found["has_imported"]:
                raise InvalidError(
                    f"{where}: the job imports no module of this code; name the directory of its modules"
                )
            return found, directory / _ARRAYS
        kind = {EXIT_FAILED: FailedError, EXIT_INVALID: InvalidError}.get(code, RetryableError)
        raise kind(found.get("error", f"{where}: cannot be repeated: its process ended with {code}"))


def compute_side(directory: Path) -> int:
    """Carry out the request of a `CodeComputer` in this process, and return the exit code."""
    record = json.loads((directory / _REQUEST).read_text())
    request, computer, code = RetraceRequest(**record["request"]), StepComputer(), EXIT_DONE
    found: JsonObject = {}
    try:
        with silence() if record["is_quiet"] else contextlib.nullcontext():
            if "num_examples" in record:
                arrays = computer.collect(request, record["num_examples"])
                found["arrays"] = write_arrays(directory / _ARRAYS, arrays)
            else:
                other = None if record["other"] is None else RunReplay.from_json(record["other"])
                found["replay"] = computer.replay(request, other).to_json()
        # Whether this process has imported a module of the given code.
        files = [getattr(module, "__file__", None) for module in [*sys.modules.values()]]
        found["has_imported"] = request.code is None or any(
            Path(file).resolve().is_relative_to(Path(request.code).resolve()) for file in files if file
        )
    except RunnerError as error:
        found, code = {"error": str(error)}, error.exit_code
    (directory / _RESULT).write_text(json.dumps(found))
    return code


def write_arrays(path: Path, arrays: Arrays) -> list[JsonObject]:
    """Write arrays one after another, and return the place, type and shape of each, in order."""
    records: list[JsonObject] = []
    with path.open("wb") as file:
        for kind, group in arrays.items():
            records.append({"kind": kind})  # of the arrays that follow, of which there may be none
            for (name, layer), values in group.items():
                records.append({"name": name, "layer": layer, "dtype": str(values.dtype), "shape": [*values.shape]})
                file.write(np.ascontiguousarray(values).tobytes())
    return records


def read_arrays(path: Path, records: list[JsonObject]) -> Arrays:
    """Return arrays of a file, given what `write_arrays` returned. Their values are read from it when they are used."""
    content: Any = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)
    found: dict[str, dict[Place, np.ndarray]] = {}
    group: dict[Place, np.ndarray] = {}
    position = 0
    for record in records:
        if "kind" in record:
            group = found.setdefault(record["kind"], {})
            continue
        dtype = jnp.dtype(record["dtype"])
        stop = position + dtype.itemsize * int(np.prod(record["shape"], dtype=np.int64))
        group[record["name"], record["layer"]] = content[position:stop].view(dtype).reshape(record["shape"])
        position = stop
    return found


def extract_commit(revision: str, directory: Path) -> str:
    """Write the files of a git revision to a new directory, and return the hash of the commit.

    The repository is that of the working directory, and the files are those below it. Nothing is written to the
    repository. Raises `InvalidError`.
    """
    commit = _run_git(revision, "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}").strip()
    directory.mkdir(parents=True)
    archive = directory.with_suffix(".tar")
    _run_git(revision, "archive", "--format=tar", f"--output={archive}", commit)
    with tarfile.open(archive) as file:
        file.extractall(directory, filter="tar")
    archive.unlink()
    return commit


def _run_git(revision: str, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=_GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InvalidError(f"--against-commit {revision}: git cannot be run: {error}") from error
    if done.returncode:
        problem = done.stderr.strip().splitlines()[-1:] or ["git failed"]
        raise InvalidError(
            f"--against-commit {revision}: no commit of the repository of the working directory: {problem[0]}"
        )
    return done.stdout
