"""Process faults set by environment variables, loaded by Python at start-up from PYTHONPATH.

SLOW_DISK=FILE delays each fsync while the file exists. CLOCK_SECONDS=N shifts the clock by N seconds.
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
