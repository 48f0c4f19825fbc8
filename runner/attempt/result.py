"""`result.json`: what is left of a run that reached its end. Main host only."""

from dataclasses import dataclass

from runner.attempt.layout import DamagedError, read_record
from runner.record import Key
from runner.storage import Store

RESULT = "result.json"

RESULT_KEYS = (
    Key("step", int, "Optimizer steps completed."),
    Key(
        "fingerprint",
        str,
        "Digest of the whole state's bits, 32 hexadecimal digits; the same on any topology.",
    ),
    Key("tokens", int, "Tokens consumed since step 0; trainers only.", "tokens"),
    Key("train_loss", float | None, "`train/loss` of the last row of metrics; trainers only.", "nats"),
    Key(
        "val_loss",
        float | None,
        "`val/loss` of that row, null where nothing is kept out for validation; trainers only.",
        "nats",
    ),
    Key("stopped_by", str, "Name of the hook that has ended the run before its last step; absent where none has."),
    Key("stopped_because", str, "What that hook has given as its reason."),
    Key("stopped_rule", int, "32 bits of that hook, its class and its config: with the same ones the run is done."),
    Key("best_step", int | None, "The best step by `checkpoint.keep_best`; with the hook BestAtEnd."),
    Key("best_value", float | None, "The metric of that step, rounded to 32 bits; with the hook BestAtEnd."),
    Key("<name>", str | float | int | None, "What `on_end` of any other hook has returned under this name."),
)


@dataclass(frozen=True)
class Result:
    """What every job's result has, and of one that a hook has ended, which hook and why."""

    step: int
    fingerprint: str
    stopped_by: str | None = None
    stopped_because: str | None = None
    stopped_rule: int | None = None

    @property
    def stop_line(self) -> str | None:
        """Which hook has ended the run, and why; None if none has."""
        return None if self.stopped_by is None else f"stopped by {self.stopped_by}: {self.stopped_because}"


def read_result(store: Store) -> Result | None:
    """The result of a run, None if there is no whole one. Raises `NewerFormatError`, else as the store does."""
    try:
        record = read_record(store, RESULT, RESULT_KEYS, ["step", "fingerprint"])
    except DamagedError:
        return None
    if record is None:
        return None
    stopped = {key: record.get(key) for key in ("stopped_by", "stopped_because", "stopped_rule")}
    return Result(record["step"], record["fingerprint"], **stopped)
