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
