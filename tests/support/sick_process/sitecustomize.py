"""Makes a process sick, as its environment says.

SLOW_DISK=FILE: while the file is there, each fsync takes a while longer. CLOCK_SECONDS=N: the clock is so far off.
"""

import os
import time

_fsync, _time = os.fsync, time.time
_off_seconds = float(os.environ.get("CLOCK_SECONDS", "0"))


def _slow_fsync(descriptor: int) -> None:
    if os.path.exists(os.environ.get("SLOW_DISK", "")):
        time.sleep(0.3)
    _fsync(descriptor)


os.fsync = _slow_fsync
time.time = lambda: _time() + _off_seconds
