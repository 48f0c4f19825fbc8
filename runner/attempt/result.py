"""`result.json`: what is left of a run that reached its end. Main host only."""

from dataclasses import dataclass

from runner.errors import NewerFormatError
from runner.record import Key, check
from runner.storage import OtherKindError, Store, read_json

RESULT = "result.json"
FORMAT = 1  # of a file that does not say

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
        record = read_json(store, RESULT)
        if record.get("format", FORMAT) != FORMAT:
            raise NewerFormatError(f"{store.url}/{RESULT}: written by a newer runner, in format {record['format']}")
        check(record, RESULT_KEYS, ["step", "fingerprint"])
    except FileNotFoundError:
        return None
    except (NewerFormatError, OtherKindError):
        raise
    except ValueError:
        return None
    return Result(record["step"], record["fingerprint"])
