"""Bundle: a small archive with which somebody else can run the job of a run again, and check its results.

It holds the resolved spec, the rows, the fingerprint of each save that belongs to the trajectory, digests of the data,
versions, hardware, and what differs in tracked files from the commit of the job's code; no weights, and no data.
What is in an archive is data: no code of it is executed, and its spec may name only classes that the user trusts.
"""

import contextlib
import inspect
import io
import json
import lzma
import math
import re
import shlex
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import runner
from runner.attempts.environment import collect_versions, run_git
from runner.attempts.layout import read_owner
from runner.checkpoint.inspect import SPEC
from runner.checkpoint.manifest import read_newest_manifest
from runner.console import say
from runner.distributed.agreement import Hosts
from runner.distributed.clock import Clock
from runner.distributed.preemption import StopNotice
from runner.errors import InvalidError, PreemptedError
from runner.job import make_job, prepare_process
from runner.metrics.file import METRICS_FILE, read_rows
from runner.metrics.rows import Row
from runner.retrace.replay import LOSS, ROUNDING, Difference, compare_hardware, compare_losses, compare_rows
from runner.retrace.scratch import QUIET, make_document
from runner.spec import Trust, validate_spec
from runner.storage import (
    JsonlTail,
    JsonObject,
    Key,
    Store,
    parse_json,
    parse_lines,
    parse_number,
    read_log,
    validate_record,
)
from runner.trainer import BaseTrainer

FORMAT = 1
RECORD, _DIFF = "bundle.json", "code.diff"
RECORD_KEYS = (
    Key("format", int, "Version of this layout."),
    Key("name", str, "Name of the run."),
    Key("id", str, "Its id."),
    Key("job", str, "Class of the job."),
    Key("commits", dict, "Fingerprint of each save of the trajectory, by step."),
    Key("identity", dict, "Trajectory of the newest checkpoint, with the digest of the data."),
    Key("environment", dict, "Versions, CPUs, commit and hosts of the newest checkpoint."),
    Key("hardware", dict, "Mesh, devices and processes of the newest checkpoint."),
)
_ZIP_ERRORS = zipfile.BadZipFile, zlib.error, lzma.LZMAError
_MEMBER_BYTES_MAX = 1 << 30
_BUCKET_POLL_SECONDS = 5.0
_MAX_NAMED = 8
_OWN_NAME = "runner"  # distribution of this project
_DIGITS_MAX = 16  # of a step
_COMMIT = re.compile(r"[0-9a-f]{40}")
_VERSION = re.compile(r"[\w.+!-]{1,64}", re.ASCII)

Verdict = Literal["identical", "within rounding", "different", "nothing to compare"]


def list_commits(events: Iterable[JsonObject], earlier: Mapping[int, str] | None = None) -> dict[int, str]:
    """Return the fingerprint of each durable save by step, without those that the run has discarded since.

    `earlier` is what was returned for the events before these.
    """
    commits = dict(earlier or {})
    for event in events:
        step, fingerprint = event.get("step"), event.get("fingerprint")
        if not isinstance(step, int):
            continue
        if event.get("event") in ("restore", "load", "init", "fork"):
            commits = {each: found for each, found in commits.items() if each <= step}
        elif event.get("event") == "commit" and isinstance(fingerprint, str):
            commits[step] = fingerprint
    return commits


class CommitReader:
    """Reader of the saves of a run, which reads each event of its ledger once, however often `read` is called."""

    def __init__(self, store: Store):
        self._tail, self._commits = JsonlTail(store, "events"), dict[int, str]()

    def read(self) -> Mapping[int, str]:
        """Return what `list_commits` does of all events so far. Raises `OSError` if the store does not answer."""
        try:
            is_restart, events = self._tail.read()
            self._commits = list_commits(events, {} if is_restart else self._commits)
        except OSError:
            self._tail.restart()  # which would otherwise leave out the events that it has returned
            raise
        return self._commits


def make_bundle(job: BaseTrainer) -> bytes:
    """Return the archive of the run of a job (`scratch.open_job`). Raises `InvalidError` if it has no checkpoint."""
    store = job.store
    owner, newest = read_owner(store), read_newest_manifest(store)
    if owner is None or newest is None:
        raise InvalidError(f"{store.url}: no checkpoint is committed yet, so there is nothing to check")
    environment = newest.environment or {}
    record = {
        "format": FORMAT,
        "name": owner.name,
        "id": owner.id,
        "job": job.spec.job,
        "commits": {str(step): found for step, found in list_commits(read_log(store, "events")).items()},
        "identity": newest.identity,
        "environment": environment,
        "hardware": newest.topology or {},
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(RECORD, json.dumps(record, indent=1))
        file.writestr(SPEC, store.read(SPEC))
        file.writestr(METRICS_FILE, "".join(f"{json.dumps(row)}\n" for row in read_rows(store)))
        file.writestr(_DIFF, read_diff(type(job), environment.get("commit")))
    return buffer.getvalue()


def find_missing_code(job: BaseTrainer) -> Path | None:
    """Return the file of a job's class if neither a commit nor this project has it, so that a reader may lack it."""
    with contextlib.suppress(OSError, TypeError):
        path = Path(inspect.getfile(type(job))).resolve()
        is_own = path.is_relative_to(Path(runner.__file__).resolve().parents[1])
        if not is_own and run_git(path.parent, "ls-files", "--error-unmatch", path.name) is None:
            return path
    return None


def read_diff(job_class: type, commit: object) -> str:
    """Return what differs in tracked files of the checkout with a class from a commit; empty if there is none."""
    try:
        folder = Path(inspect.getfile(job_class)).resolve().parent
    except (OSError, TypeError):
        return ""
    known = commit if isinstance(commit, str) and _COMMIT.fullmatch(commit) else "HEAD"
    return run_git(folder, "diff", "--binary", known) or ""


@dataclass(frozen=True)
class Bundle:
    """Content of an archive."""

    record: JsonObject  # with the keys of `RECORD_KEYS`
    spec: str
    rows: Sequence[Row]

    @property
    def commits(self) -> dict[int, str]:
        """Fingerprint of each save by step."""
        numbers = {parse_number(step[:_DIGITS_MAX]): found for step, found in self.record["commits"].items()}
        return {step: found for step, found in numbers.items() if step is not None and isinstance(found, str)}


def read_bundle(path: str) -> Bundle:
    """Return the content of an archive. Raises `InvalidError` if it is damaged, or no bundle."""

    def read(file: zipfile.ZipFile, name: str) -> bytes:
        if file.getinfo(name).file_size > _MEMBER_BYTES_MAX:
            raise ValueError(f"{name} is too large")
        return file.read(name)

    try:
        with zipfile.ZipFile(path) as file:
            record = parse_json(read(file, RECORD))
            if record.get("format") != FORMAT:
                raise ValueError(f"its format is {record.get('format')}, this runner reads {FORMAT}")
            validate_record(record, RECORD_KEYS, [key.name for key in RECORD_KEYS])
            rows = [row for row in parse_lines(read(file, METRICS_FILE)) if type(row.get("step")) is int]
            return Bundle(record, read(file, SPEC).decode(), rows)
    except FileNotFoundError as error:
        raise InvalidError(f"{path}: no such file") from error
    except (ValueError, KeyError, OSError, RuntimeError, EOFError, *_ZIP_ERRORS) as error:
        raise InvalidError(f"{path}: is no bundle of a run: {error}") from error


@dataclass(frozen=True)
class Reproduction:
    """Outcome of running a bundle again."""

    url: str  # directory of the new run
    last_same_step: int | None  # newest compared save up to which all fingerprints are equal; None if the first differs
    first_other_step: int | None  # first save with another fingerprint
    num_compared: int  # saves that were compared
    difference: Difference | None  # first value of a row that differs; None if all are equal
    loss_deviation: float  # largest relative difference of a loss in the rows
    changes: Sequence[str]  # other versions and hardware than those of the run

    @property
    def verdict(self) -> Verdict:
        """Outcome in words."""
        if not self.num_compared:
            return "nothing to compare"
        if self.first_other_step is None and self.difference is None:
            return "identical"
        return "within rounding" if self.changes and self.loss_deviation <= ROUNDING else "different"

    def to_json(self) -> JsonObject:
        """Return the outcome as plain data."""
        return {"verdict": self.verdict, **asdict(self), "difference": self.difference and self.difference._asdict()}

    def format(self) -> Iterator[str]:
        """Yield the lines for people."""
        for change in self.changes:
            yield f"other than in the run: {change}"
        count = f"{self.num_compared} fingerprint{'s' * (self.num_compared != 1)}"
        if self.verdict == "identical":
            yield f"IDENTICAL to step {self.last_same_step}: {count} and all rows are the same"
        elif self.first_other_step is not None:
            same = "none before it" if self.last_same_step is None else f"identical to step {self.last_same_step}"
            yield f"{self.verdict.upper()}: the fingerprint of step {self.first_other_step} is another one, {same}"
            yield f"largest relative difference of a loss: {self.loss_deviation:.2g}"
        elif self.difference is not None and self.num_compared:
            yield f"{self.verdict.upper()}: {count} are the same, but the rows of the bundle are others"
        else:
            yield "NOTHING TO COMPARE: no save of the bundle was made again"
        if self.difference is not None:
            step, key, recorded, found = self.difference
            yield f"first difference of a row: step {step}, {key}: the bundle has {recorded!r}, this run {found!r}"


class _ComparingStop(StopNotice):
    """Stop notice that also arrives when a save of a job differs from that of a bundle."""

    def __init__(self, store: Store, commits: Mapping[int, str]):
        super().__init__()
        self._reader, self._commits = CommitReader(store), commits
        self._poll_seconds = 0.0 if store.root is not None else _BUCKET_POLL_SECONDS
        self._polled_at = -math.inf

    def poll(self) -> bool:
        now = time.monotonic()
        if now - self._polled_at >= self._poll_seconds:
            self._polled_at = now
            with contextlib.suppress(OSError):  # All saves are compared at the end.
                other = find_first_other(self._commits, self._reader.read())
                if other is not None:
                    self.stop_at_next_poll(f"the fingerprint of step {other} is another one than in the bundle")
        return super().poll()


def find_first_other(recorded: Mapping[int, str], found: Mapping[int, str]) -> int | None:
    """Return the first step in both whose fingerprints differ."""
    return min((step for step in recorded.keys() & found.keys() if recorded[step] != found[step]), default=None)


def reproduce(
    path: str, directory: str, overrides: Sequence[str], is_any_device: bool, trust: Sequence[str]
) -> Reproduction:
    """Run the job of a bundle in a directory, or go on there, and compare its saves with those of the bundle.

    Ends at the first save that differs. Raises `InvalidError` if the data are others, and what a job raises.
    """
    bundle = read_bundle(path)
    values = QUIET | {"directory": directory}
    document = make_document(bundle.spec, f"{path}/{SPEC}", values, overrides, is_any_device, Trust(tuple(trust)))
    job = make_job(document, validate_spec(document))
    if not isinstance(job, BaseTrainer):
        raise InvalidError(f"{path}: its job {job.spec.job} is no trainer")
    changes = list_changes(bundle.record["environment"])
    for change in changes:
        say(f"other than in the run: {change}")
    owner = read_owner(job.store)
    if owner is not None and owner.id == bundle.record["id"]:
        raise InvalidError(f"-o {directory}: holds the run of the bundle itself; use another directory")
    prepare_process(job)
    if not job.texts:  # whose corpora are made first, and are part of the trajectory
        validate_data(bundle, job, path)
    stop = _ComparingStop(job.store, bundle.commits)
    try:
        job.lifecycle.run(Hosts.single_process(), stop, Clock(), ends_process=False)
    except PreemptedError:
        if find_first_other(bundle.commits, list_commits(read_log(job.store, "events"))) is None:
            raise
    return compare(bundle, job.store, changes + compare_hardware(job, bundle.record["hardware"]))


def _read_versions(environment: JsonObject) -> dict[str, str]:
    """Return the versions of a run by the name of each distribution that is installed here too, and of Python.

    Only names that are known here and what may be a version are taken, since a bundle may be anybody's.
    """
    given = environment.get("versions")
    before = given if isinstance(given, dict) else {}
    return {
        name: str(before[name])
        for name in collect_versions()
        if name in before and _VERSION.fullmatch(str(before[name]))
    }


def list_changes(environment: JsonObject) -> list[str]:
    """Return the versions that differ from those of a run, each with the command that installs the former one."""
    now = collect_versions()
    return [
        f"{name} {now[name]}, not {version} (pip install {name}=={version})"
        if name != "python"
        else f"Python {now[name]}, not {version}"
        for name, version in _read_versions(environment).items()
        if now[name] != version
    ]


def install_environment(path: str) -> Path | None:
    """Install the versions of a bundle in a virtual environment beside it, and return its interpreter.

    The runner itself is that of this process, or of the checkout that holds it. None if all versions are those of this
    process, except for Python's, which pip cannot install. Raises `InvalidError` if they cannot be installed.
    """
    versions, now = _read_versions(read_bundle(path).record["environment"]), collect_versions()
    # Without those that are equal here, pip would take their newest versions.
    wanted = {name: version for name, version in versions.items() if name not in ("python", _OWN_NAME)}
    if all(now[name] == version for name, version in wanted.items()):
        return None
    requirements = [f"{name}=={version}" for name, version in wanted.items()]
    checkout = Path(runner.__file__).parents[1]
    own = str(checkout) if (checkout / "pyproject.toml").exists() else f"{_OWN_NAME}=={runner.__version__}"
    place = Path(path).absolute().with_suffix(".venv")
    python, record = place / "bin/python", place / "installed.txt"
    text = "\n".join([own, *requirements])
    if not record.exists() or record.read_text() != text:
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(place)],
            [str(python), "-m", "pip", "install", "--quiet", own, *requirements],
        ):
            say(shlex.join(command))
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
            if done.returncode:
                output = "\n".join(done.stdout.splitlines()[-_MAX_NAMED:])
                raise InvalidError(f"{place}: the versions of the bundle cannot be installed:\n{output}")
        record.write_text(text)
    return python


def validate_data(bundle: Bundle, job: BaseTrainer, path: str) -> None:
    """Raise `InvalidError` if the data, or another part of the trajectory, are not those of the bundle."""
    changes = job.make_run_identity(job.identity()).compare_values(bundle.record["identity"])
    if not changes:
        return
    named = [*changes][:_MAX_NAMED]
    lines = [f"{key}: the run had {changes[key][0]!r}, here it is {changes[key][1]!r}" for key in named]
    if any(key.startswith("config.data") for key in named):
        lines.append(f"the data are not those of the run: {job.dataset.source}")
    raise InvalidError("\n".join([f"{path}: cannot be reproduced here", *lines]))


def compare(bundle: Bundle, store: Store, changes: Sequence[str]) -> Reproduction:
    """Compare a run with the bundle that it was made from."""
    commits, found = bundle.commits, list_commits(read_log(store, "events"))
    common = sorted(commits.keys() & found.keys())
    other = find_first_other(commits, found)
    same = [step for step in common if other is None or step < other]
    recorded = {row["step"]: row for row in bundle.rows}
    pairs = [(recorded[row["step"]], row) for row in read_rows(store) if row["step"] in recorded]
    worst = max((compare_losses(old.get(LOSS), new.get(LOSS)) for old, new in pairs), default=0.0)
    difference = next((found for pair in pairs for found in compare_rows(*pair)), None)
    return Reproduction(store.url, max(same, default=None), other, len(common), difference, worst, changes)
