"""Self-test of kernels: before the first step, each kernel that the compiled step uses is compared with plain XLA ops.

While a program is traced under the rules of a `TrainSetup`, code that chooses a kernel asks `get_kernel_use` which
kernels to avoid, and records a `KernelCase` of the kernel that it uses. A case is a small input with everything that
the kernel's code depends on: dtypes, widths, blocks, masks. `KernelChecker` then runs each case on a device of every
process, forward and gradients:

1. A case that has passed with the same facts, source, chip and versions is in this host's cache, beside the compiled
   programs, and is not run again. The cache is not trusted: unless a valid file says that the case has passed, the case
   is run.
2. Process 0 records in the run's directory that a case begins, and removes the record when all processes have finished
   the case. A program that hangs on a device cannot be cancelled. So after `CASE_SECONDS` a thread records that the
   case has failed, and ends the process with 76; the next start finds the record.
3. A case is run `REPETITIONS` times with the same inputs. Results must be finite, have the same bits each time, and
   lie within `TOLERANCES` of the reference.
4. Processes exchange their results after each case. A kernel that fails on one of them is avoided by all: the step is
   traced again without that kernel, and the cases of its replacement are run.

A kernel stays avoided for the rest of the run, even if it passes at a later start, because another kernel gives other
bits and a restart must not change bits. The record is `kernels.json` in the run's directory.
"""

import contextlib
import contextvars
import functools
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from runner.accelerator import is_gpu_deterministic, make_compiler_options
from runner.attempts.attempt import Attempt
from runner.config import AttentionKernels
from runner.console import warn
from runner.distributed.preemption import end_process
from runner.errors import EXIT_RETRYABLE, InvalidError, PeerLostError, ResumeError, RetryableError, format_error
from runner.parallel.mesh import make_mesh, use_sharding_rules
from runner.storage import LocalStore, default_cache_directory, encode_json, parse_json, read_json
from runner.train.compile import mark_cudnn_gradients_deterministic

# A kernel that is wrong once in ten runs is found with a probability of 1 - 0.9^64 = 99.9%, one that is wrong once in
# a hundred with 47%.
REPETITIONS = 64
CASE_SECONDS = 300.0  # for compilation and all repetitions of a case
# Error of a row of a result, relative to the norm of that row plus the root mean square of all rows' norms. 16-bit
# results are rounded, and so are weights and gradients of scores inside of a kernel: interpreted kernels that are right
# have errors of up to 0.019 in bfloat16, at any length, and those with a window that is one too long of 0.09 to 0.42.
# On accelerators a float32 matmul is by default one of fewer bits.
TOLERANCES = {"bfloat16": 0.05, "float16": 0.01, "float32": 0.05}
EXACT_TOLERANCE = 1e-4  # of float32 on a CPU, where matmuls are exact
RECORD = "kernels.json"

_FOLDER = "kernels"  # in the host's cache
# Starts in a row that may end during one case without a result, before the case counts as failed. A kernel may end the
# process, but so does a preemption, which should not change the bits of a run: four in a row are unlikely.
_MOST_STARTS = 4
_SLACK_SECONDS = 30.0  # of process 0 for the others, and of these beyond it

Owner = Literal["ours", "library"]


class KernelTrial(NamedTuple):
    """Functions to compare, from the same inputs to results and gradients: arrays in the same order."""

    kernel: Callable[..., Any]
    reference: Callable[..., Any]  # plain XLA ops in float32
    inputs: tuple[Any, ...]  # numpy arrays


@dataclass(frozen=True)
class KernelCase:
    """A kernel with everything that its code depends on."""

    kernel: str  # its name, by which it is avoided
    role: str  # operation that it computes, in a word
    owner: Owner  # its maintainer: this repository or a library
    fallback: str  # replacement that computes the same operation, in a few words
    facts: Mapping[str, Any]  # everything that the code of the kernel depends on, as JSON values
    dtype: str  # dtype of results, which `TOLERANCES` has a tolerance for
    make_trial: Callable[[], KernelTrial]
    sources: tuple[str, ...] = ()  # files with the source of the kernel, whose content is part of the digest
    is_demanded: bool = False  # True if the spec demands this kernel, so that a failure ends the run

    @functools.cached_property
    def digest(self) -> str:
        """Digest of the kernel, its facts and its source."""
        source = hashlib.sha256(b"".join(Path(path).read_bytes() for path in self.sources)).hexdigest()
        parts = [self.kernel, dict(sorted(self.facts.items())), self.dtype, source]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


class KernelUse:
    """Kernels of a job's programs: those to avoid, and the cases of those in use, recorded while tracing."""

    def __init__(self, attention: AttentionKernels = "auto"):
        """Avoid nothing yet; `attention` is `memory.attention`."""
        self.attention = attention
        self.avoided: frozenset[str] = frozenset()
        self.cases: dict[str, KernelCase] = {}
        self.slow_forms: dict[str, str] = {}  # by role: the plain XLA ops in place of a kernel, and the reason

    def is_allowed(self, kernel: str) -> bool:
        """Return True unless a kernel must be avoided."""
        return kernel not in self.avoided

    def record(self, case: KernelCase) -> None:
        """Add the case of a kernel that the program being traced uses."""
        self.cases.setdefault(case.digest, case)


_current: contextvars.ContextVar[KernelUse | None] = contextvars.ContextVar("kernel_use", default=None)
_of_process = [KernelUse()]


def get_kernel_use() -> KernelUse:
    """Return the choice of kernels for the program that is being traced.

    Under the rules of a `TrainSetup` it is the choice of that setup; for other programs of a running job, such as those
    of its evaluators, it is the choice of the job.
    """
    return _current.get() or _of_process[0]


def set_kernels_of_process(use: KernelUse) -> None:
    """Set the choice of kernels for programs that are traced outside of the rules of any `TrainSetup`."""
    _of_process[0] = use


@contextlib.contextmanager
def use_kernels(use: KernelUse) -> Iterator[None]:
    """Make a choice of kernels the current one, on this thread."""
    token = _current.set(use)
    try:
        yield
    finally:
        _current.reset(token)


# The check of one case.


def run_case(case: KernelCase) -> str:
    """Run a case on this process's first device; return the problem of the kernel, empty if it passes.

    The case is compiled for that device alone, with the compiler options of the step.
    """
    device = jax.local_devices()[0]
    if device.platform == "gpu" and is_gpu_deterministic(os.environ):
        mark_cudnn_gradients_deterministic()
    # Without this option GPU kernels may add in any order.
    repeats_bits = device.platform != "gpu" or is_gpu_deterministic(os.environ)

    @jax.jit
    def has_same_bits(before: jax.Array, first: Any, again: Any) -> jax.Array:
        def is_same(one: jax.Array, other: jax.Array) -> jax.Array:
            unsigned = jnp.dtype(f"uint{8 * one.dtype.itemsize}")
            return jnp.all(jax.lax.bitcast_convert_type(one, unsigned) == jax.lax.bitcast_convert_type(other, unsigned))

        return functools.reduce(jnp.logical_and, jax.tree.leaves(jax.tree.map(is_same, first, again)), before)

    try:
        trial = case.make_trial()
        with use_sharding_rules(make_mesh({}, [device])), use_kernels(KernelUse()):
            inputs = jax.device_put(trial.inputs, device)
            lowered = jax.jit(trial.kernel).lower(*inputs)
            options: Any = make_compiler_options(device.device_kind, os.environ, lowered.as_text())
            kernel = lowered.compile(compiler_options=options or None)
            first = kernel(*inputs)
            # Compared on the device, and fetched once.
            is_same = jnp.bool_(True)
            for _ in range(REPETITIONS - 1):
                again = kernel(*inputs)
                is_same = has_same_bits(is_same, first, again) if repeats_bits else is_same
        # On the host's CPU, if JAX has that backend: it compiles faster, and is independent of the device under test.
        host = device
        with contextlib.suppress(RuntimeError):
            host = jax.local_devices(backend="cpu")[0]
        with use_sharding_rules(make_mesh({}, [host])), use_kernels(KernelUse()):
            wanted = jax.device_get(jax.jit(trial.reference)(*jax.device_put(trial.inputs, host)))
        tolerance = TOLERANCES[case.dtype]
        if device.platform == "cpu" and case.dtype == "float32":
            tolerance = EXACT_TOLERANCE
        problem = find_difference(jax.device_get(first), wanted, tolerance)
        if not problem and not is_same:
            problem = f"{REPETITIONS} runs with the same inputs gave different bits"
        return problem
    except Exception as error:  # noqa: BLE001 - a compiler or a device may raise anything
        return f"it raised {format_error(error)}"


def find_difference(found: Any, wanted: Any, tolerance: float) -> str:
    """Return a description of the difference from the reference; empty if the results are within the tolerance."""
    leaves, references = jax.tree.leaves(found), jax.tree.leaves(wanted)
    if [leaf.shape for leaf in leaves] != [leaf.shape for leaf in references]:
        return f"its results have shapes {[leaf.shape for leaf in leaves]}"
    for number, (leaf, reference) in enumerate(zip(leaves, references, strict=True)):
        got, want = (np.atleast_2d(np.asarray(x, np.float32)).astype(np.float64) for x in (leaf, reference))
        if not np.isfinite(got).all():
            return f"result {number} has {np.count_nonzero(~np.isfinite(got))} numbers that are not finite"
        norms = np.linalg.norm(want, axis=-1)
        scale = norms + np.sqrt(np.mean(norms**2)) + np.finfo(np.float32).tiny
        error = float(np.max(np.linalg.norm(got - want, axis=-1) / scale))
        # A reference that is not finite is a mismatch as well.
        if not error <= tolerance:
            return f"result {number} has a relative error of {error:.3g}, above {tolerance:g}"
    return ""


def _make_cache_key(case: KernelCase) -> str:
    """Return the name of a case in the host's cache: of its digest, the chip and the versions."""
    device = jax.local_devices()[0]
    parts = [case.digest, device.device_kind, device.client.platform_version, jax.__version__, jax.lib.__version__]
    parts += [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


# The check of a job.


class KernelChecker:
    """Check of the kernels of a job's steps before the first one. All methods are called on every process."""

    def __init__(self, attempt: Attempt):
        self._attempt, self._hosts = attempt, attempt.hosts
        self._cache = LocalStore(default_cache_directory() / _FOLDER)
        # On process 0 the content of the record: the kernels to avoid with the reason, and the starts of open cases.
        self._avoided: dict[str, str] = {}
        self._starts: dict[str, int] = {}

    def check(
        self, uses: Sequence[KernelUse], list_cases: Callable[[], list[KernelCase]], trace: Callable[[], None]
    ) -> None:
        """Replace kernels that fail, in the `uses` of the job's programs, whose cases `list_cases` returns.

        `trace` traces the programs again. Raises `InvalidError` if a kernel fails that the spec demands, and
        `RetryableError` if a case did not end in time on another process.
        """
        if not list_cases():
            return
        started = time.monotonic()
        self._avoided, self._starts = self._hosts.run_on_main(self._read)
        avoided = dict(self._avoided)
        tested: dict[str, KernelCase] = {}
        num_run = 0
        while True:
            if avoided.keys() - uses[0].avoided:
                for use in uses:
                    use.avoided = frozenset(avoided)
                trace()
            cases = {case.digest: case for case in list_cases()}
            if left := {case.kernel for case in cases.values()} & avoided.keys():
                raise RetryableError(f"{', '.join(sorted(left))} failed, and is still in the program that was traced")
            untested = [case for digest, case in sorted(cases.items()) if digest not in tested]
            if not untested:
                break
            # Hosts may have different caches, so each reports the cases that it has to run.
            missing = {case.digest for case in untested if not self.has_passed(case)}
            wanted = {digest for digests in self._hosts.gather(sorted(missing)) for digest in digests}
            for case in untested:
                tested[case.digest] = case
                if case.digest not in wanted or case.kernel in avoided:
                    continue
                num_run += 1
                if reason := self.run_everywhere(case, case.digest in missing):
                    avoided[case.kernel] = reason
        if self._hosts.is_main and self._starts:
            self._starts = {}
            self._write()
        names = sorted({case.kernel for case in cases.values()})
        seconds = round(time.monotonic() - started, 4)
        self._attempt.record("kernels", None, kernels=names, avoided=sorted(avoided), cases=num_run, seconds=seconds)

    def run_everywhere(self, case: KernelCase, is_missing: bool) -> str:
        """Run a case on every process that has not done so before; returns the reason if it fails on one of them."""
        reason = ""
        if self._hosts.is_main:
            # Written before the case begins: if the process crashes, the next start knows during which case.
            self._starts[case.digest] = self._starts.get(case.digest, 0) + 1
            if self._starts[case.digest] > _MOST_STARTS:
                reason = f"the process has ended {_MOST_STARTS} times while it ran"
            self._write()
        reason = self._hosts.agree(reason)
        if not reason:
            seconds = CASE_SECONDS if self._hosts.is_main else CASE_SECONDS + 2 * _SLACK_SECONDS
            timer = threading.Timer(seconds, self._give_up, (case,))
            timer.daemon = True
            timer.start()
            try:
                own = run_case(case) if is_missing else ""
            finally:
                timer.cancel()
            try:
                found = self._hosts.gather(own, CASE_SECONDS + _SLACK_SECONDS)
            except PeerLostError as error:
                if self._hosts.is_main:
                    self._record_failure(case, f"it did not return in time: {error}")
                raise
            failed = [f"process {process}: {each}" for process, each in enumerate(found) if each]
            reason = "; ".join(failed[:2])
            if not own and is_missing:
                # Saves work at the next start. If the disk is full, the next start runs the case again.
                with contextlib.suppress(OSError):
                    self._cache.write(_make_cache_key(case), encode_json({"case": case.digest, "passed": True}))
        if not reason:
            return ""
        if case.is_demanded:
            raise InvalidError(
                f"config.memory.attention=ours: the kernel {case.kernel} fails its test ({reason}); use auto or library"
            )
        if self._hosts.is_main:
            self._record_failure(case, reason)
        return reason

    def _give_up(self, case: KernelCase) -> None:
        """End this process because a case has not returned. Called by the timer's thread."""
        reason = f"it did not return within {CASE_SECONDS:g} s"
        if self._hosts.is_main:
            with contextlib.suppress(Exception):  # the directory may hang too; the start of the case is recorded
                self._record_failure(case, reason)
        end_process(EXIT_RETRYABLE, f"kernel {case.kernel}: {reason}; run the same command again")

    def _record_failure(self, case: KernelCase, reason: str) -> None:
        """Record that a kernel is avoided from now on, and say so once. Process 0 only."""
        self._avoided[case.kernel] = reason
        self._starts.pop(case.digest, None)
        self._write()
        facts = {key: value for key, value in case.facts.items() if value is not None}
        self._attempt.events.append(
            "kernel_fallback", None, kernel=case.kernel, case=case.digest, facts=facts, reason=reason
        )
        self._attempt.events.flush()
        warn(
            f"KERNEL FAILED: {case.kernel} is wrong on this hardware; the run uses {case.fallback} instead, now and "
            f"after restarts (case {case.digest}: {reason})"
        )

    def has_passed(self, case: KernelCase) -> bool:
        """Return True if this host's cache says that a case has passed; anything unexpected there means False."""
        with contextlib.suppress(OSError, ValueError):
            found = parse_json(self._cache.read(_make_cache_key(case)))
            return found.get("passed") is True and found.get("case") == case.digest
        return False

    def _read(self) -> tuple[dict[str, str], dict[str, int]]:
        """Return the content of the record. Process 0 only."""
        store = self._attempt.store
        try:
            content = read_json(store, RECORD)
        except FileNotFoundError:
            return {}, {}
        except ValueError as error:
            content = {"damaged": str(error)}
        avoided, starts = content.get("avoided"), content.get("starts")
        if (
            not isinstance(avoided, dict)
            or not isinstance(starts, dict)
            or not all(isinstance(each, str) for each in avoided.values())
        ):
            # The avoided kernels determine the bits of the run, so a damaged record is an error.
            raise ResumeError(
                f"{store.url}/{RECORD} cannot be read; restore the file, or delete it if no kernel of this run has "
                "failed its test"
            )
        return avoided, {key: value for key, value in starts.items() if isinstance(value, int)}

    def _write(self) -> None:
        """Write the record, or remove it if it is empty. Process 0 only."""
        self._attempt.fence.check()
        if self._avoided or self._starts:
            content = encode_json({"avoided": self._avoided, "starts": self._starts})
            self._attempt.store.write(RECORD, content)
        else:
            self._attempt.store.remove(RECORD)
