"""The rows of the surviving trajectory, and where people see them. Main host only.

- `row`       a row of `metrics.jsonl`
- `window`    the steps since the last row, kept on the device
- `line`      rows as lines: which survive a restart
- `disk`      `metrics.jsonl` on a disk
- `bucket`    `metrics.jsonl` in a bucket, in parts
- `file`      `metrics.jsonl`, wherever it is
- `offline`   what Weights & Biases has written, into a bucket
- `tracking`  Weights & Biases
- `sinks`     a terminal, a log, and what the spec names
"""
