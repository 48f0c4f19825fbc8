"""Inference on a run's weights, read-only: text, loss and outputs on data. Claims no attempt, writes nothing there.

- `open_run`: opens a run directory: its job (which is not run), its weights, and text from them
- `evaluate`: loss of checkpoints on validation sets or any source, per token and per byte
- `predict`: outputs of the model for each example of a source, as a file
- `top_k`: predictions of a model as a corpus, to distil from
- `harness`: checkpoints of a run, evaluated by tasks of lm-evaluation-harness
"""
