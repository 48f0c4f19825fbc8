"""The code of a job on machines that do not share a disk with this one: a commit, the runner, and further packages.

The commit is the checked-out one of the repository around the working directory. If that repository is not the
runner's own, pip installs the runner that this command runs from: its checkout as committed, or the origin that pip has
recorded (a file, a URL, a commit of a repository). `--runner` names another one. The name `runner` on PyPI belongs to
another project, so a version alone is never assumed.
"""

import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import tarfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Annotated
from urllib.parse import urlsplit
from urllib.request import url2pathname

import typer

import runner
from runner.console import warn
from runner.errors import InvalidError

RunnerOption = Annotated[
    str | None,
    typer.Option(
        "--runner",
        metavar="SOURCE",
        show_default="the one that runs this command",
        help="Runner to install: a wheel, a checkout, a URL, git+URL@COMMIT, or runner==VERSION of your own index.",
    ),
]
RequirementsOption = Annotated[
    str | None,
    typer.Option(
        "--requirements",
        metavar="FILE",
        show_default="requirements.txt, if it is committed",
        help="Committed file of further packages, which pip installs.",
    ),
]
_REQUIREMENTS = "requirements.txt"
_PACKAGES = ("runner", "experiments", "launch")
_PROJECT_FILES = ("pyproject.toml", "README.md", "specs")
_INDEX_REQUIREMENT = re.compile(r"runner\s*((?:===?|~=|>=)\s*[\w.*+!-]+)")
_PACKAGE_FILE = re.compile(r"[\w.+-]+(\.whl|\.tar\.gz)")


@dataclass(frozen=True)
class Runner:
    """The runner that hosts install: a requirement of pip, or a file that is copied to them.

    Both are None if the repository of the job is the runner's own.
    """

    requirement: str | None = None  # version or URL, to follow the name and its extras
    file: str | None = None  # name of the wheel or archive
    content: bytes = b""

    @property
    def files(self) -> dict[str, bytes]:
        """The file by its name, if there is one."""
        return {} if self.file is None else {self.file: self.content}

    def list_words(self, extras: Sequence[str], root: str, files: str) -> list[str]:
        """Return the arguments of `pip install`, which runs in a directory of the code.

        Args:
            extras: extras of the runner to install.
            root: path of the code's root, as seen from there.
            files: path of the directory that holds the file, as seen from there.
        """
        suffix = f"[{','.join(extras)}]" if extras else ""
        if self.requirement is not None:
            return [f"runner{suffix}{self.requirement}"]
        if self.file is not None:
            return [f"{files}/{self.file}{suffix}"]
        return ["--editable", f"{root}{suffix}"]


@dataclass(frozen=True)
class Code:
    """A commit, the directory in it where the job runs, and the packages that it needs."""

    hash: str  # full hash of the commit
    subject: str  # first line of its message
    directory: PurePosixPath  # the working directory, from the repository's root on
    spec: str  # path of the spec, from `directory` on
    spec_text: str  # the spec as committed
    archive: bytes  # content of the commit, as a tar.gz
    uncommitted: tuple[str, ...]  # lines of `git status`: changed and new files, which are not in the archive
    runner: Runner
    requirements: str | None  # path of a file of packages, from `directory` on
    requirements_text: str  # its text, empty if there is none

    @property
    def short(self) -> str:
        """The hash as people write it."""
        return self.hash[:12]

    @property
    def root(self) -> str:
        """Path of the repository's root, as seen from `directory`."""
        return "/".join([".", *[".."] * len(self.directory.parts)])

    @property
    def packaged_runner(self) -> Runner:
        """The runner as a package, also if the repository is its own."""
        is_own = self.runner == Runner()
        return Runner(file=f"runner-{self.short}.tar.gz", content=self.archive) if is_own else self.runner

    def list_package_words(self, extras: Sequence[str], files: str) -> list[str]:
        """Return the arguments of `pip install`, which runs in `directory`; see `Runner.list_words`."""
        words = self.runner.list_words(extras, self.root, files)
        return words if self.requirements is None else [*words, "--requirement", self.requirements]

    def announce(self) -> None:
        """Print the commit that is used, and a warning about changes that are left out."""
        warn(f"launch: ships commit {self.short} ({self.subject})")
        if self.runner.file is not None or self.runner.requirement is not None:
            warn(f"launch: the runner is installed from {self.runner.file or self.runner.requirement}")
        if self.uncommitted:
            changed = ", ".join(line[3:] for line in self.uncommitted[:3]) + ", ..." * (len(self.uncommitted) > 3)
            warn(f"launch: WARNING: UNCOMMITTED CHANGES ARE NOT SHIPPED ({len(self.uncommitted)}): {changed}")


def read_code(spec: str, runner: str | None, requirements: str | None) -> Code:
    """Read the checked-out commit of the repository around this directory, which must contain the spec.

    Args:
        spec: path of the spec.
        runner: source of the runner, as the option `--runner` names it.
        requirements: path of the file of packages, as the option `--requirements` names it.

    Raises:
        InvalidError: there is no repository, no commit, no such file in it, or no runner to install.
    """
    try:
        root = Path(_git(Path.cwd(), "rev-parse", "--show-toplevel").decode().strip()).resolve()
        commit = _git(root, "rev-parse", "--verify", "HEAD").decode().strip()
    except (OSError, subprocess.CalledProcessError):
        raise InvalidError(
            f"{Path.cwd()} has no git commit, and a commit is what is shipped to machines; run git init, git add and "
            "git commit here, or change to the directory of your repository"
        ) from None
    here = Path.cwd().resolve()

    def read(path: Path) -> bytes | None:
        """Return a file as committed, None if the commit has no such file."""
        try:
            return _git(root, "cat-file", "blob", f"{commit}:{path.resolve().relative_to(root).as_posix()}")
        except (ValueError, subprocess.CalledProcessError):
            return None

    spec_text = read(Path(spec))
    if spec_text is None:
        raise InvalidError(f"{spec} is not in commit {commit[:12]}; commit it, only commits are shipped")
    candidates = [here / _REQUIREMENTS, root / _REQUIREMENTS] if requirements is None else [here / requirements]
    texts = ((path, read(path)) for path in candidates)
    found, packages = next(((path, text) for path, text in texts if text is not None), (None, b""))
    if found is None and requirements is not None:
        raise InvalidError(f"--requirements {requirements}: is not in commit {commit[:12]}; commit it")
    return Code(
        commit,
        _git(root, "log", "-1", "--format=%s", commit).decode().strip(),
        PurePosixPath(here.relative_to(root).as_posix()),
        Path(os.path.relpath(Path(spec).resolve(), here)).as_posix(),
        spec_text.decode(),
        _git(root, "archive", "--format=tar.gz", commit),
        tuple(_git(root, "status", "--porcelain").decode().splitlines()),
        Runner() if runner is None and _is_runner(read(root / "pyproject.toml")) else find_runner(runner),
        None if found is None else Path(os.path.relpath(found, here)).as_posix(),
        packages.decode(errors="replace"),
    )


def find_runner(source: str | None) -> Runner:
    """Return the runner of an option `--runner`; None is the one that runs this command.

    Raises:
        InvalidError: there is no such runner.
    """
    given = f"--runner {source}"
    if source is None:
        source = _find_own_source()
        given = f"the runner at {source}"
    if re.match(r"(\w+\+)?https?://|git\+(ssh|file)://", source):
        return Runner(f" @ {source}")
    if (match := _INDEX_REQUIREMENT.fullmatch(source)) is not None:
        return Runner(match[1])
    path = Path(source)
    if path.is_file():
        if not _PACKAGE_FILE.fullmatch(path.name):
            raise InvalidError(f"{given}: needs a wheel (.whl) or an archive of the source (.tar.gz)")
        return Runner(file=path.name, content=path.read_bytes())
    if not path.is_dir():
        raise InvalidError(f"{given}: needs a wheel, a checkout, a URL, git+URL@COMMIT or runner==VERSION")
    project = path / "pyproject.toml"
    if not project.is_file() or not _is_runner(project.read_bytes()):
        raise InvalidError(f"{given}: is no checkout of the runner")
    try:
        # A repository around a copy that it does not track says nothing about the copy.
        _git(path, "cat-file", "-e", "HEAD:./pyproject.toml")
        commit = _git(path, "rev-parse", "HEAD").decode().strip()
    except (OSError, subprocess.CalledProcessError):  # a copy without a repository, or without a commit
        content = _pack(path)
        return Runner(file=f"runner-{hashlib.sha256(content).hexdigest()[:12]}.tar.gz", content=content)
    if _git(path, "status", "--porcelain", "--untracked-files=no", "--", *_PACKAGES):
        warn(f"launch: WARNING: uncommitted changes of the runner in {path} are not shipped")
    return Runner(file=f"runner-{commit[:12]}.tar.gz", content=_git(path, "archive", "--format=tar.gz", commit))


def _find_own_source() -> str:
    """Return the checkout of this package, else the origin from which pip has installed it."""
    checkout = Path(runner.__file__).parents[1]
    if (checkout / "pyproject.toml").is_file():
        return str(checkout)
    try:
        origin = json.loads(metadata.distribution("runner").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        origin = {}
    url = origin.get("url", "")
    if "vcs_info" in origin:
        return f"{origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}"
    path = Path(url2pathname(urlsplit(url).path))
    if url.startswith("file:") and path.exists():
        return str(path)
    if url.startswith("https:"):
        return str(url)
    raise InvalidError(
        "the origin of the installed runner is not known here, so that hosts cannot install the same; give --runner "
        "with a wheel, a checkout, a URL or git+URL@COMMIT"
    )


def _is_runner(project: bytes | None) -> bool:
    """Return True if the text of a pyproject.toml is that of this package."""
    try:
        name = tomllib.loads((project or b"").decode()).get("project", {}).get("name")
    except (ValueError, AttributeError):
        return False
    return bool(name == "runner")


def _pack(checkout: Path) -> bytes:
    """Return the files of a checkout without git that pip needs, as a tar.gz; the same files give the same bytes."""
    places = [checkout / name for name in (*_PACKAGES, *_PROJECT_FILES)]
    files = [file for place in places for file in (place.rglob("*") if place.is_dir() else [place]) if file.is_file()]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for file in sorted(file for file in files if "__pycache__" not in file.parts):
            info = tarfile.TarInfo(file.relative_to(checkout).as_posix())
            content = file.read_bytes()
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return gzip.compress(buffer.getvalue(), mtime=0)


def _git(directory: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(directory), *arguments], capture_output=True, check=True).stdout
