"""What a run's directory tells whoever only looks: where it stands, how it went, where the time went. Knows no jax.

Reads any store, of a run that lives, has ended or was killed while it wrote, and changes nothing. What the buckets of
time mean stands in `README.md` beside this file, and in `runner.hosts.clock.Bucket`.

- `record` the frozen records, all that others see
- `ledger` what the events tell of each attempt
- `checkpoint` the checkpoints that are there
- `row` the newest rows of metrics, and a sample of all
- `account` every second in one bucket, and the steps that were lost
- `ending` how an attempt has ended, or that it lives
- `read` the history of one directory, composed of the above
"""
