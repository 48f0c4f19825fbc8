"""Check that all hosts of a job see the same directory.

Process 0 writes a file with a random name, and every process looks for it. Hosts that have other directories under the
same name would otherwise wait for each other at the first save, or commit checkpoints that lack their parts.
"""

import contextlib
import socket
import time
import uuid

from runner.distributed.agreement import Hosts
from runner.errors import InvalidError, format_error
from runner.storage import Store

# A host may go on for so long with what an NFS has told it before: directories are cached for up to 60 s by default.
SHARED_SECONDS = 70.0
_POLL_SECONDS = 0.2
_MAX_NAMED = 4  # processes in a message


def write_token(store: Store, hosts: Hosts) -> str:
    """Write the file for `validate_shared`, and return its name; empty if there is only one process. Process 0 only."""
    if hosts.num_processes == 1:
        return ""
    name = f".shared.{uuid.uuid4().hex}"
    store.write(name, name.encode())
    return name


def validate_shared(store: Store, hosts: Hosts, token: str, seconds: float) -> None:
    """Raise `InvalidError` on every process if one of them does not see what process 0 has written.

    Called on every process. Each makes one listing and one read; where it sees nothing, it looks again for so many
    seconds. The file is removed.
    """
    if hosts.num_processes == 1:
        return
    try:
        places = hosts.gather([_find_problem(store, token, seconds), socket.gethostname(), store.url])
    finally:
        if hosts.is_main:
            with contextlib.suppress(OSError):  # a file that stays does no harm
                store.remove(token)
    blind = [(process, *place) for process, place in enumerate(places) if place[0] is not None]
    if blind:
        named = ", ".join(
            f"process {process} (host {host}, {url}: {problem})" for process, problem, host, url in blind[:_MAX_NAMED]
        )
        more = f" and {len(blind) - _MAX_NAMED} others" if len(blind) > _MAX_NAMED else ""
        _, host, url = places[0]
        raise InvalidError(
            f"{named}{more} cannot see what process 0 (host {host}) writes into {url}; give all hosts of the job one "
            "shared disk or bucket, under the same path"
        )


def _find_problem(store: Store, token: str, seconds: float) -> str | None:
    """Return None as soon as the file is there, the reason if it is not within so many seconds."""
    started = time.monotonic()
    while True:
        try:
            # A listing makes a client of NFS ask the server again, where its cache may answer for a name alone.
            is_there = token in store.list_names("") and store.read(token) == token.encode()
            problem = None if is_there else "nothing is there"
        except OSError as error:
            problem = format_error(error)
        if problem is None or time.monotonic() - started > seconds:
            return problem
        time.sleep(_POLL_SECONDS)
