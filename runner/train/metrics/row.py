"""A row of `metrics.jsonl`: what one logged step says of itself."""

from typing import Any

from runner.record import Key

Row = dict[str, Any]

ROW_KEYS = (
    Key("step", int, "Optimizer steps completed."),
    Key("train/loss", float, "Mean cross entropy over the real target tokens of this step's global batch.", "nats"),
    Key("train/grad_norm", float, "Global norm of the gradient before clipping."),
    Key("train/learning_rate", float, "Learning rate of this step."),
    Key("train/tokens", int, "Tokens consumed since step 0: step x global batch x sequence length.", "tokens"),
    Key("perf/tokens_per_second", float, "Over the steps since the row before, evaluation left out.", "tokens / s"),
    Key(
        "perf/mfu",
        float,
        "The model's FLOPs over the devices' peak; only on chips whose peak is known (`runner/accelerator.py`).",
        "share",
    ),
    Key("val/loss", float, "Mean cross entropy over the validation batches; only at evaluated steps.", "nats"),
)
