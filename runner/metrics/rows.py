"""A row of `metrics.jsonl`: what one logged step says of itself.

Rows as the lines of a file: which survive a restart, and what the fast tier keeps of them. Does no I/O.

A tail is the newest rows, those that may not be durable yet, as the fast tier keeps them beside a state: a line
`{"after": step of the row before them, "rows": how many}`, then the rows. Without that line, as an earlier version
wrote it, it holds all rows.

`metrics.jsonl` as CSV: a column a key, in the order in which they first come; an empty field where a row has none.

Numbers are written at full precision. What bounds the memory: the rows as encoded lines.
"""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

from runner.console import escape_unprintable
from runner.records import Key
from runner.storage import encode_line

Row = dict[str, Any]

ROW_KEYS = (
    Key("step", int, "Optimizer steps completed."),
    Key(
        "train/loss",
        float,
        "Mean cross entropy over the real target tokens of the global batch of this step alone: not a mean over the "
        "steps since the row before.",
        "nats",
    ),
    Key(
        "train/loss_mean",
        float,
        "Mean of it over the steps since the row before, each by its real target tokens; absent in the first row after "
        "a resume from a checkpoint that an earlier runner saved between two rows.",
        "nats",
    ),
    Key(
        "train/grad_norm",
        float,
        "Global norm of the gradient of this step, before clipping; absent if a job's own `train_step` returns none.",
    ),
    Key(
        "train/learning_rate",
        float,
        "Learning rate of this step; absent where an optimizer of the job's own keeps it to itself.",
    ),
    Key(
        "train/grad_norm/<group>",
        float,
        "Likewise of one top-level module of the model, or of one parameter; by `config.metrics.norms`.",
    ),
    Key("train/param_norm", float, "Global norm of the parameters before this step; by `config.metrics.norms`."),
    Key("train/param_norm/<group>", float, "Likewise of one module, or of one parameter."),
    Key("train/tokens", int, "Tokens consumed since step 0: step x global batch x sequence length.", "tokens"),
    Key("perf/tokens_per_second", float, "Over the steps since the row before, evaluation left out.", "tokens / s"),
    Key(
        "perf/mfu",
        float,
        "The model's FLOPs over the devices' peak; only on chips whose peak is known (`runner/accelerator.py`).",
        "share",
    ),
    Key(
        "perf/step_seconds_median",
        float,
        "Of the steps since the row before, by when the devices of the main host have finished each; evaluation left "
        "out.",
        "s",
    ),
    Key("perf/step_seconds_p95", float, "The time that 95% of those steps did not exceed.", "s"),
    Key(
        "perf/peak_bytes",
        int,
        "The most memory that a device of the main host has held since the process began; absent where it is not "
        "counted, as on CPUs.",
        "bytes",
    ),
    Key("perf/time", float, "When the row was written, by the clock of the main host.", "Unix seconds"),
    Key("perf/attempt", int, "Number of the attempt that computed this step."),
    Key("data/<name>/tokens", int, "Tokens that a source of a mixture gave since step 0.", "tokens"),
    Key("data/<name>/epochs", float, "How often the run has read a source of a mixture."),
    Key("val/loss", float, "Mean cross entropy over the validation batches; only at evaluated steps.", "nats"),
    Key("val/<name>/loss", float, "Likewise of one validation set, where there are several.", "nats"),
    Key(
        "val/ema_<decay>/<name>",
        float | None,
        "What an evaluation says of an average of the weights as `val/<name>`; only with `config.ema.evaluate`.",
    ),
    Key(
        "train/noise_scale",
        float | None,
        "Gradient-noise scale, averaged over steps; null where it is not positive; only with `config.noise_scale`.",
        "tokens",
    ),
    Key(
        "val/bits_per_byte",
        float | None,
        "The loss over the bytes of the text of the validation batches, null where they are not known; by "
        "`config.eval.bits_per_byte`.",
        "bits",
    ),
    Key("val/<name>/bits_per_byte", float | None, "Likewise of one validation set, where there are several.", "bits"),
    Key("val/<name>/acc", float, "Share of the questions of `config.eval.multiple_choice` that are answered right."),
    Key("val/<name>/acc_norm", float, "Likewise by the log likelihood over the characters of each choice."),
    Key("val/<name>/acc_bytes", float, "Likewise over its bytes."),
    Key("val/sample/<number>", str, "A prompt of `config.eval.samples`, and what the model writes after it."),
    Key(
        "train/<name>",
        float | list | dict | None,
        "What `forward` returned as meta under this name: a number, a list, or a histogram, `counts` of bins and their "
        "`edges`; of the last micro-batch of this step, and where `data` cuts that of its last part, but for the means "
        "of `sums`, which are of all. What was not finite is null.",
    ),
    Key(
        "val/<name>",
        float | list | dict | str | None,
        "Likewise of the last validation batch, and the means of `sums` of all; or a figure of another evaluator. Only "
        "at evaluated steps.",
    ),
)


_AFTER, _NUM_ROWS = "after", "rows"


class EncodedRow(NamedTuple):
    """One row, encoded, with its newline."""

    step: int
    text: bytes

    @classmethod
    def of(cls, row: Row) -> Self:
        """Encode a row."""
        return cls(row["step"], encode_line(row))

    @property
    def row(self) -> Row:
        """Decode it."""
        row: Row = json.loads(self.text)
        return row


class RowTail(NamedTuple):
    """The newest rows, and the step of the row that they follow, None if they are the first."""

    after: int | None
    lines: Sequence[EncodedRow]

    def encode(self) -> bytes:
        """The content of the fast tier's file."""
        head = encode_line({_AFTER: self.after, _NUM_ROWS: len(self.lines)})
        return head + b"".join(line.text for line in self.lines)

    @classmethod
    def decode(cls, content: bytes) -> Self:
        """The inverse of `encode`. Raises `ValueError` if it is torn."""
        head = decode_object(content.partition(b"\n")[0]) or {}
        lines = list(select_surviving(content.splitlines()))
        if content and head.get(_NUM_ROWS, len(lines) or None) != len(lines):
            raise ValueError("the rows that were kept beside it are not whole")
        return cls(head.get(_AFTER), lines)


def decode_object(text: bytes) -> Row | None:
    """The JSON object in one line, None if it is torn or something else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _step_of(row: Row) -> int | None:
    """The step of a row, None for a JSON object that is none: damage may have left another.

    A row of step 0 is of an evaluation before the first step, and has no loss of a step.
    """
    step = row.get("step")
    is_row = isinstance(row.get("train/loss"), int | float) or (step == 0 and "train/tokens" in row)
    return step if type(step) is int and is_row else None


def select_surviving(texts: Iterable[bytes], step: int | None = None, beyond: int = -1) -> Iterator[EncodedRow]:
    """The rows among lines of text that are up to `step` (None: all) and beyond `beyond`, each step once, in order."""
    for text in texts:
        found = _step_of(decode_object(text) or {})
        if found is not None and found > beyond and (step is None or found <= step):
            beyond = found
            yield EncodedRow(found, text.strip() + b"\n")


def find_last_own_step(step: int, tail: RowTail | None) -> int:
    """Up to which step the file's own rows are taken, where those of `tail` follow them; -1 for none."""
    if tail is None:
        return step
    return -1 if tail.after is None else min(step, tail.after)


def format_csv(lines: Sequence[EncodedRow]) -> Iterator[str]:
    """The header and a line a row, each with its newline; nothing if there are no rows."""
    columns = list(dict.fromkeys(key for line in lines for key in line.row))
    if columns:
        yield _csv_line(map(escape_unprintable, columns))
    for line in lines:
        row = line.row
        yield _csv_line(row.get(column) for column in columns)


def _cell(value: Any) -> Any:
    """A list or a histogram as JSON."""
    return json.dumps(value) if isinstance(value, list | dict) else value


def _csv_line(values: Iterable[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(map(_cell, values))
    return text.getvalue()
