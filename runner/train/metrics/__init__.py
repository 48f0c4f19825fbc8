"""The rows of the surviving trajectory, and where people see them. Main host only.

- `row`       a row of `metrics.jsonl`
- `window`    the steps since the last row, kept on the device
- `file`      `metrics.jsonl`, on a disk and in a bucket
- `tracking`  Weights & Biases
- `sinks`     a terminal, a log, and what the spec names
"""
