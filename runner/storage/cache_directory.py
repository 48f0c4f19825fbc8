"""Where this machine keeps what it can make again."""

import os
import tempfile
from pathlib import Path


def default_cache_directory() -> Path:
    """Return $RUNNER_CACHE, else $XDG_CACHE_HOME/runner, else ~/.cache/runner."""
    if directory := os.environ.get("RUNNER_CACHE"):
        return Path(directory)
    if directory := os.environ.get("XDG_CACHE_HOME"):
        return Path(directory) / "runner"
    try:
        return Path.home() / ".cache" / "runner"
    except RuntimeError:  # a container's user may have no home
        return Path(tempfile.gettempdir()) / f"runner-{os.getuid()}"
