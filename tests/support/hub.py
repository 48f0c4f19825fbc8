"""Local fake of the Hugging Face Hub: the part of its HTTP interface that pushing a model and reading a data set need.

It implements whoami, the tree and visibility of a repository, its creation, the validation of a card's metadata,
preupload, the Git LFS batch with its PUT, and commit; and of data sets revisions, trees and ranges of files. It does
not implement Xet, which HF_HUB_DISABLE_XET disables.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import pytest
import yaml
from huggingface_hub import constants
from huggingface_hub.utils import _http as client

from tests.support.local_server import LocalServer, QuietHandler

TOKEN = "hf_a-token-that-may-write"
READ_TOKEN = "hf_a-token-that-may-read"
_LARGE = (".safetensors", "tokenizer.json")
_PIECE_BYTES = 1 << 12


class HubError(Exception):
    """An error response of the Hub."""

    def __init__(self, status: int, message: str, code: str = ""):
        super().__init__(message)
        self.status, self.code = status, code


@dataclass
class StoredRepository:
    """A repository of the fake Hub."""

    is_private: bool
    files: dict[str, bytes] = field(default_factory=lambda: {".gitattributes": b"*.safetensors filter=lfs\n"})
    commits: list[str] = field(default_factory=lambda: ["initial commit"])
    ignored: tuple[str, ...] = ()

    @property
    def sha(self) -> str:
        return hashlib.sha1(json.dumps(self.commits).encode()).hexdigest()

    def oid(self, name: str) -> str | None:
        """Return the digest with which a client compares a local file: SHA-256 for LFS files, else the Git blob id."""
        if name not in self.files:
            return None
        content = self.files[name]
        if name.endswith(_LARGE):
            return hashlib.sha256(content).hexdigest()
        return hashlib.sha1(b"blob %d\x00" % len(content) + content).hexdigest()


class Hub:
    """The fake Hub, which serves from a thread of this process.

    Attributes:
        repos: repositories by OWNER/NAME.
        datasets: files of each commit of a data set, by OWNER/NAME; the newest one is main.
        objects: complete Git LFS objects by SHA-256.
        requests: all requests as `METHOD PATH`, without the query.
        fault: called with the number (from 0) and the line of each request. It returns a status to respond with; 0 to
            close the connection before the request is executed, -1 to close it afterwards, -2 to hang without executing
            it, or None to execute it normally.
        is_held: predicate of the SHA-256 of a PUT; a held upload hangs until the client closes the connection.
    """

    def __init__(self) -> None:
        self.repos: dict[str, StoredRepository] = {}
        self.datasets: dict[str, list[dict[str, bytes]]] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.fault: Callable[[int, str], int | None] = lambda number, line: None
        self.held: set[str] = set()
        self.is_held: Callable[[str], bool] = lambda digest: False
        self._lock = threading.RLock()
        self._server = _Listener(self)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def count(self, words: str) -> int:
        """Return the number of requests that begin with `words`."""
        return sum(line.startswith(words) for line in self.requests)

    def put(self, digest: str, pieces: Iterator[bytes]) -> None:
        """Store one Git LFS object."""
        content = bytearray()
        for piece in pieces:
            content += piece
            if self.is_held(digest):
                self.held.add(digest)
                raise TimeoutError
        assert hashlib.sha256(content).hexdigest() == digest
        self.objects[digest] = bytes(content)

    def answer(self, line: str, token: str, body: bytes, query: str) -> Any:
        """Return the JSON response to a request, or raise `HubError`."""
        with self._lock:
            if token not in (TOKEN, READ_TOKEN):
                raise HubError(401, f"Invalid credentials: {token}")
            if line == "GET /api/whoami-v2":
                role = "write" if token == TOKEN else "read"
                return {"name": "owner", "auth": {"accessToken": {"displayName": "test", "role": role}}}
            if line.startswith("GET /api/datasets/"):
                return self._read_dataset(line.removeprefix("GET /api/datasets/"))
            if line.startswith("GET /api/models/"):
                return self._info("/".join(line.split("/")[3:5]))
            if token != TOKEN:
                raise HubError(403, "this token may not write")
            sent = [json.loads(text) for text in body.splitlines()] if "/commit/" in line else json.loads(body)
            return self._write(line, sent)

    def find_commit(self, name: str, revision: str) -> tuple[str, dict[str, bytes]]:
        """Return the commit of a revision of a data set, and its files."""
        if name not in self.datasets:
            raise HubError(404, "Repository not found", "RepoNotFound")
        commits = {
            hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest(): files for files in self.datasets[name]
        }
        commit = [*commits][-1] if revision == "main" else revision
        if commit not in commits:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit, commits[commit]

    def _read_dataset(self, path: str) -> Any:
        owner, name, verb, revision = path.split("/")
        commit, files = self.find_commit(f"{owner}/{name}", revision)
        if verb == "revision":
            return {"id": f"{owner}/{name}", "sha": commit}
        assert verb == "tree"
        digests = {path: hashlib.sha1(content).hexdigest() for path, content in files.items()}
        folders = [{"type": "directory", "path": "data", "oid": "0" * 40}]
        return [
            *folders,
            *({"type": "file", "path": each, "size": len(files[each]), "oid": digests[each]} for each in files),
        ]

    def read_range(self, path: str, given: str) -> bytes:
        """Return the content of a file of a data set, or a range of it."""
        owner, name, _, revision, file = path.removeprefix("/datasets/").split("/", 4)
        _, files = self.find_commit(f"{owner}/{name}", revision)
        if file not in files:
            raise HubError(404, "Entry not found", "EntryNotFound")
        first, _, last = given.removeprefix("bytes=").partition("-")
        return files[file][int(first) : int(last) + 1] if given else files[file]

    def _write(self, line: str, sent: Any) -> Any:
        if line == "POST /api/repos/create":
            return self._create(f"{sent['organization']}/{sent['name']}", sent)
        if line == "POST /api/validate-yaml":
            front = yaml.safe_load(sent["content"].split("---\n")[1])
            assert isinstance(front["tags"], list)
            return {"errors": [], "warnings": [{"message": "a licence is missing"}]}
        if line.endswith(".git/info/lfs/objects/batch"):
            return {"transfer": "basic", "objects": [self._object(each) for each in sent["objects"]]}
        name, verb = "/".join(line.split("/")[3:5]), line.split("/")[5]
        repo = self._find(name)
        if verb == "preupload":
            return {"files": [self._mode(repo, each["path"]) for each in sent["files"]]}
        assert verb == "commit"
        return {"commitUrl": f"{self.endpoint}/{name}/commit/{self._commit(repo, sent)}", "commitOid": repo.sha}

    def _find(self, name: str) -> StoredRepository:
        if name not in self.repos:
            raise HubError(404, "Repository not found", "RepoNotFound")
        return self.repos[name]

    def _info(self, name: str) -> Any:
        repo = self._find(name)
        siblings = [{"rfilename": path, "size": len(content)} for path, content in sorted(repo.files.items())]
        return {"id": name, "sha": repo.sha, "private": repo.is_private, "siblings": siblings}

    def _create(self, name: str, sent: Any) -> Any:
        if name in self.repos:
            raise HubError(409, "You already created this model repo")
        self.repos[name] = StoredRepository(
            is_private=sent.get("visibility") == "private" or sent.get("private") is True
        )
        return {"url": f"{self.endpoint}/{name}"}

    def _object(self, wanted: Any) -> Any:
        if wanted["oid"] in self.objects:
            return wanted
        return wanted | {"actions": {"upload": {"href": f"{self.endpoint}/lfs/{wanted['oid']}"}}}

    def _mode(self, repo: StoredRepository, path: str) -> Any:
        mode = "lfs" if path.endswith(_LARGE) else "regular"
        return {"path": path, "uploadMode": mode, "shouldIgnore": path in repo.ignored, "oid": repo.oid(path)}

    def _commit(self, repo: StoredRepository, lines: list[Any]) -> str:
        head, *operations = lines
        if head["value"].get("parentCommit", repo.sha) != repo.sha:
            raise HubError(412, "A commit has happened since. Please refresh and try again.")
        assert operations, "an empty commit"
        files = dict(repo.files)
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "deletedFile":
                del files[value["path"]]
            elif operation["key"] == "lfsFile":
                if value["oid"] not in self.objects:
                    raise HubError(400, f"{value['path']}: the object was never uploaded")
                files[value["path"]] = self.objects[value["oid"]]
            else:
                assert operation["key"] == "file"
                files[value["path"]] = base64.b64decode(value["content"])
        repo.files = files
        repo.commits.append(head["value"]["summary"])
        return repo.sha


class _Listener(LocalServer):
    def __init__(self, hub: Hub):
        self.hub = hub
        super().__init__(_Handler)


class _Handler(QuietHandler):
    server: _Listener

    def _handle(self) -> None:
        hub = self.server.hub
        path, _, query = self.path.partition("?")
        line = f"{self.command} {path}"
        hub.requests.append(line)
        fault = hub.fault(len(hub.requests) - 1, line)
        if fault in (0, -2):
            self.close_connection = True
            if fault == -2:
                self.rfile.read()  # until the client goes
            return
        if fault is not None and fault > 0:
            b"".join(self._pieces())
            self._reply(fault, b"{}", {"X-Error-Message": "as the test said"})
            return
        status, headers, content = 200, {}, b""
        try:
            if path.startswith("/datasets/"):
                content = hub.read_range(path, self.headers.get("Range", ""))
            elif self.command == "PUT":
                hub.put(path.rpartition("/")[2], self._pieces())
            else:
                token = self.headers.get("Authorization", "").removeprefix("Bearer ")
                content = json.dumps(hub.answer(line, token, b"".join(self._pieces()), query)).encode()
        except HubError as refused:
            status, content = refused.status, json.dumps({"error": str(refused)}).encode()
            headers = {"X-Error-Code": refused.code, "X-Error-Message": str(refused)}
        except TimeoutError:
            self.rfile.read()  # until the client goes
            fault = -1
        if fault == -1:
            self.close_connection = True
            return
        self._reply(status, content, headers)

    do_GET = do_PUT = do_POST = _handle  # noqa: N815

    def _reply(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            if value:
                self.send_header(key, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _pieces(self) -> Iterator[bytes]:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            while num_bytes := int(self.rfile.readline().split(b";")[0], 16):
                yield self.rfile.read(num_bytes)
                self.rfile.readline()
            self.rfile.readline()
            return
        missing_bytes = int(self.headers.get("Content-Length", 0))
        while missing_bytes:
            piece = self.rfile.read(min(missing_bytes, _PIECE_BYTES))
            if not piece:
                raise ConnectionResetError("the client went away in the middle of a body")
            missing_bytes -= len(piece)
            yield piece


class _NoWaiting:
    """Replacement of the client's module `time`, so that its retries do not wait."""

    def sleep(self, seconds: float) -> None:
        """Return at once."""

    time = staticmethod(client.time.time)


@contextmanager
def start_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Start the fake Hub and route the library to it, in this process and in its children."""
    with Hub() as hub:
        for name, value in {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere/token")
        monkeypatch.setattr(client, "time", _NoWaiting())
        yield hub
    client.set_client_factory(client.default_client_factory)
