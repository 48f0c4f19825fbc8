"""Checkpoints: saved in one instant, and restored only if every bit is right.

- `manifest`: manifest, commit and tombstone; no arrays, no jax
- `blocks`: arrays stored as byte ranges, by process and shard
- `fingerprint`: digest of a pytree's bits, independent of the topology
- `leaves`: leaves that can be saved, their stored form, and the names of weights among them
- `arrays`: writer and readers of the arrays of a checkpoint
- `parts`: what one process needs to restore itself, on its host's own disk
- `replicas`: copies of these parts on other hosts
- `fast_tier`: newest states on the hosts' own disks
- `restore`: newest good state; weights of another run
- `policy`: when to save, which checkpoints to keep
- `save`: the checkpointer: save and commit
- `inspect`: `open_checkpoint`, read-only access to a run's weights; list, verify and copy checkpoints
- `fork`: a new run that begins with the whole state of another one
"""
