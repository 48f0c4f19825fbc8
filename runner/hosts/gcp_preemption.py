"""The preemption of a Google Cloud VM, announced some time before SIGTERM comes, if it comes at all.

The VM's metadata server has `preempted` for spot VMs and `maintenanceEvent` for TPU hosts that are about to be
maintained. It holds its answer back until something changes.
"""

import json
import os
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

_PRODUCT = Path("/sys/class/dmi/id/product_name")
_HOLD_SECONDS = 300
_RETRY_SECONDS = 10.0


def watch(ask_to_stop: Callable[[str], None]) -> None:
    """Call `ask_to_stop` with the reason once this VM is to be preempted. Called on every host; returns at once.

    It is called at most once, from a thread of its own. On other machines nothing happens.
    """
    server = _metadata_server()
    if server is not None:
        threading.Thread(target=_watch, args=(server, ask_to_stop), name="gcp-preemption", daemon=True).start()


def _metadata_server() -> str | None:
    """Its address; None if this machine is none of Google Cloud."""
    for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP"):
        if os.environ.get(name):
            return os.environ[name]
    is_google = _PRODUCT.exists() and "Google" in _PRODUCT.read_text(errors="replace")
    return "metadata.google.internal" if is_google else None


def _watch(server: str, ask_to_stop: Callable[[str], None]) -> None:
    etag = "0"
    while True:
        query = f"recursive=true&wait_for_change=true&timeout_sec={_HOLD_SECONDS}&last_etag={etag}"
        request = urllib.request.Request(
            f"http://{server}/computeMetadata/v1/instance/?{query}", headers={"Metadata-Flavor": "Google"}
        )
        try:
            with urllib.request.urlopen(request, timeout=_HOLD_SECONDS + 30) as answer:
                etag = answer.headers.get("ETag", "0")
                reason = preemption_of(json.load(answer))
        except (OSError, ValueError):  # metadata that cannot be read are no reason to end a job
            time.sleep(_RETRY_SECONDS)
            continue
        if reason is not None:
            ask_to_stop(reason)
            return


def preemption_of(instance: object) -> str | None:
    """Why the VM that these metadata describe is to be preempted; None if it is not."""
    if not isinstance(instance, dict):
        return None
    if str(instance.get("preempted", "")).upper() == "TRUE":
        return "this machine is being preempted"
    event = str(instance.get("maintenanceEvent", "NONE")).upper()
    return f"this machine is about to be maintained ({event})" if event.startswith("TERMINATE") else None
