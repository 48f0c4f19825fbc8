"""The rows of the surviving trajectory, and where people see them. Main host only.

- `row`       a row of `metrics.jsonl`
- `window`    the steps since the last row, kept on the device
- `pace`      how long single steps take
- `line`      rows as lines: which survive a restart
- `disk`      `metrics.jsonl` on a disk
- `bucket`    `metrics.jsonl` in a bucket, in parts
- `file`      `metrics.jsonl`, wherever it is
- `table`     `metrics.jsonl` as CSV
- `place`     where rows are kept for another tool, fed on a thread of its own
- `tensorboard` event files
- `offline`   what Weights & Biases has written: into a bucket, and away
- `tracking`  Weights & Biases
- `sinks`     a terminal, a log, and what the spec names
"""
