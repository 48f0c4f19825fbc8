"""Checkpoints that can be trusted: saved in one instant, restored only if every bit is right.

- `manifest_key` the keys of `manifest.json`
- `chunk` many leaves, few programs
- `fingerprint` topology-free digest of a pytree, computed on device
- `leaves` what a leaf of the state may be, and the form in which it is stored
- `adapted` the state of a run that trains an adapter: its names, and how it merges
- `average` averages of the weights that ride along: their names
- `manifest` what makes a directory a checkpoint
- `fit` whether its leaves are those of a job's state
- `tombstone` who decides about a step: its commit, or the mark that it will never be one
- `pieces` arrays as pieces, written by each process and read by any
- `writer` how arrays reach a directory: through orbax, or piece by piece
- `reader` how they come back
- `read_back` the first save of a run, read back before it is committed
- `fast` the tier on a host's own disk
- `double_buffer` the state's memory held twice, on CPUs
- `save` saving, and the protocol that makes it one instant
- `interval` when to save
- `retention` which steps may go, and how
- `restore` the newest state that every host can have
- `checkpointer` the five verbs that a job sees, composed of the above
- `look` the leaves of one, read back by whoever only looks
- `inspection` list and verify checkpoints from outside
- `weights` open one for its weights
- `copy` copy one elsewhere
"""
