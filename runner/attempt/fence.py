"""The fence: which attempt a directory belongs to.

An attempt is one start of the job, on all its hosts. Each attempt claims the next number by creating
`attempts/<number>`, which can succeed only once, on a disk and in a bucket. Whoever finds a higher number than its own
is fenced: it ends and writes nothing more, so two attempts never share a directory. Whoever finds its own claim gone
ends too: somebody has removed the directory, or unmounted it, and what is there now is another.
"""

import os
import socket
import time
import uuid

from runner.errors import FencedError, RemovedError
from runner.storage import Store, create, encode_json, number_in, read_json

_ATTEMPTS = "attempts"


class Fence:
    """The single-writer rule of one directory. Main host only, except `attempt`."""

    def __init__(self, store: Store, attempt: int | None = None):
        self._store = store
        self._newest_seen = 0
        self._id: str | None = None  # in the claim, on the host that made it
        self.attempt = attempt

    def newest(self) -> int:
        """The highest attempt that has claimed the directory, 0 if none has."""
        names = self._store.children(_ATTEMPTS)
        self._newest_seen = max((number for number in map(number_in, names) if number is not None), default=0)
        return self._newest_seen

    def claim(self) -> int:
        """Take the next attempt number, fencing every earlier attempt."""
        claim_id = uuid.uuid4().hex
        record = {"time": time.time(), "host": socket.gethostname(), "pid": os.getpid(), "id": claim_id}
        while True:
            number = self.newest() + 1
            try:
                create(self._store, f"{_ATTEMPTS}/{number}", encode_json(record))
            except FileExistsError:
                continue
            self._newest_seen = self.attempt = number
            self._id = claim_id
            return number

    def check(self) -> None:
        """Raise `FencedError` if a newer attempt owns the directory, `RemovedError` if it is not the claimed one."""
        self.newest()
        self._raise_if_fenced()
        if self._id is not None and not self._is_claim_there():
            raise self._removed()

    def glance(self) -> None:
        """Like `check`, but never waits for a network: in a bucket, what the last `check` has seen."""
        if self._store.root is not None:
            self.newest()
        self._raise_if_fenced()

    def _raise_if_fenced(self) -> None:
        assert self.attempt is not None, "the attempt has a number"
        if self._newest_seen < self.attempt:
            raise self._removed()
        if self._newest_seen > self.attempt:
            raise FencedError(
                f"attempt {self._newest_seen} has taken over {self._store.url}; attempt {self.attempt} stops"
            )

    def _is_claim_there(self) -> bool:
        """Whether `attempts/<number>` is the one that this attempt made, and not that of a run begun there since."""
        try:
            return read_json(self._store, f"{_ATTEMPTS}/{self.attempt}").get("id") == self._id
        except (FileNotFoundError, ValueError):
            return False

    def _removed(self) -> RemovedError:
        return RemovedError(
            f"{self._store.url}: {_ATTEMPTS}/{self.attempt}, this attempt's claim, is gone: somebody has removed the "
            "directory, a part of it, or its disk, under the running job; put it back, or start anew"
        )
