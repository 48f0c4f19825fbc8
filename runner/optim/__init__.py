"""Optimizers and schedules by the names that a spec uses, as optax objects, and settings for groups of parameters.

The package depends on a model only through the names, shapes and logical axes of its parameters.

- `config`: config models and the table of optimizers and schedules
- `groups`: per-parameter optimizer settings and frozen parameters
- `muon`: Muon's orthogonalisation, with the matrices dealt out over the devices
- `transforms`: schedule-free averaging and GaLore's projection
- `library`: optimizers and schedules by name
"""
