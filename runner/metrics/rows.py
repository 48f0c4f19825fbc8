"""Rows of `metrics.jsonl`: their keys, the selection of the surviving ones, and CSV. Does no I/O.

A row is one JSON object per logged step. A restart removes the rows beyond the checkpoint that it restores, so the
readers of lines (`select_surviving`) keep each step once, in order.

The fast tier saves the newest rows, which may not be durable yet, with a state. This tail is a line `{"after": step of
the row before them, "rows": how many}`, followed by the rows. An earlier version wrote it without that line; such a
tail holds all rows of the run.

Memory holds rows as encoded lines.
"""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Self

from runner.config import Unit
from runner.console import escape_unprintable
from runner.storage import STEP_MAX, JsonObject, Key, encode_line, parse_json, parse_line

Row = JsonObject

ROW_KEYS = (
    Key("step", int, "Optimizer steps completed."),
    Key(
        "train/loss",
        float | None,
        "Mean loss (of a language model, cross-entropy) over the real target tokens of the global batch of this step "
        "alone, not averaged over the steps since the previous row. null if the step has no target (and so "
        "changes no parameter), or if it is not finite and the update was skipped.",
        "nats",
    ),
    Key(
        "train/loss_mean",
        float | None,
        "Mean of `train/loss` over the steps since the previous row, weighted by their real target tokens, without "
        "losses that are not finite; null if none is left. Absent in the first row after a resume from a checkpoint "
        "that an earlier version of the runner saved between two rows.",
        "nats",
    ),
    Key(
        "train/grad_norm",
        float | None,
        "Global norm of the gradient of this step, before clipping; null if the step has no target, or if it is not "
        "finite and the update was skipped. Absent if a job's own `train_step` returns none.",
    ),
    Key(
        "train/learning_rate",
        float,
        "Learning rate of this step. Absent if the job's own optimizer does not keep it in its state.",
    ),
    Key(
        "train/skipped_updates",
        int,
        "Steps since step 0 whose update was skipped. Only with `config.stability.skip_update` or `non_finite: skip`.",
    ),
    Key(
        "train/roll_backs",
        int,
        "Roll-backs whose skipped data lie before this step. Only with `config.stability.roll_back`.",
    ),
    Key(
        "train/high_loss_steps",
        int,
        "Successive steps, this one the last, with a loss above the threshold of `config.stability.roll_back`.",
    ),
    Key(
        "train/grad_norm/<group>",
        float | None,
        "Norm of the gradient of one top-level module of the model, or of one parameter; see `config.metrics.norms`.",
    ),
    Key("train/param_norm", float, "Global norm of the parameters before this step; see `config.metrics.norms`."),
    Key("train/param_norm/<group>", float, "Norm of the parameters of one module, or of one parameter."),
    Key("train/tokens", int, "Tokens consumed since step 0: step x global batch x sequence length.", "tokens"),
    Key(
        "train/token_count",
        float,
        "Real target tokens of the global batch of this step. Only if steps differ in it, as with padding.",
        "tokens",
    ),
    Key("train/examples", int, "Examples consumed since step 0, where the data are arrays instead of tokens."),
    Key(
        "perf/tokens_per_second",
        float,
        "Throughput since the previous row, without the time of evaluation.",
        "tokens / s",
    ),
    Key("perf/examples_per_second", float, "The same where the data are arrays.", "examples / s"),
    Key(
        "perf/eval_seconds",
        float,
        "Duration of the evaluation of this row on process 0, all evaluators together.",
        "s",
    ),
    Key(
        "perf/eval_tokens_per_second",
        float,
        "Throughput of the loss on the validation sets, with the averages of `config.ema.evaluate`, padding included. "
        "Waiting for the compiler and other evaluators do not count in it.",
        "tokens / s",
    ),
    Key("perf/eval_examples_per_second", float, "The same where the data are arrays.", "examples / s"),
    Key(
        "perf/mfu",
        float,
        "Model FLOPs utilisation: the model's FLOPs per second over the peak of the devices. Only on chips with a "
        "known peak (`runner/accelerator.py`).",
        "share",
    ),
    Key(
        "perf/step_seconds_median",
        float,
        "Median duration of the steps since the previous row, measured when the devices of process 0 finish each step, "
        "without the time of evaluation.",
        "s",
    ),
    Key("perf/step_seconds_p95", float, "95th percentile of the duration of these steps.", "s"),
    Key(
        "perf/peak_bytes",
        int,
        "Peak memory of any device of process 0 since the process began. Absent if the backend does not count it, as "
        "on CPUs.",
        "bytes",
    ),
    Key(
        "perf/device_bytes",
        int,
        "Memory in use on the fullest device of process 0 when the row is written. Absent as `perf/peak_bytes`.",
        "bytes",
    ),
    Key(
        "perf/device_utilization",
        float,
        "Share of the driver's last sample, of up to a second, in which kernels ran, mean of the GPUs of process 0. "
        "Absent on other devices, and without the package `nvidia-ml-py` (extra `cuda`).",
        "share",
    ),
    Key("perf/host_bytes", int, "Memory that process 0 holds on its host when the row is written.", "bytes"),
    Key(
        "perf/host_free_bytes",
        int,
        "Memory that processes on the host of process 0, or in its container, may still use at that time.",
        "bytes",
    ),
    Key("perf/cpu_cores", float, "Mean number of CPU cores that process 0 used since the previous row.", "cores"),
    Key(
        "perf/at_end",
        bool,
        "True if the row has its evaluation only because the run ends at this step. If the run is extended, the "
        "evaluation is removed.",
    ),
    Key("perf/time", float, "Time at which the row was written, by the clock of process 0.", "Unix seconds"),
    Key("perf/attempt", int, "Number of the attempt that computed this step."),
    Key("data/<name>/tokens", int, "Tokens drawn from a source of a mixture since step 0.", "tokens"),
    Key("data/<name>/examples", int, "Examples drawn from a source of a mixture since step 0, where they are arrays."),
    Key("data/<name>/epochs", float, "Passes of the run over a source of a mixture."),
    Key(
        "val/loss",
        float | None,
        "Mean loss over the validation batches, null without a target. Only at evaluated steps.",
        "nats",
    ),
    Key("val/<name>/loss", float | None, "Validation loss of one validation set, if there are several.", "nats"),
    Key(
        "val/accuracy",
        float | None,
        "Token accuracy: share of the targets of the validation batches, by their weight in the loss, that are the "
        "most probable next token; null without a target. Only at evaluated steps, and absent if a job's own `forward` "
        "does not count them.",
    ),
    Key("val/<name>/accuracy", float | None, "Token accuracy of one validation set, if there are several."),
    Key(
        "val/ema_<decay>/<name>",
        float | None,
        "`val/<name>`, evaluated with an exponential moving average of the weights. Only with `config.ema.evaluate`.",
    ),
    Key(
        "train/noise_scale",
        float | None,
        "Gradient noise scale, averaged over steps; null if it is not positive. Only with `config.noise_scale`.",
        "tokens",
    ),
    Key(
        "val/bits_per_byte",
        float | None,
        "Validation loss per byte of text, null if the number of bytes is unknown; see `config.eval.bits_per_byte`.",
        "bits",
    ),
    Key("val/<name>/bits_per_byte", float | None, "Bits per byte of one validation set, if there are several.", "bits"),
    Key("val/<name>/acc", float, "Share of the questions of `config.eval.multiple_choice` with the right answer."),
    Key("val/<name>/acc_norm", float, "Share with the right answer by log likelihood per character of each choice."),
    Key("val/<name>/acc_bytes", float, "Share with the right answer by log likelihood per byte of each choice."),
    Key("eval/<task>/<metric>", float | None, "Metric of a task of `config.eval.harness`, as the harness names it."),
    Key("val/sample/<number>", str, "A prompt of `config.eval.samples` with the completion of the model."),
    Key(
        "train/<name>",
        float | list | dict | None,
        "Meta that `forward` returned under this name: a number, a list, or a histogram (`counts` of bins and their "
        "`edges`). It is that of the last micro-batch of this step, and of the last shard along `data`, except for the "
        "means of `sums`, which are those of the whole step. null if it was not finite.",
    ),
    Key(
        "val/<name>",
        float | list | dict | str | None,
        "Meta of the last validation batch and means of `sums` over all of them, or a metric of another evaluator. "
        "Only at evaluated steps. An image is `{image, width, height}` and audio `{audio, seconds, sample_rate}`, with "
        "the name of its file below `media/`, which may be missing.",
    ),
    Key(
        "hook/<name>/<key>",
        float | None,
        "Number that the hook of this name has logged in `on_row`, null if it was not finite. Those of `on_evaluation` "
        "are `val/<name>/<key>`.",
    ),
    Key(
        "<name>",
        float | list | dict | str | None,
        "Metric that a job other than a trainer has written with `log_metrics`. Its rows also have `step`, "
        "`perf/time` and `perf/attempt`, and no other key.",
    ),
)


_AFTER, _NUM_ROWS = "after", "rows"
_SHOWN_MAX = 6
# First parts of names below `train/` and last parts of names below `val/` that are the runner's own.
_TRAIN_NAMES = ("loss", "loss_mean", "grad_norm", "learning_rate", "param_norm", "tokens", "noise_scale", "token_count")
_VAL_NAMES = ("token_count",)


# Counts of a stability policy; shown only if something has happened.
POLICY_COUNTS = {
    "train/skipped_updates": "updates skipped",
    "train/roll_backs": "roll-backs",
    "train/high_loss_steps": "steps with a high loss",
}


def find_unit(row: Row) -> Unit:
    """Return the unit in which a row counts the progress of the run."""
    return "examples" if "train/tokens" not in row and "train/examples" in row else "tokens"


def list_own_metrics(row: Row) -> Row:
    """Return the job's own metrics of a row (without losses, speed and norms), by display name."""
    own: Row = {}
    count = f"train/{find_unit(row)}"
    for key, value in row.items():
        kind, _, name = key.partition("/")
        if key in ("step", "val/loss", count) or kind in ("perf", "data") or (key in POLICY_COUNTS and not value):
            continue
        if kind == "train" and name.partition("/")[0] not in _TRAIN_NAMES:
            own[name] = value
        elif kind == "val" and name.rpartition("/")[2] not in _VAL_NAMES:
            own[f"val {name}"] = value
        elif kind not in ("train", "val"):
            own[key] = value
    return own


def format_metrics(metrics: Row) -> list[str]:
    """Return the numbers among metrics for a line, at most `_SHOWN_MAX`; a mean over nothing is `-`.

    Metrics of single layers, which have a number in their name, are left out, because a model has many layers.
    """
    shown = [
        f"{name} {'-' if value is None else format(value, '.4g')}"
        for name, value in metrics.items()
        if (value is None or isinstance(value, int | float)) and not any(map(str.isdecimal, name.split("/")))
    ]
    return shown[:_SHOWN_MAX]


class EncodedRow(NamedTuple):
    """One row as an encoded line with its newline."""

    step: int
    text: bytes

    @classmethod
    def from_row(cls, row: Row) -> Self:
        """Encode a row."""
        return cls(row["step"], encode_line(row))

    @property
    def row(self) -> Row:
        """The decoded row."""
        return parse_json(self.text)


class RowTail(NamedTuple):
    """The newest rows of a file."""

    after: int | None  # step of the row before them; None if they are the first
    lines: Sequence[EncodedRow]

    def encode(self) -> bytes:
        """Return the content of the fast tier's file."""
        head = encode_line({_AFTER: self.after, _NUM_ROWS: len(self.lines)})
        return head + b"".join(line.text for line in self.lines)

    @classmethod
    def decode(cls, content: bytes) -> Self:
        """Decode the content of the fast tier's file. Raises `ValueError` if it is torn."""
        head = parse_line(content.partition(b"\n")[0]) or {}
        lines = list(select_surviving(content.splitlines()))
        # A tail of an earlier version has no number of rows; it is accepted if it has any row.
        if content and head.get(_NUM_ROWS, len(lines) or None) != len(lines):
            raise ValueError("the rows that were kept beside it are not whole")
        return cls(head.get(_AFTER), lines)


def select_surviving(texts: Iterable[bytes], step: int | None = None, beyond: int = -1) -> Iterator[EncodedRow]:
    """Yield the rows among lines of text, each step once and in ascending order. Damaged lines are skipped.

    Only steps after `beyond` are yielded, and none after `step` (None: no limit).
    """
    for text in texts:
        row = parse_row(text)
        if row is not None and row["step"] > beyond and (step is None or row["step"] <= step):
            beyond = row["step"]
            yield EncodedRow(beyond, text.strip() + b"\n")


def parse_row(text: bytes) -> Row | None:
    """Return the row in a line, None if the line is not a row."""
    row = parse_line(text) or {}
    found, loss = row.get("step"), row.get("train/loss")
    # Rows without a loss: of a step without a target, of an evaluation before the first step, of another job.
    has_mark = "perf/time" in row or (found == 0 and f"train/{find_unit(row)}" in row)
    is_row = type(loss) in (int, float) or (loss is None and has_mark)
    # `type` and not `isinstance`, since True is an int. A step without bound would hide all rows after it.
    return row if type(found) is int and is_row and 0 <= found <= STEP_MAX else None


def find_last_own_step(step: int, tail: RowTail | None) -> int:
    """Return the last step whose row a restart at `step` takes from the file, and not from `tail`; -1 for none."""
    if tail is None:
        return step
    return -1 if tail.after is None else min(step, tail.after)


def format_csv(lines: Sequence[EncodedRow]) -> Iterator[str]:
    """Yield CSV, a header and one line per row, each with its newline; nothing without rows.

    Columns are the keys in the order of their first occurrence. A field is empty if the row lacks the key. Numbers have
    full precision; a list or a histogram is JSON.
    """

    def format_line(values: Iterable[object]) -> str:
        text = io.StringIO()
        cells = (json.dumps(value) if isinstance(value, list | dict) else value for value in values)
        csv.writer(text, lineterminator="\n").writerow(cells)
        return text.getvalue()

    columns = list(dict.fromkeys(key for line in lines for key in line.row))
    if columns:
        yield format_line(map(escape_unprintable, columns))
    for line in lines:
        row = line.row
        yield format_line(row.get(column) for column in columns)
