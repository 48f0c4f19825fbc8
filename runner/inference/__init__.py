"""Inference on a run's weights, read-only: text from them, and their loss on data. Claims no attempt, writes nothing.

- `open_run`: opens a run directory: its job (which is not run), its weights, and text from them
- `evaluate`: loss of checkpoints on validation sets or any source, per token and per byte
- `top_k`: predictions of a model as a corpus, to distil from
- `harness`: a run's weights as a model of lm-evaluation-harness
"""
