"""The notice that a Google Cloud VM gives of its own end, some time before SIGTERM comes, if it comes at all.

Spot VMs say `preempted`, TPU hosts about to be maintained say `maintenanceEvent`, both through the VM's metadata
server, which holds the answer back until something changes.
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
    """Call `ask_to_stop` with the reason once this VM is to end. Returns at once; on other machines nothing happens."""
    host = _metadata_host()
    if host is not None:
        threading.Thread(target=_watch, args=(host, ask_to_stop), name="metadata", daemon=True).start()


def _metadata_host() -> str | None:
    for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP"):
        if os.environ.get(name):
            return os.environ[name]
    is_google = _PRODUCT.exists() and "Google" in _PRODUCT.read_text(errors="replace")
    return "metadata.google.internal" if is_google else None


def _watch(host: str, ask_to_stop: Callable[[str], None]) -> None:
    etag = "0"
    while True:
        query = f"recursive=true&wait_for_change=true&timeout_sec={_HOLD_SECONDS}&last_etag={etag}"
        request = urllib.request.Request(
            f"http://{host}/computeMetadata/v1/instance/?{query}", headers={"Metadata-Flavor": "Google"}
        )
        try:
            with urllib.request.urlopen(request, timeout=_HOLD_SECONDS + 30) as answer:
                etag = answer.headers.get("ETag", "0")
                reason = end_of(json.load(answer))
        except (OSError, ValueError):  # an hour without metadata is no reason to end a job
            time.sleep(_RETRY_SECONDS)
            continue
        if reason is not None:
            ask_to_stop(reason)
            return


def end_of(instance: object) -> str | None:
    """Why the VM that these metadata describe is to end; None if it is not."""
    if not isinstance(instance, dict):
        return None
    if str(instance.get("preempted", "")).upper() == "TRUE":
        return "this machine is being preempted"
    event = str(instance.get("maintenanceEvent", "NONE")).upper()
    return f"this machine is about to be maintained ({event})" if event.startswith("TERMINATE") else None
