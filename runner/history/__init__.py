"""Read-only view of a run directory: attempts, goodput, checkpoints, metrics. Imports no JAX.

It reads any store, of a run that is alive, has ended or was killed while it wrote, and changes nothing. The
categories of time are explained in `.github/docs/status.md` and in `runner.distributed.clock.TimeCategory`.

- `records`: records of a run's history: frozen, with plain values
- `ledger`: summary of the event ledger per attempt, in bounded memory
- `goodput`: attribution of every second of a run to one category, lost steps, outcome of an attempt
- `cost`: dollars of a run, from the price in its spec
- `reader`: `HistoryReader`, the history of one directory
- `sweep`: record of a sweep, the runs below one root, and their comparison
- `lineage`: ancestors and forks of runs, and forecasts of runs
- `scaling`: scaling laws, fitted to finished runs, and their forecasts
- `hosts`: incidents of each host over all attempts and runs
"""
