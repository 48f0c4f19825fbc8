"""The code that is shipped to machines: one commit, whole, and nothing that is not committed."""

import hashlib
import subprocess
from dataclasses import dataclass
from pathlib import Path

from runner.errors import InvalidError


@dataclass(frozen=True)
class Commit:
    """A commit of the project.

    Attributes:
        hash: in full.
        subject: the first line of its message.
        spec: path of the spec inside it, with forward slashes.
        spec_text: the spec as committed.
        archive: all of it, as a tar.gz.
        uncommitted: what `git status` lists: changed and new files, which are not in it.
    """

    hash: str
    subject: str
    spec: str
    spec_text: str
    archive: bytes
    uncommitted: tuple[str, ...]

    @property
    def short(self) -> str:
        """The hash as people write it."""
        return self.hash[:12]

    @property
    def sha256(self) -> str:
        """Digest of the archive, by which a host knows that all of it has come."""
        return hashlib.sha256(self.archive).hexdigest()


def checked_out_commit(spec: str) -> Commit:
    """The checked-out commit of the repository around this directory, which must hold the spec.

    Raises `InvalidError` if there is no repository, no commit, or no such spec in it.
    """
    try:
        root = Path(_git(Path.cwd(), "rev-parse", "--show-toplevel").decode().strip())
        commit = _git(root, "rev-parse", "--verify", "HEAD").decode().strip()
    except (OSError, subprocess.CalledProcessError):
        raise InvalidError(f"{Path.cwd()} has no git commit; what is shipped to machines is a commit") from None
    try:
        path = Path(spec).resolve().relative_to(root.resolve()).as_posix()
        spec_text = _git(root, "show", f"{commit}:{path}").decode()
    except (ValueError, subprocess.CalledProcessError):
        raise InvalidError(f"{spec} is not in commit {commit[:12]}; only what is committed is shipped") from None
    return Commit(
        commit,
        _git(root, "log", "-1", "--format=%s", commit).decode().strip(),
        path,
        spec_text,
        _git(root, "archive", "--format=tar.gz", commit),
        tuple(_git(root, "status", "--porcelain").decode().splitlines()),
    )


def _git(directory: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(directory), *arguments], capture_output=True, check=True).stdout
