"""Optimizers and schedules by the names a spec uses, as optax objects; and which of them a job trains with.

Knows no model beyond the names, the shapes and the logical axes of its parameters. See README.md.

- `parameter` what a recipe knows of one parameter
- `group` how each parameter is treated: rate, decay, clip, frozen
- `orthogonal` an update that is made orthogonal (muon)
- `projection` moments of gradients of low rank (galore)
- `average` weights that are a mean of those that are trained (schedule-free)
- `schedule` the learning rate by step
- `injected` that of an optax object of the job's own, where its state holds it
- `optimizer` optimizers by name
- `choice` what a job trains with, of the library or its own
"""
