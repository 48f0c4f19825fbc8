"""Checkpoints that can be trusted: saved in one instant, restored only if every bit is right.

- `manifest`: The manifest: what makes a directory a checkpoint, and what its files must look like. Knows no array
- `blocks`: Arrays as pieces: each process writes the shards that are its own, and any process reads the pieces
- `fast_tier`: The fast tier: the newest states on this host's own disk or in its memory, beside the durable direct
- `fingerprint`: A topology-free digest of a pytree, computed on the devices that hold it
- `leaves`: What a leaf of the state may be, and the form in which it is stored. A leaf that could not come back
- `readers`: How the arrays of a checkpoint come back from its directory, whatever wrote them
- `inspect`: Look at checkpoints from outside, on any store: list them, check every byte, or every bit. Changes n
- `weight_names`: The state of a run that trains an adapter (LoRA, arXiv 2106.09685): how its leaves are called, and h
- `restore`: Restore: the newest state that every host can have and that is, bit for bit, what was saved
- `writers`: How the arrays of a checkpoint reach its directory: through orbax, or piece by piece
- `save`: Save and commit: the protocol that makes a checkpoint one instant
- `policy`: Which steps may go, and how they go. By step number: never by a time, never by the order of a listin
- `checkpointer`: The checkpoints of one attempt, in five verbs: restore, load, save, wait, close. All that a job sees
- `weights`: `open_checkpoint`: the weights of a run, for whoever only looks, on a disk or in a bucket, beside th
"""
