"""RestoreableJob: a job whose whole state is one pytree, and which survives anything. Knows nothing of neural nets.

A subclass says how the state begins (`init`) and advances it in `run`, calling `save_or_stop` after every step. The
base owns the rest: whose directory this is, attempts, restore or init, the save cadence, the notice to stop, clean
ends and the ledger. Everything here is called on every host; what only the main host does says so.
"""

import contextlib
import time
import uuid
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from runner import storage, terminal
from runner.attempt.compile_cache import CompileCache
from runner.attempt.event_log import EventLog
from runner.attempt.fence import Fence
from runner.checkpoint.checkpointer import open_checkpoints
from runner.checkpoint.fingerprint import fingerprint
from runner.checkpoint.interval import best_interval_seconds
from runner.checkpoint.manifest import newest_manifest
from runner.checkpoint.save import raise_unless_committed
from runner.errors import DivergedError, FencedError, InvalidError, PreemptedError, ResumeError, StorageError
from runner.hosts.agreement import Hosts
from runner.hosts.preemption import StopNotice
from runner.hosts.progress import Progress
from runner.hosts.straggler import Straggling
from runner.hosts.watchdog import Watchdog, stacks_of_all_threads
from runner.periodic import is_due, is_overdue
from runner.spec import (
    Document,
    ExecutionSpec,
    JobConfig,
    document_of,
    dump_spec,
    trajectory,
    validate_config,
)

_DRAIN_SECONDS = 10.0


class RestoreableJob:
    """Base of every job. Construct it with a spec, then call it."""

    Config: ClassVar[type[JobConfig]] = JobConfig
    needs_topology: ClassVar[bool] = False

    def __init__(self, spec: ExecutionSpec, document: Document | None = None):
        """Check `spec.config` against `Config`. `document` is where the spec came from, for errors with a line."""
        self.document = document_of(spec) if document is None else document
        self.spec = spec
        self.config: Any = validate_config(self.document, self.Config)
        self.store = self._open("directory", spec.directory)
        is_shared = spec.topology is not None and spec.topology.compile_cache == "directory"
        self.compile_cache = CompileCache(self.store if is_shared else None)
        self.background = storage.BackgroundWriter()
        self.hosts = Hosts.alone()
        self.notice = StopNotice()
        self.progress = Progress()
        self.state: Any = None
        self.step = 0
        self.id = ""
        self.fence = Fence(self.store)
        self._saved_step: int | None = None
        self._has_minded_grace = False
        self._said_interval_seconds = 1e-9
        self._last_save_seconds = time.monotonic()

    # What a job says of itself.

    @property
    def total_steps(self) -> int:
        """The step at which the job is done."""
        raise NotImplementedError

    def setup(self) -> None:
        """Check and prepare what `init` and `run` need, before anything is written. Nothing by default."""

    def prepare(self) -> None:
        """Make ready what takes time and needs this attempt's number, such as compiled code. Nothing by default."""

    def init(self) -> Any:
        """The state at step 0: a pytree of jax arrays, a pure function of the spec."""
        raise NotImplementedError

    def weights(self, state: Any) -> Any:
        """The part of `state` that `checkpoint.init_from` takes from another run, under the names it has there."""
        raise self.document.error("checkpoint.init_from", f"{type(self).__name__} has no weights to take over")

    def with_weights(self, state: Any, weights: Any) -> Any:
        """`state` with its weights replaced by `weights`."""
        raise NotImplementedError

    def abstract_state(self) -> Any:
        """Shape, dtype and sharding of every leaf of the state, by default a copy on every device of the job."""
        copies = NamedSharding(Mesh(np.array(jax.devices()), ("device",)), PartitionSpec())
        shapes = jax.eval_shape(self.init)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=copies), shapes)

    def init_state(self) -> Any:
        """`init`, each leaf born with the sharding that `abstract_state` gives it."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state())
        return jax.jit(self.init, out_shardings=shardings)()

    def run(self) -> None:
        """Advance `state` to `total_steps`: after each step add one to `step` and call `save_or_stop`."""
        raise NotImplementedError

    def identity(self) -> dict[str, Any]:
        """What defines the trajectory, by dotted key: a resumed job must have the same."""
        return trajectory(self.spec, self.config)

    def resolved_spec(self) -> ExecutionSpec:
        """The spec with every default and `auto` filled in, as it is saved."""
        return self.spec.model_copy(update={"config": self.config.model_dump(mode="json")})

    def manifest_record(self) -> dict[str, Any]:
        """What the manifest says besides the arrays."""
        return {"step": self.step, "job": self.id, "identity": self.identity()}

    def result(self) -> dict[str, Any]:
        """The content of `result.json`."""
        return {"step": self.step, "fingerprint": fingerprint(self.state)}

    def metric(self, name: str) -> float | None:
        """The value of a metric at this very step, for `checkpoint.keep_best`; None if it has none."""
        return None

    def companions(self) -> dict[str, bytes]:
        """Small files that a state in the fast tier must have beside it. Nothing by default."""
        return {}

    def before_commit(self) -> None:
        """Make durable what must not be behind a checkpoint. Runs in the background. Nothing by default."""

    # The life of a job.

    @property
    def done(self) -> bool:
        """Whether the job reached its end, now or in an earlier attempt."""
        try:
            return bool(storage.read_json(self.store, "result.json")["step"] >= self.total_steps)
        except (FileNotFoundError, ValueError, KeyError):
            return False

    def __call__(self, hosts: Hosts | None = None, notice: StopNotice | None = None) -> None:
        """Done? Then nothing. Else: barrier, restore or init, `run`, final save, `result.json`, barrier."""
        self.hosts = hosts or self.hosts
        self.notice = notice or self.notice
        deadlines, on_progress = self.spec.deadlines, self._on_progress
        with Watchdog(self.hosts, deadlines, self._on_verdict, self._on_straggler, on_progress) as self.progress:
            self._live()

    def _live(self) -> None:
        if self.hosts.main_first(self.probe_and_ask_if_done):
            self.say(f"{self.spec.name}: done, nothing to do")
            return
        with self.progress.during("set-up"):
            self.setup()
            self.hosts.main_first(self.guard_checkpoints)
            self.begin()
        started = time.monotonic()
        with self.progress.during("compile"):
            self.prepare()
        if self.hosts.is_main:
            seconds = round(time.monotonic() - started, 4)
            self.ledger.append("prepare", None, seconds=seconds, **self.compile_cache.counts())
        with self.progress.during("restore"):
            self.restore_or_init()
        self.progress.arrive(self.step)
        try:
            self.run()
            with self.progress.during("the end"):
                self._finish()
        except DivergedError:
            self.checkpoints.saver.wait()  # what was good may still be on its way to the disk
            raise
        finally:
            self.compile_cache.close(_DRAIN_SECONDS)
            self._flush()

    def _on_verdict(self, verdict: str) -> None:
        """Keep what helps to understand why the job does not go on. Any host, from the watchdog's thread."""
        stacks = f"{verdict}\n\n{stacks_of_all_threads()}"
        if not self._owns_directory():
            terminal.warn(stacks)
            return
        self.ledger.append("stuck", self.progress.step, reason=verdict)
        self.store.write(f"stacks/{self.fence.attempt:06}.{self.hosts.process_id}.txt", stacks.encode())
        self._flush()

    def _on_progress(self, step: int) -> None:
        """How far this attempt has come, for those who ask what a kill has cost. Main host, the watchdog's thread."""
        if self._owns_directory():
            self.ledger.append("progress", step)

    def _owns_directory(self) -> bool:
        """Whether this attempt has claimed the directory, and no newer one has since."""
        try:
            if self.fence.attempt is not None:
                self.fence.glance()
        except FencedError:
            return False
        return self.fence.attempt is not None

    def _on_straggler(self, straggling: Straggling) -> None:
        """Main host only, from the watchdog's thread."""
        late, step, after_seconds = straggling.late, straggling.step, straggling.after_seconds
        self.ledger.append("straggler", step, late=late, after_seconds=after_seconds)
        after = ", ".join(
            f"process {process} came to step {step} {after_seconds[process]:.2f} s after the first" for process in late
        )
        terminal.warn(f"straggler: {after}" if after else "straggler: all processes are in time again")

    def _flush(self) -> None:
        """Let what is still on its way to a bucket arrive, if the bucket is up."""
        self.background.drain(_DRAIN_SECONDS)

    def probe_and_ask_if_done(self) -> bool:
        """Refuse a directory that cannot be written or is another job's; whether the job is done. Main host only."""
        try:
            if self.store.root is None:
                storage.probe(self.store)
            self._guard()
        except InvalidError as error:
            raise error if isinstance(error, ResumeError) else self.document.error("directory", str(error)) from error
        except OSError as error:
            raise StorageError(f"{self.store.url} cannot be reached: {error}") from error
        return self.done

    def _guard(self) -> None:
        """Refuse a directory of another job."""
        try:
            owner = storage.read_json(self.store, "job.json")
        except FileNotFoundError:
            return
        except ValueError as error:
            raise ResumeError(
                f"{self.store.url}/job.json is damaged ({error}): cannot tell whose directory this is"
            ) from error
        if owner.get("name") != self.spec.name:
            raise ResumeError(
                f"{self.store.url} belongs to the job {owner.get('name')!r}, this one is {self.spec.name!r}; "
                "use another directory"
            )
        self._compare(owner.get("identity", {}), trajectory(self.spec, self.config), "this directory's job")

    def guard_checkpoints(self) -> None:
        """Refuse to continue checkpoints of another trajectory. Main host only."""
        manifest = newest_manifest(self.store)
        if manifest is not None:
            self._compare(manifest.get("identity", {}), self.identity(), f"checkpoint {manifest['name']}")

    def _compare(self, saved: dict[str, Any], present: dict[str, Any], owner: str) -> None:
        """Raise `ResumeError` with a line for each key that would change the trajectory."""
        missing = object()
        keys = [key for key in saved | present if saved.get(key, missing) != present.get(key, missing)]
        if keys:
            lines = [
                self.document.line(
                    tuple(key.split(".")), f"{owner} has {saved.get(key)!r}, the spec {present.get(key)!r}"
                )
                for key in keys
            ]
            raise ResumeError(
                "\n".join(lines) + f"\n{self.store.url}: this would be another trajectory; use another directory"
            )

    def begin(self) -> None:
        """Claim the next attempt; from here on every earlier attempt is fenced."""
        self.fence = Fence(self.store)
        self.hosts.main_first(self._claim)
        self.fence.attempt, self.id = self.hosts.agree([self.fence.attempt, self.id])
        assert self.fence.attempt is not None
        process = self.hosts.process_id
        log = storage.open_log(self.store, "events", f"{self.fence.attempt:06}.{process}", self.background)
        self.ledger = EventLog(log, self.fence.attempt, process)
        self.notice.on_idle_exit = self._record_idle_exit
        try:
            self.checkpoints = open_checkpoints(
                self.spec.checkpoint,
                self.store,
                self.hosts,
                self.fence,
                self.ledger,
                job_id=self.id,
                before_commit=self.before_commit,
                abstract=self.abstract_state(),
            )
        except InvalidError as error:
            raise self.document.error("checkpoint.local_directory", str(error)) from error
        if self.hosts.is_main:
            devices = jax.devices()
            self.ledger.append(
                "start",
                None,
                processes=self.hosts.num_processes,
                devices=len(devices),
                device_kind=devices[0].device_kind,
            )
        self.compile_cache.publish(self.fence.check, process)
        self.say(f"{self.spec.name}: attempt {self.fence.attempt} in {self.store.url}")

    def _record_idle_exit(self) -> None:
        self.ledger.append("preempt", self.step, saved=False)
        self._flush()

    def _claim(self) -> None:
        owner = {"id": uuid.uuid4().hex[:12], "name": self.spec.name, "time": time.time()}
        owner |= {"identity": trajectory(self.spec, self.config)}
        try:
            with contextlib.suppress(FileExistsError):
                storage.create(self.store, "job.json", storage.encode_json(owner))
            self.id = storage.read_json(self.store, "job.json")["id"]
            self.fence.claim()
        except (PermissionError, NotADirectoryError) as error:
            raise self.document.error("directory", f"cannot be written: {error}") from error
        except OSError as error:
            raise StorageError(f"{self.store.url} cannot be written: {error}") from error

    def restore_or_init(self) -> None:
        """Take up the newest good checkpoint, or begin at step 0, and save the resolved spec."""
        started = time.monotonic()
        found = self.checkpoints.restorer.restore(self.abstract_state(), self.identity())
        if found is None:
            self.state = self.init_state()
            event, details = "init", {}
            if self.spec.checkpoint.init_from is not None:
                self._take_weights(self.spec.checkpoint.init_from)
        else:
            self.state, manifest = found
            self.step = manifest["step"]
            self._mind_grace(manifest.get("seconds", 0.0))
            if self.checkpoints.restorer.tier == "durable":
                self._saved_step = self.step
            event, details = "restore", {"tier": self.checkpoints.restorer.tier}
            self.say(f"restored step {self.step} from the {self.checkpoints.restorer.tier} tier")
        digest = fingerprint(self.state)
        if self.hosts.is_main:
            seconds = round(time.monotonic() - started, 4)
            self.ledger.append(event, self.step, seconds=seconds, fingerprint=digest, **details)
            self.store.write("spec.yaml", dump_spec(self.resolved_spec()).encode())
            self.checkpoints.retention.look()
        self._last_save_seconds = time.monotonic()

    def _open(self, key: str, text: str) -> storage.Store:
        try:
            return storage.open_store(text)
        except InvalidError as error:
            raise self.document.error(key, str(error)) from error

    def _take_weights(self, source: str) -> None:
        directory, name = storage.split_checkpoint(source)
        abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), self.weights(self.state)
        )
        store = self._open("checkpoint.init_from", directory)
        weights, manifest = self.checkpoints.restorer.restore_weights(store, name, abstract)
        self.state = self.with_weights(self.state, weights)
        self.say(f"weights of step {manifest['step']} taken from {source}")

    def _finish(self) -> None:
        self.save()
        raise_unless_committed(self.checkpoints.saver.wait(), self.step)
        result = self.result()
        if self.hosts.is_main:
            self.fence.check()
            self.store.write("result.json", storage.encode_json(result))
            self.ledger.append("done", self.step, fingerprint=result["fingerprint"])
        self.hosts.barrier()
        self.checkpoints.saver.close()
        self.say(f"{self.spec.name}: done at step {self.step}, fingerprint {result['fingerprint']}")

    # What a job calls.

    def save_or_stop(self) -> None:
        """After a step: save if it is time, and if the job was asked to stop, save and raise `PreemptedError`."""
        self.progress.arrive(self.step)
        stopping = self.notice.poll()
        self.checkpoints.saver.raise_if_hopeless()
        if stopping:
            self.save()
            with self.progress.during("save"):
                committed = self.checkpoints.saver.wait()
            raise_unless_committed(committed, self.step)
            if self.hosts.is_main:
                self.ledger.append("preempt", self.step, saved=True)
            self.hosts.barrier()
            raise PreemptedError(f"stopped as asked; step {self.step} is saved; run the same command again")
        if self._is_save_due():
            self._save(str(self.step), must=self.step == self.total_steps)
        elif is_due(self.step, self.spec.checkpoint.local_every_steps):
            self._save(str(self.step), durable=False)

    def _is_save_due(self) -> bool:
        checkpoint = self.spec.checkpoint
        every_steps = checkpoint.every_steps if checkpoint.every is None else None
        if is_due(self.step, every_steps, self.total_steps):
            return True
        every_minutes = checkpoint.every_minutes if checkpoint.every is None else self._best_interval_minutes()
        if every_minutes is None or not is_due(self.step, self.spec.logging.every_steps):
            return False
        # Clocks differ between hosts, so host 0's alone decides.
        return bool(self.hosts.agree(is_overdue(time.monotonic(), self._last_save_seconds, every_minutes)))

    def _best_interval_minutes(self) -> float:
        """The interval of `every: auto`; none before the first save, which measures what one costs."""
        saver, hours = self.checkpoints.saver, self.spec.checkpoint.mean_time_between_failures_hours
        stall_seconds = saver.stall_seconds
        if stall_seconds is None:
            return 0.0
        seconds = best_interval_seconds(stall_seconds, saver.durable_seconds, hours)
        if not 0.5 < seconds / self._said_interval_seconds < 2:
            self._said_interval_seconds = seconds
            self.say(
                f"checkpoint.every: auto: every {seconds:.1f} s, for a save that stalls {stall_seconds:.3f} s "
                f"and {hours:g} hours between failures"
            )
            if self.hosts.is_main:
                self.ledger.append("cadence", self.step, seconds=round(seconds, 3), stall_seconds=stall_seconds)
        return seconds / 60

    def save(self, suffix: str | None = None) -> None:
        """Begin to save the state as `checkpoints/<suffix>`, by default the step; durable once committed.

        Only steps are resumed from and retained by count; a checkpoint of another name is kept until deleted by hand.
        """
        if suffix is not None or self._saved_step != self.step:
            self._save(suffix or str(self.step), must=True)

    def _save(self, name: str, *, durable: bool = True, must: bool = False) -> None:
        self.check_state()
        best = self.spec.checkpoint.keep_best
        record = self.manifest_record() | ({} if best is None else {"metric": self.metric(best.metric)})
        fast = self.checkpoints.has_fast_tier and name == str(self.step)
        companions = self.companions() if fast and self.hosts.is_main else {}
        saver = self.checkpoints.saver
        with self.progress.during("save"):
            begun = saver.save(name, self.state, record, durable=durable, fast=fast, companions=companions, must=must)
            if begun or fast:
                self.state = saver.unshare(self.state)
        self._mind_grace(saver.durable_seconds)
        if durable and begun:
            self._last_save_seconds = time.monotonic()
            if name == str(self.step):
                self._saved_step = self.step

    def _mind_grace(self, save_seconds: float) -> None:
        """Say it, once, if a save takes longer than the engine gives after SIGTERM."""
        grace_seconds = self.spec.checkpoint.grace_seconds
        if grace_seconds is None or save_seconds <= grace_seconds or self._has_minded_grace:
            return
        self._has_minded_grace = True
        reason = (
            f"a save takes {save_seconds:.1f} s, checkpoint.grace_seconds is {grace_seconds:g}: a preemption may cost "
            "up to a save interval; give more grace, or add a fast tier (checkpoint.local_directory)"
        )
        if self.hosts.is_main:
            terminal.warn(reason)
            self.ledger.append("grace", self.step, reason=reason)

    def check_state(self) -> None:
        """Raise `DivergedError` if the state must not be saved. Nothing by default."""

    def load(self, suffix: str) -> None:
        """Replace the state and the step by those of `checkpoints/<suffix>`. Raises `ResumeError` if it is not good."""
        self.state, manifest = self.checkpoints.restorer.load(suffix, self.abstract_state())
        self.step = manifest["step"]

    def say(self, line: str) -> None:
        """Print a line, on the main host only."""
        if self.hosts.is_main:
            terminal.say(line)
