"""Fake W&B server with the requests that logging a run needs.

The files of a run grow by lines: a request gives the line at which its content begins, and replaces lines there.
"""

import gzip
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.local_server import LocalServer, QuietHandler

_STREAM = re.compile(r"/files/(?P<entity>[^/]+)/(?P<project>[^/]+)/(?P<run>[^/]+)/file_stream")
HISTORY = "wandb-history.jsonl"
ENTITY = "team"


class WandbServer:
    """Received data: the lines of each file by run, and the input of each `upsertBucket`.

    Attributes:
        fork_status: HTTP status of the response to a run that is started as a fork; 200 with an error in it is that of
            GraphQL. None accepts it.
    """

    def __init__(self) -> None:
        self.fork_status: int | None = None
        self.files: dict[tuple[str, str], list[str]] = {}
        self.upserts: list[dict[str, Any]] = []
        self.url = ""
        self._lock = threading.Lock()

    @property
    def runs(self) -> list[str]:
        """Names of the runs that have files."""
        with self._lock:
            return list(dict.fromkeys(run for run, _ in self.files))

    def history(self, run: str) -> list[dict[str, Any]]:
        """Return the rows of a run without W&B's own keys."""
        with self._lock:
            rows = [json.loads(line) for line in self.files.get((run, HISTORY), ())]
        return [{"step": row["_step"]} | {key: row[key] for key in row if key[0] != "_"} for row in rows]

    def stream(self, run: str, files: dict[str, Any]) -> None:
        """Store lines at their offsets."""
        with self._lock:
            for name, given in files.items():
                lines = self.files.setdefault((run, name), [])
                offset = given["offset"]
                lines[offset : offset + len(given["content"])] = given["content"]

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        """Return the data of the response to a GraphQL request."""
        if "upsertBucket" in query:
            self.upserts.append(variables)
            project = {"id": "p", "name": variables["project"], "entity": {"id": "e", "name": ENTITY}}
            bucket = {"id": "b", "name": variables["name"], "displayName": "x", "description": "", "config": "{}"}
            bucket |= {"sweepName": None, "historyLineCount": 0, "project": project}
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if "createRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        if "coreWeaveOrganizationId" in query:
            return {"entity": {"organization": {"coreWeaveOrganizationId": None}}}
        if "viewer" in query:
            user = {"id": "u", "username": "u", "email": "", "entity": ENTITY, "flags": "{}", "teams": {"edges": []}}
            return {"viewer": user}
        return {}


def _handler(server: WandbServer) -> type[QuietHandler]:
    class Handler(QuietHandler):
        def do_PUT(self) -> None:  # noqa: N802
            self._body()
            self._reply({})

        def do_POST(self) -> None:  # noqa: N802
            body = self._body()
            stream = _STREAM.fullmatch(self.path)
            if stream is not None:
                server.stream(stream["run"], json.loads(body).get("files") or {})
                self._reply({})
            elif self.path == "/graphql":
                request = json.loads(body)
                is_fork = "branch_point" in ((request.get("variables") or {}).get("config") or "")
                if is_fork and server.fork_status is not None:
                    self._reply({"errors": [{"message": "forks are not offered here"}]}, server.fork_status)
                    return
                self._reply({"data": server.answer(request["query"], request.get("variables") or {})})
            else:
                self._reply({})

        def _body(self) -> bytes:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            return gzip.decompress(content) if self.headers.get("Content-Encoding") == "gzip" else content

        def _reply(self, value: dict[str, Any], status: int = 200) -> None:
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    return Handler


@contextmanager
def start_wandb() -> Iterator[WandbServer]:
    """Start a fake server on a free port, in a thread of this process."""
    state = WandbServer()
    with LocalServer(_handler(state)) as server:
        state.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield state
        server.shutdown()
