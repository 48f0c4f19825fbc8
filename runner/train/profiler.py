"""Profiles of some steps on the devices of process 0, recorded by jax.profiler into the run's directory.

The steps are given in the spec (`logging.profile`) or requested by a file: `profiles/request.json`, `{"steps": N}`, as
the command `profile` writes it. The job polls for the file on a thread, deletes it, and records its next steps
(`.github/docs/metrics.md` explains why the request is not a signal).

`profiles/<attempt>.<start>-<stop>/` then holds the trace of the steps after `start` up to `stop`, in the layout that
TensorBoard's profile plugin and xprof read, and `memory.prof`, the device memory at its end, which pprof reads.
Profiling leaves the results bit-identical, and a failure only prints a warning. On processes other than 0 nothing is
recorded.
"""

import contextlib
import threading
from pathlib import Path
from typing import Any

import jax

from runner.attempts.attempt import DRAIN_SECONDS, Attempt
from runner.console import say, warn
from runner.distributed.clock import PROFILE
from runner.errors import format_error
from runner.spec import MAX_PROFILE_STEPS
from runner.storage import Store, default_cache_directory, encode_json, read_json

FOLDER, MEMORY = "profiles", "memory.prof"
REQUEST = f"{FOLDER}/request.json"
POLL_SECONDS, POLL_BUCKET_SECONDS = 2.0, 30.0
_STEPS = "steps"
_UPLOAD_SECONDS = 60.0  # per file
_ERRORS = (RuntimeError, OSError, ValueError)


def request_profile(store: Store, num_steps: int) -> None:
    """Ask the job of this directory, which may run anywhere, to record its next steps."""
    store.write(REQUEST, encode_json({_STEPS: num_steps}))


def take_profile_request(store: Store) -> int | None:
    """Return the requested number of steps and delete the request; None without a valid one. Raises `OSError`."""
    if not store.exists(REQUEST):
        return None
    try:
        num_steps = read_json(store, REQUEST).get(_STEPS)
    except (FileNotFoundError, ValueError) as error:
        warn(f"{store.url}/{REQUEST} is ignored: {format_error(error)}")
        num_steps = None
    store.remove(REQUEST)
    return num_steps if type(num_steps) is int and 0 < num_steps <= MAX_PROFILE_STEPS else None


class Profiler:
    """Recorder of the profiles of one attempt."""

    def __init__(self, attempt: Attempt, profile: str | None):
        """Plan the profile of the spec, START:STOP in completed steps."""
        self._attempt = attempt
        self._start, self._stop = map(int, profile.split(":")) if profile and attempt.hosts.is_main else (0, 0)
        self._requested_steps: int | None = None  # set by the polling thread
        self._folder: Path | None = None  # folder of the trace that is being recorded
        self._name = ""
        self._uploads: list[threading.Thread] = []
        self._closed = threading.Event()

    def watch_requests(self) -> None:
        """Start to poll for requests, on a thread."""
        if self._attempt.hosts.is_main:
            threading.Thread(target=self._poll_requests, name="profile requests", daemon=True).start()

    def _poll_requests(self) -> None:
        store = self._attempt.store
        while not self._closed.wait(POLL_SECONDS if store.root is not None else POLL_BUCKET_SECONDS):
            with contextlib.suppress(OSError):
                self._requested_steps = take_profile_request(store) or self._requested_steps

    def on_step(self, step: int, loss: Any = None) -> None:
        """Begin or end a trace if one is due, after `step` steps were dispatched.

        Waits for `loss`, the output of the last step, only if a trace begins or ends.
        """
        if self._folder is None:
            if self._requested_steps is not None:
                self._start, self._stop, self._requested_steps = step, step + self._requested_steps, None
            if self._start <= step < self._stop:
                self._begin(step, loss)
        elif step >= self._stop:
            self._end(step, loss)

    def close(self, step: int) -> None:
        """End and keep the trace that is being recorded, after the last step. Never raises."""
        self._closed.set()
        if self._folder is not None:
            self._end(step, None)
        for upload in self._uploads:
            upload.join(DRAIN_SECONDS)

    def _begin(self, step: int, loss: Any) -> None:
        store, attempt = self._attempt.store, self._attempt
        self._start, self._name = step, f"{attempt.number:06}.{step}-{self._stop}"
        root = default_cache_directory() / attempt.run_id if store.root is None else store.root
        folder = root / FOLDER / self._name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            jax.block_until_ready(loss)  # the steps before must not be part of the trace
            jax.profiler.start_trace(str(folder))
            self._folder = folder
        except _ERRORS as error:
            self._stop = 0
            warn(f"no profile of steps {self._name}: {format_error(error)}")

    def _end(self, step: int, loss: Any) -> None:
        folder, self._folder, self._stop = self._folder, None, 0
        assert folder is not None, "a trace has begun"
        try:
            with self._attempt.progress.report_phase(PROFILE):
                jax.block_until_ready(loss)
                jax.profiler.stop_trace()
                (folder / MEMORY).write_bytes(jax.profiler.device_memory_profile())
        except _ERRORS as error:
            warn(f"no profile of steps {self._name}: {format_error(error)}")
            return
        if self._attempt.store.root is not None:
            self._announce(step)
            return
        upload = threading.Thread(target=self._upload, args=(folder, step), name="profile", daemon=True)
        self._uploads.append(upload)
        upload.start()

    def _upload(self, folder: Path, step: int) -> None:
        store = self._attempt.store
        try:
            for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                store.upload(path, f"{FOLDER}/{folder.name}/{path.relative_to(folder).as_posix()}", _UPLOAD_SECONDS)
        except OSError as error:
            warn(f"the profile {folder} could not be copied into the bucket: {format_error(error)}")
            return
        self._announce(step)

    def _announce(self, step: int) -> None:
        say(f"profile of the steps after {self._start} up to {step}: {self._attempt.store.url}/{FOLDER}/{self._name}")
        self._attempt.record("profile", step, start=self._start, path=f"{FOLDER}/{self._name}")
