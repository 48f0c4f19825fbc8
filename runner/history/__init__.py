"""What a run's directory tells whoever only looks: where it stands, how it went, where the time went. Knows no jax.

Reads any store, of a run that lives, has ended or was killed while it wrote, and changes nothing. What the buckets of
time mean stands in `README.md` beside this file, and in `runner.distributed.clock.TimeBucket`.

- `records`: The records of a run's history: frozen, of plain values, in Unix seconds and seconds
- `ledger`: What the events tell of each attempt, read once from the first to the last, in bounded memory
- `goodput`: Every second of a run in exactly one bucket, and the steps that were lost. Pure
- `reader`: The history of one directory. Reads each thing once, and tells what it could not read instead of fal
"""
