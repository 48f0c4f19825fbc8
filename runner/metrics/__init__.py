"""Metrics: rows of `metrics.jsonl` and metric writers that mirror them. Process 0 writes.

- `meta`: step metadata that `forward` returns, metrics of evaluators, and their form in a row
- `media`: images and audio of evaluators, and their files in the run's directory
- `rows`: keys of a row, selection of surviving rows, CSV
- `file`: `metrics.jsonl` on a disk and in a bucket: writers; readers of all rows, of a sample, and of new rows
- `window`: metrics of the steps since the last row
- `wandb`: metric writer for Weights & Biases
- `writers`: progress on the terminal, asynchronous metric writers, and the one for TensorBoard
"""
