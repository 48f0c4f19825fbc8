"""A row of `metrics.jsonl`: what one logged step says of itself."""

from typing import Any

from runner.record import Key

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
        "train/grad_norm",
        float,
        "Global norm of the gradient of this step, before clipping; absent if a job's own `train_step` returns none.",
    ),
    Key(
        "train/learning_rate",
        float,
        "Learning rate of this step; absent where an optimizer of the job's own keeps it to itself.",
    ),
    Key("train/tokens", int, "Tokens consumed since step 0: step x global batch x sequence length.", "tokens"),
    Key("perf/tokens_per_second", float, "Over the steps since the row before, evaluation left out.", "tokens / s"),
    Key(
        "perf/mfu",
        float,
        "The model's FLOPs over the devices' peak; only on chips whose peak is known (`runner/accelerator.py`).",
        "share",
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
        "train/<name>",
        float | None,
        "What `forward` returned as meta under this name, a scalar, of the last micro-batch of this step; null if it "
        "was not finite.",
    ),
    Key(
        "val/<name>",
        float | None,
        "Likewise of the last validation batch; only at evaluated steps.",
    ),
)
