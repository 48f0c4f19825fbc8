"""The rows of the surviving trajectory, and where people see them. Main host only.

- `meta`: What `forward` may return beside the loss, its meta, and how a row of metrics holds it. Knows no mod
- `rows`: A row of `metrics.jsonl`: what one logged step says of itself
- `file`: `metrics.jsonl` in a bucket, where no object can be appended to: sealed parts, and one object that g
- `tensorboard`: TensorBoard's event files: `tensorboard/events.out.tfevents.<attempt>` in the run's directory, one a
- `window`: The steps since the last row, kept on the device until they are asked for: nothing here waits in a s
- `wandb`: metric writer for Weights & Biases
- `writers`: Where people see the rows while the job runs: a live line on a terminal, plain lines in a log, and p
"""
