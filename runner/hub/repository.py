"""A model repository on the Hub: found before anything is exported, pushed to in one commit.

1. `check` asks who may write, and whether what is there is as public as the user said. Nothing is made yet.
2. `push` makes the repository if it is missing, and sends the large files. What the Hub has of them by their digest, as
   from a push that was killed, is not sent again.
3. One commit names all that differs, and takes away what an earlier export has left and this one has not: of a model
   that had two shards and has one file now, both would be found by readers, and one of them be wrong. It follows on the
   commit that was read before, so of two pushes at a time one has to come again.
4. What the repository then holds is compared with what was exported.

Run again after a kill at any point it ends in the same files; where nothing differs there is no commit.
"""

import contextlib
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from runner.data.extra import import_extra
from runner.errors import InvalidError, RetryableError, RunnerError, reason_of
from runner.terminal import hide
from runner.weights.export import may_be_written

ANSWER_SECONDS = 300.0  # in which a byte must come or go
_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_MODULES = ("", ".errors", ".utils")
_TRANSIENT = (408, 409, 412, 429)  # besides all that begin with 5


@dataclass(frozen=True)
class Pushed:
    """Where an export is, and whether it was there before."""

    url: str
    has_changed: bool


def _set_up(utils: ModuleType, hub: ModuleType) -> None:
    """What holds for the library in all of this process: few words, and an end to each wait, else there is none."""
    utils.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        utils.disable_progress_bars()
    client = hub.get_session()
    kind, hooks = type(client), client.event_hooks
    hub.set_client_factory(lambda: kind(event_hooks=hooks, follow_redirects=True, timeout=ANSWER_SECONDS))


class Repository:
    """OWNER/NAME on the Hub that HF_ENDPOINT names, with the token of HF_TOKEN or of the library's own login."""

    def __init__(self, name: str, *, is_public: bool):
        """Raises `InvalidError` if the library is missing, the name is none, or there is no token."""
        if _NAME.fullmatch(name) is None:
            raise InvalidError(f"--push {name}: needs OWNER/NAME, such as my-team/my-model")
        self._name, self._is_public = name, is_public
        self._hub, self._errors, utils = (import_extra(f"huggingface_hub{part}", "hub") for part in _MODULES)
        _set_up(utils, self._hub)
        with self._answers():
            token = self._hub.get_token()
        if token is None:
            raise InvalidError(f"--push {name}: no token: set HF_TOKEN, or log in with `hf auth login`")
        if not (token.isascii() and token.isprintable()):
            raise InvalidError(f"--push {name}: the token holds a character that none has; copy it again")
        hide(token)
        self._api = self._hub.HfApi(token=token)
        if not self._api.endpoint.startswith(("http://", "https://")):
            raise InvalidError(f"HF_ENDPOINT={self._api.endpoint}: needs a URL that begins with http:// or https://")

    def check(self) -> None:
        """Raise `InvalidError` if a push would be refused, `RetryableError` if the Hub does not answer."""
        with self._answers():
            auth = self._api.whoami().get("auth") or {}
            if (auth.get("accessToken") or {}).get("role") == "read":
                raise InvalidError(f"--push {self._name}: the token may only read; make one that may write")
            self._find()

    def push(self, directory: Path, message: str) -> Pushed:
        """Bring the repository to hold the files of `directory`, which has no others inside.

        Raises `InvalidError`, or `RetryableError` if running it again may help.
        """
        paths = {path.name: path for path in sorted(directory.iterdir())}
        with self._answers():
            if self._find() is None:
                self._api.create_repo(self._name, private=not self._is_public, exist_ok=True)
            before = self._api.repo_info(self._name)
            left = sorted(each.rfilename for each in before.siblings or [] if each.rfilename not in paths)
            operations = [self._hub.CommitOperationDelete(name) for name in left if may_be_written(name)]
            operations += [self._hub.CommitOperationAdd(name, path) for name, path in paths.items()]
            with warnings.catch_warnings(action="ignore"):  # of metadata that the Hub does not know: it takes them
                commit = self._api.create_commit(
                    self._name, operations, commit_message=message, parent_commit=before.sha
                )
            self._compare(paths)
        return Pushed(f"{self._api.endpoint}/{self._name}", commit.oid != before.sha)

    def _find(self) -> Any:
        """What the Hub tells of the repository, None if there is none that this token may see."""
        try:
            found = self._api.repo_info(self._name)
        except self._errors.RepositoryNotFoundError as error:
            if error.response.status_code == 401:
                raise
            return None
        if found.private is False and not self._is_public:
            raise InvalidError(f"{self._name} is there, and public; give --public, or another name")
        if found.private and self._is_public:
            raise InvalidError(f"{self._name} is there, and private; leave out --public, or change it on the Hub first")
        return found

    def _compare(self, paths: dict[str, Path]) -> None:
        """Raise `InvalidError` if the repository has not taken all that was sent: its .gitignore may name a file."""
        found = self._api.repo_info(self._name, files_metadata=True)
        sizes = {each.rfilename: each.size for each in found.siblings or []}
        wrong = [name for name, path in paths.items() if sizes.get(name) != path.stat().st_size]
        if wrong:
            raise InvalidError(f"{self._name} has not taken {', '.join(wrong)}: see its .gitignore")

    @contextlib.contextmanager
    def _answers(self) -> Iterator[None]:
        """Inside, what the library raises becomes an error of one line."""
        errors = self._errors
        try:
            yield
        except RunnerError:
            raise
        except (errors.HTTPError, OSError, RuntimeError, ValueError) as error:
            raise self._meaning(error) from error

    def _meaning(self, error: BaseException) -> RunnerError:
        """What an error of the library means to the user; a thread's own hides behind the one that tells of it."""
        errors = self._errors
        found: BaseException | None = error
        while found is not None and not isinstance(found, errors.HTTPError | OSError | ValueError):
            found = found.__cause__
        found = found or error
        if isinstance(found, errors.HfHubHTTPError):
            return self._refusal(found)
        if isinstance(found, errors.OfflineModeIsEnabled):
            return InvalidError(f"--push {self._name}: HF_HUB_OFFLINE is set, and a push needs the Hub")
        if isinstance(found, ValueError):
            return InvalidError(f"--push {self._name}: {' '.join(str(found).split())[:300]}")
        host = getattr(getattr(self, "_api", None), "endpoint", "the Hub")
        return RetryableError(f"{host} does not answer: {reason_of(found)}; run the same again, it goes on")

    def _refusal(self, error: Any) -> RunnerError:
        """What an answer of the Hub means."""
        status = error.response.status_code
        reason = " ".join((error.server_message or reason_of(error)).split())[:300]
        if status == 401:
            return InvalidError(f"{self._api.endpoint} does not take the token of HF_TOKEN, or of the login: {reason}")
        if status == 403:
            return InvalidError(f"the token may not write to {self._name}: {reason}")
        if status in _TRANSIENT or status >= 500:
            return RetryableError(f"{self._name}: {status}: {reason}; run the same again, it goes on")
        return InvalidError(f"{self._name}: {status}: {reason}")
