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
)


@dataclass(frozen=True)
class Result:
    """What every job's result has."""

    step: int
    fingerprint: str


def read_result(store: Store) -> Result | None:
    """The result of a run, None if there is no whole one. Raises `NewerFormatError`, else as the store does."""
    try:
        record = read_record(store, RESULT, RESULT_KEYS, ["step", "fingerprint"])
    except DamagedError:
        return None
    return None if record is None else Result(record["step"], record["fingerprint"])
