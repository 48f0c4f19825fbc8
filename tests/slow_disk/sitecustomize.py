"""Makes the disk of a process slow: while the file that SLOW_DISK names is there, each fsync takes a while longer."""

import os
import time

_fsync = os.fsync


def _slow_fsync(descriptor: int) -> None:
    if os.path.exists(os.environ["SLOW_DISK"]):
        time.sleep(0.3)
    _fsync(descriptor)


os.fsync = _slow_fsync
