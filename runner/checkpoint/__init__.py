"""Checkpoints: saved in one instant, and restored only if every bit is right.

- `manifest`: manifest, commit and tombstone; no arrays, no jax
- `blocks`: arrays stored as pieces, by process and shard
- `fingerprint`: digest of a pytree's bits, independent of the topology
- `leaves`: leaves that can be saved, and their stored form
- `fast_tier`: newest states on each host's own disk
- `readers`: arrays from a checkpoint, whatever wrote them
- `inspect`: list, verify and copy checkpoints
- `weight_names`: names of weights, averages and adapter matrices
- `restore`: newest good state; weights of another run
- `writers`: arrays into a checkpoint, through Orbax or as pieces
- `policy`: when to save, which checkpoints to keep
- `save`: the checkpointer: save and commit
- `weights`: `open_checkpoint`, read-only access to a run's weights
"""
