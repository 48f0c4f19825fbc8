"""Events of the ledger `events.jsonl`, the history of a run written by all processes of all attempts.

`EVENTS` lists every event name that is ever written, with its details and its writer. `.github/docs/reference` is
generated from it. Imports no jax.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from runner.attempts.environment import ENVIRONMENT_KEYS, MACHINE_KEYS
from runner.console import warn
from runner.storage import JsonlLog, JsonObject, Key

LINEAGE_KEYS = (
    Key("run", str, "Directory or URL of the parent at that time."),
    Key("id", str, "Id of the parent."),
    Key("step", int, "Step of the parent's checkpoint."),
    Key("fingerprint", str, "Fingerprint of that checkpoint, and so of the state with which the fork began."),
    Key("changes", dict, "Dotted key -> [value in the parent, value in the fork], null where there is none."),
)

EVENT_KEYS = (
    Key("time", float, "When the event was written, by the clock of the writing host.", "Unix seconds"),
    Key("attempt", int, "Number of the attempt, from 1; the same on all processes of one start."),
    Key("process", int, "Process that wrote the event."),
    Key("event", str, "Name of the event, see below."),
    Key("step", int | None, "Completed optimizer steps; null if there is no state yet."),
)
_SECONDS = Key("seconds", float, "How long it took.", "s")
_FINGERPRINT = Key("fingerprint", str, "Digest of the bits of the whole state, 32 hexadecimal digits.")
_REASON = Key("reason", str, "Reason in one line.")


@dataclass(frozen=True)
class EventType:
    """Meaning of one event name: the value of the key `event`, its details besides `EVENT_KEYS`, and its writer."""

    name: str
    meaning: str
    details: tuple[Key, ...] = ()
    writer: Literal["process 0", "any process"] = "process 0"


ROLL_BACK_KEYS = (
    Key("number", int, "Number of the roll-back in the run, from 1."),
    Key("batches", int, "Number of skipped global batches."),
    Key("first", int, "First step of the spike."),
    Key("detected", int, "Step whose loss triggered the roll-back."),
    _REASON,
)
# The record of each roll-back, a file of its own: see `runner.train.features.stability`.
ROLL_BACK_FOLDER = "roll_backs"  # also the key of the trajectory in a manifest
ROLL_BACKS_MAX = 16  # the train state has room for the skipped range of each

# In the order in which a run writes them: start, restore, saves, training, evaluation, end.
EVENTS = (
    EventType(
        "start",
        "An attempt has claimed the directory.",
        (
            Key("began", float, "Creation of process 0.", "Unix seconds"),
            Key("submitted", float, "When the job was submitted, if RUNNER_SUBMITTED is set.", "Unix seconds"),
            Key("total_steps", int, "Step at which the job is done."),
            Key("processes", int, "Processes of the job."),
            Key("devices", int, "Devices of the job, over all processes."),
            Key("device_kind", str, "JAX's name for the devices."),
            *ENVIRONMENT_KEYS,
            *MACHINE_KEYS,
        ),
    ),
    EventType(
        "grow",
        "All hosts that were missing at the start wait to join. The run stops at this save and restarts with them.",
        (Key("processes", int, "Processes that are missing."),),
    ),
    EventType(
        "changed",
        "Versions, CPUs, commit or hosts, or the program of the train step, differ from those with which the restored "
        "checkpoint was saved.",
        (
            Key("changes", list, "The differences, a few words each."),
            Key("program", list, "Digest of the recorded program and of the present one; absent if they are equal."),
            Key("expected", bool, "True if spec or hardware differ, so that the program of the same code does too."),
        ),
    ),
    EventType(
        "moved",
        "The data or a class have been moved to another path since the restored checkpoint was saved.",
        (Key("changes", list, "Key, former and present value of each, as text."),),
    ),
    EventType(
        "spec_changed",
        "Keys of the spec that change no step before this one have other values than in the restored checkpoint.",
        (Key("changes", list, "Key, former and present value of each, as text."),),
    ),
    EventType(
        "compile",
        "The train step is compiled; trainers only.",
        (
            Key("program", str, "Digest of the program (StableHLO); `plan` prints the same one on the same mesh."),
            Key("facts", dict, "Values besides the code on which it depends: sections of the spec, mesh, versions."),
            Key("micro_batch_examples", int, "Micro-batch size per device."),
            Key("compiler_options", dict, "XLA options of the chip from the catalogue; absent if it has none."),
            Key(
                "language_model",
                bool,
                "False if the model returns no logits over the ids of the data, so that its loss is in no known unit; "
                "absent otherwise.",
            ),
        ),
    ),
    EventType(
        "stage",
        "A stage of the config has begun: the step after this one is the first that it makes in this attempt.",
        (
            Key("number", int, "Number of the stage; 0 is the config before the first stage."),
            Key("from_step", int, "Step at which the stage begins."),
            Key("why", str, "Reason that the spec gives; empty if it gives none."),
            Key("program", str, "As in `compile`."),
            Key("micro_batch_examples", int, "As in `compile`."),
        ),
    ),
    EventType(
        "kernels",
        "The kernels of the train step have passed their tests, now or earlier; absent if it has none, as on CPUs.",
        (
            Key("kernels", list, "Names of the kernels in use."),
            Key("avoided", list, "Names of the kernels that have failed in this run, and are avoided."),
            Key("cases", int, "Cases that were run now; the others are in the hosts' caches."),
            _SECONDS,
        ),
    ),
    EventType(
        "kernel_fallback",
        "A kernel has failed its test on this hardware; from now on the run uses another one.",
        (
            Key("kernel", str, "Name of the kernel."),
            Key("case", str, "Digest of the case: the kernel's name, its source, and `facts`."),
            Key("facts", dict, "Dtypes, widths, blocks and masks of the case."),
            _REASON,
        ),
    ),
    EventType(
        "prepare",
        "Everything that is needed before the state is restored is compiled.",
        (
            _SECONDS,
            Key("compiled", int, "Programs compiled so far; absent if JAX_COMPILATION_CACHE_DIR is set."),
            Key("from_cache", int, "Programs loaded from a cache so far; absent if JAX_COMPILATION_CACHE_DIR is set."),
        ),
    ),
    EventType(
        "restore",
        "The state was restored from a checkpoint, and its fingerprint was verified.",
        (
            _SECONDS,
            _FINGERPRINT,
            Key("tier", str, "Source of the state: `durable`, or `fast` (`checkpoint.local_directory`)."),
            Key(
                "from_replicas",
                list | None,
                "Processes whose part of the fast tier, or a file of it, came from a replica.",
            ),
        ),
    ),
    EventType(
        "fork",
        "The state was taken from a checkpoint of another run, the parent; the run's own first save of it follows.",
        (_SECONDS, *(key for key in LINEAGE_KEYS if key.name != "step")),
    ),
    EventType("init", "The state was initialized at step 0.", (_SECONDS, _FINGERPRINT)),
    EventType(
        "load",
        "The running job has loaded a checkpoint; `step` is its step. Later rows and checkpoints were set aside.",
        (Key("name", str, "Name of the checkpoint."), Key("before", int, "Step before.")),
    ),
    EventType(
        "device_fault",
        "A GPU has failed, or the gradients of `step` differ when they are computed again; the run ends with 76.",
        (
            Key("devices", list, "Ids of devices that include the defective one."),
            Key("processes", list, "Processes of these devices."),
            Key("hosts", list, "Host names of these processes."),
            Key("reason", str, "Error of the GPU, if it has failed."),
            Key("parameters", list, "Names of the parameters whose gradients differ."),
            Key("verified", int, "Last step that was verified before; checkpoints of later ones are quarantined."),
        ),
    ),
    EventType(
        "roll_back",
        "The run is rolled back because of a spike: after `step`, data are skipped. The event `load` follows, or "
        "after a kill `restore`; trainers only.",
        ROLL_BACK_KEYS,
    ),
    EventType(
        "roll_back_withdrawn",
        "A roll-back no longer follows from the spec, which was changed, before the run has passed `step`, after which "
        "it would skip data; trainers only.",
        (Key("number", int, "Number of the roll-back."), Key("batches", int, "Batches that are not skipped.")),
    ),
    EventType(
        "save",
        "A save has begun.",
        (
            Key("blocked_seconds", float, "How long the save blocked training.", "s"),
            Key(
                "clock",
                dict,
                "Seconds of this attempt by time category when `step` was completed, see .github/docs/status.md.",
                "s",
            ),
            Key("tier", str, "`fast` if only the fast tier saves; otherwise absent."),
        ),
    ),
    EventType(
        "commit",
        "The save is durable: from now on a restart resumes at this step or a later one.",
        (
            _FINGERPRINT,
            Key("seconds_to_durable", float, "Time since the save began.", "s"),
            Key("bytes", int, "Size of all files of the checkpoint.", "bytes"),
            Key("read_back", bool, "True if its bits were compared with those on the devices, as in a first save."),
            Key("tier", str, "`fast` for the fast tier, without fingerprint and bytes; otherwise absent."),
        ),
    ),
    EventType(
        "save_failed",
        "A save could not be made durable. Training continues, and the next save is tried.",
        (_REASON, Key("tier", str, "`fast` for the fast tier; otherwise absent, and process 0 is the writer.")),
        writer="any process",
    ),
    EventType(
        "fast_tier_off", "The fast tier cannot be used on some host, and this attempt continues without it.", (_REASON,)
    ),
    EventType(
        "save_left_out", "A save to a bucket was skipped, because an earlier one is still being uploaded.", (_REASON,)
    ),
    EventType(
        "fallback",
        "A checkpoint was rejected at the restore; `step` is the one restored instead, null if there is none.",
        (Key("rejected", int, "Step of the rejected checkpoint."), _REASON, Key("tier", str, "`durable` or `fast`.")),
    ),
    EventType(
        "quarantine",
        "A committed checkpoint was moved to `quarantine/`: it failed its verification, or the job has gone back to "
        "an earlier step.",
        (_REASON, Key("moved_to", str, "New path of the checkpoint.")),
    ),
    EventType(
        "corruption",
        "Devices that hold replicas of the same shard differ. The save is refused, and the run ends with exit code 76.",
        (
            _REASON,
            Key("devices", list, "Ids of the devices that differ from most; of all replicas if there is no majority."),
            Key("processes", list, "Processes of these devices."),
        ),
        writer="any process",
    ),
    EventType(
        "cadence",
        "Save interval chosen by `checkpoint.every: auto`; written when first known and after every change by a factor "
        "of two.",
        (
            Key("seconds", float, "Interval between saves.", "s"),
            Key("stall_seconds", float, "How long the last save blocked training.", "s"),
        ),
    ),
    EventType("grace", "A save took longer than `checkpoint.grace_seconds`; written once per attempt.", (_REASON,)),
    EventType("progress", "Last completed step, written periodically, so that the cost of a kill can be computed."),
    EventType(
        "straggler",
        "The set of processes that completed their steps late, twice in a row, has changed.",
        (
            Key("late", list, "Straggling processes; empty if all are on time again."),
            Key("after_seconds", list, "Arrival of every process at `step`, after the first one.", "s"),
        ),
    ),
    EventType(
        "profile",
        "The steps after `start` up to `step` were profiled; trainers only.",
        (
            Key("start", int, "Completed steps at the start of the trace."),
            Key("path", str, "Path of the profile in the directory."),
        ),
    ),
    EventType(
        "sink_off",
        "A metric writer failed or hangs, and gets no more rows in this attempt. The run continues.",
        (Key("sink", str, "`tensorboard` or `wandb`."), _REASON),
    ),
    EventType(
        "stop",
        "A hook ends the run at `step`. The event may repeat for a step that is lost to a kill.",
        (Key("hook", str, "Name of the hook."), _REASON),
    ),
    EventType(
        "slow_hook",
        "A hook took longer than a second and ten steps; written once per attempt for each of its methods.",
        (Key("hook", str, "Name and method of the hook."), Key("seconds", float, "How long it took.", "s")),
    ),
    EventType(
        "stuck",
        "The job is stalled and ends with exit code 76. Written by at most 8 processes, with the stacks of their "
        "threads in `stacks/`.",
        (
            _REASON,
            Key("lost", list, "Processes that have died, or do not respond."),
            Key(
                "late", list, "If none is lost: processes past a deadline that are behind others, which wait for them."
            ),
        ),
        writer="any process",
    ),
    EventType(
        "evaluate",
        "The weights were evaluated; trainers only.",
        (
            Key(
                "figures",
                dict,
                "Results that were added to the row of `step`, such as `val/loss`; without texts and lists.",
            ),
        ),
    ),
    EventType(
        "evaluation_problem",
        "An evaluator raised an error, or returned results that a row cannot hold. The run continues; trainers only.",
        (Key("evaluator", str, "Name or class of the evaluator."), _REASON),
    ),
    EventType(
        "failed",
        "An attempt ends with an error. A process that was killed (kill -9) writes nothing.",
        (
            _REASON,
            Key("code", int, "Exit code of this process."),
            Key("diverged", bool, "True if training diverged; absent otherwise."),
        ),
        writer="any process",
    ),
    EventType(
        "preempt",
        "The job stops because a stop was requested.",
        (Key("saved", bool, "True if `step` is committed (written by process 0); false before the first step."),),
        writer="any process",
    ),
    EventType(
        "done",
        "The job has reached its end, and `result.json` is written.",
        (_FINGERPRINT, Key("spec", str, "Digest of the spec as it was given, with its overrides.")),
    ),
)


class EventLog:
    """Append-only log of the events of one process, readable while the job runs.

    Each of `readers` is called with each event, its details included.
    """

    def __init__(
        self,
        log: JsonlLog,
        attempt: int,
        process: int,
        readers: Sequence[Callable[[JsonObject], None]] = (),
    ):
        self._log, self._readers = log, readers
        self._attempt = attempt
        self._process = process

    def append(self, event: str, step: int | None, **details: Any) -> None:
        """Record one event at `step` completed steps. A full disk causes a warning, and the run continues."""
        # The common keys come first in each line, which makes the ledger readable with `grep`.
        row = {"time": time.time(), "attempt": self._attempt, "process": self._process, "event": event, "step": step}
        row |= details
        try:
            self._log.append(row)
        except OSError as error:
            warn(f"the ledger cannot be written ({error}): {event} at step {step} {details}")
        for read in self._readers:
            read(row)

    def flush(self) -> None:
        """Make the events of all processes durable. A disk that fails causes a warning, and the run continues."""
        try:
            self._log.flush()
        except FileNotFoundError:
            pass  # someone has deleted the ledger; the next event creates it again
        except OSError as error:
            warn(f"the ledger cannot be flushed ({error})")
