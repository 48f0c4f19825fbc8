"""`result.json`: what is left of a run that reached its end. Main host only."""

from runner.record import Key

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
