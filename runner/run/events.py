"""The events of the ledger `events.jsonl`: every name that is ever written, with its details and its writer.

The ledger `events.jsonl`: what happened to a run, by all hosts of all attempts.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from runner.console import warn
from runner.records import Key
from runner.run.environment import ENVIRONMENT_KEYS
from runner.storage import JsonlLog, JsonObject

Writer = Literal["main host", "any host"]

EVENT_KEYS = (
    Key("time", float, "When, by the clock of the host that writes.", "Unix seconds"),
    Key("attempt", int, "Number of the start, from 1; all hosts of one start have the same."),
    Key("process", int, "Number of the process that writes; 0 is the main host."),
    Key("event", str, "Name of the event, see below."),
    Key("step", int | None, "Optimizer steps completed; null where there is no state yet."),
)


@dataclass(frozen=True)
class EventType:
    """What one name in the ledger means, who writes it, and its keys besides `EVENT_KEYS`."""

    name: str
    meaning: str
    writer: Writer
    details: tuple[Key, ...] = ()


_SECONDS = Key("seconds", float, "How long it took.", "s")
_FINGERPRINT = Key("fingerprint", str, "Digest of the whole state's bits, 32 hexadecimal digits.")
_REASON = Key("reason", str, "Why, in a line for people.")

EVENTS = (
    EventType(
        "start",
        "An attempt has claimed the directory.",
        "main host",
        (
            Key("began", float, "When process 0 was created.", "Unix seconds"),
            Key("submitted", float, "When the engine was asked for it, if RUNNER_SUBMITTED says.", "Unix seconds"),
            Key("total_steps", int, "Step at which the job is done."),
            Key("processes", int, "Processes of the job."),
            Key("devices", int, "Devices of the job, over all processes."),
            Key("device_kind", str, "What JAX calls the devices."),
            *ENVIRONMENT_KEYS,
        ),
    ),
    EventType(
        "changed",
        "Versions, CPUs, commit or hosts are not those that the restored checkpoint was saved with.",
        "main host",
        (Key("changes", list, "A few words for each, for people."),),
    ),
    EventType(
        "compile",
        "The train step is compiled; trainers only.",
        "main host",
        (
            Key("program", str, "Digest of the program (StableHLO); `plan` prints the same on the same mesh."),
            Key("micro_batch_examples", int, "Examples that a device holds at once."),
            Key("compiler_options", dict, "XLA's, of the chip in the catalogue; absent where it has none."),
        ),
    ),
    EventType(
        "prepare",
        "All is compiled that is needed before a state.",
        "main host",
        (
            _SECONDS,
            Key("compiled", int, "Programs compiled so far; absent where JAX_COMPILATION_CACHE_DIR is set."),
            Key("from_cache", int, "Programs found in a cache so far; absent likewise."),
        ),
    ),
    EventType(
        "restore",
        "The state is that of a checkpoint, and its bits were checked.",
        "main host",
        (
            _SECONDS,
            _FINGERPRINT,
            Key("tier", str, "Where it was restored from: `durable`, or `fast` (`checkpoint.local_directory`)."),
        ),
    ),
    EventType("init", "The state is a new one, at step 0.", "main host", (_SECONDS, _FINGERPRINT)),
    EventType(
        "save",
        "A save has begun.",
        "main host",
        (
            Key("blocked_seconds", float, "How long training stood still for it.", "s"),
            Key(
                "clock",
                dict,
                "Seconds of this attempt by bucket when `step` was completed, see runner/history/README.md.",
                "s",
            ),
            Key("tier", str, "`fast` if only the fast tier saves; else absent."),
        ),
    ),
    EventType(
        "commit",
        "The save is durable: from here on a restart resumes at this step or a later one.",
        "main host",
        (
            _FINGERPRINT,
            Key("seconds_to_durable", float, "From the begin of the save.", "s"),
            Key("bytes", int, "Of all files of the checkpoint.", "bytes"),
            Key("read_back", bool, "True if its bits were read back and compared, as those of a run's first are."),
            Key("tier", str, "`fast` in the fast tier, and then neither fingerprint nor bytes; else absent."),
        ),
    ),
    EventType(
        "save_failed",
        "The save could not be made durable. Training goes on, and the next save is tried.",
        "any host",
        (_REASON, Key("tier", str, "`fast` in the fast tier; else absent, and the main host writes.")),
    ),
    EventType(
        "save_left_out",
        "In a bucket: no save was begun, since an earlier one is still on its way.",
        "main host",
        (_REASON,),
    ),
    EventType(
        "fallback",
        "A checkpoint was not restored; `step` is the one that was, null if none.",
        "main host",
        (
            Key("rejected", int, "Step of the checkpoint that was not good."),
            _REASON,
            Key("tier", str, "`durable` or `fast`."),
        ),
    ),
    EventType(
        "quarantine",
        "A committed checkpoint failed its check and was moved away.",
        "main host",
        (_REASON, Key("moved_to", str, "Where it is now.")),
    ),
    EventType(
        "corruption",
        "Devices that hold copies of the same shard do not agree; the save is refused, the run ends with 76.",
        "any host",
        (_REASON,),
    ),
    EventType(
        "cadence",
        "With `checkpoint.every: auto`: the interval chosen, when first known and whenever it has changed twofold.",
        "main host",
        (
            Key("seconds", float, "The interval between saves.", "s"),
            Key("stall_seconds", float, "How long the last save stopped training.", "s"),
        ),
    ),
    EventType(
        "grace", "A save takes longer than `checkpoint.grace_seconds`; once an attempt.", "main host", (_REASON,)
    ),
    EventType(
        "progress", "How far this attempt has come, from time to time: what a kill has cost is told by it.", "main host"
    ),
    EventType(
        "straggler",
        "Other processes than before come late to their steps, twice in a row.",
        "main host",
        (
            Key("late", list, "Their numbers; none if all are in time again."),
            Key("after_seconds", list, "Arrival of every process at `step`, after the first.", "s"),
        ),
    ),
    EventType(
        "profile",
        "Steps were recorded: those after `start` up to `step`; trainers only.",
        "main host",
        (
            Key("start", int, "Steps that were completed when the trace began."),
            Key("path", str, "Where it is in the directory."),
        ),
    ),
    EventType(
        "sink_off",
        "Something that shows rows has failed or hangs, and gets no more of them in this attempt; the run goes on.",
        "main host",
        (Key("sink", str, "`tensorboard` or `wandb`."), _REASON),
    ),
    EventType(
        "stop",
        "A hook ends the run: `step` is its last. A step that is lost to a kill may have it once more.",
        "main host",
        (Key("hook", str, "Its name."), _REASON),
    ),
    EventType(
        "slow_hook",
        "A hook has taken longer than a second and ten steps; once an attempt for each of its methods.",
        "main host",
        (Key("hook", str, "Its name and method."), Key("seconds", float, "How long.", "s")),
    ),
    EventType(
        "stuck", "The job does not go on, and ends with 76; the stacks are in `stacks/`.", "any host", (_REASON,)
    ),
    EventType(
        "evaluate",
        "The weights were evaluated; trainers only.",
        "main host",
        (Key("figures", dict, "What the row of `step` has of it: `val/loss` and its like, without texts and lists."),),
    ),
    EventType(
        "evaluation_problem",
        "An evaluator raised, or its figures cannot stand in the row as they are; the run goes on; trainers only.",
        "main host",
        (Key("evaluator", str, "Its name, or its class."), _REASON),
    ),
    EventType(
        "failed",
        "An attempt ends with an error. A crash that no code could answer, such as kill -9, leaves nothing.",
        "any host",
        (_REASON, Key("code", int, "The exit code of this process.")),
    ),
    EventType(
        "preempt",
        "The job stops as asked.",
        "any host",
        (Key("saved", bool, "True if `step` is committed (the main host writes); false before the first step."),),
    ),
    EventType("done", "The job has reached its end, and `result.json` is written.", "main host", (_FINGERPRINT,)),
)


class EventLog:
    """Append-only record of what happened, readable while the job runs. Any host may append.

    `on_append` is told each event, step and details too.
    """

    def __init__(
        self,
        log: JsonlLog,
        attempt: int,
        process: int,
        on_append: Callable[[str, int | None, JsonObject], None] = lambda event, step, details: None,
    ):
        self._log, self._on_append = log, on_append
        self._attempt = attempt
        self._process = process

    def append(self, event: str, step: int | None, **details: Any) -> None:
        """Record one event at `step` completed steps. A disk that is full costs the record, not the run."""
        row = {"time": time.time(), "attempt": self._attempt, "process": self._process, "event": event, "step": step}
        try:
            self._log.append(row | details)
        except OSError as error:
            warn(f"the ledger cannot be written ({error}): {event} at step {step} {details}")
        self._on_append(event, step, details)
