"""One start of a job, on all its hosts, in its directory.

- `environment` versions, the commit of the code and the hosts, and what a resume finds changed
- `account` what a job keeps beside its state, and tells at its end
- `event` every name in the ledger, what it means and who writes it
- `layout` the names in a directory, what kind of thing each must be, and how its records are read
- `result` the keys of `result.json`
- `count` how a job counts its steps, checked before anything is committed
- `hint` lines for a person at the end of a run
- `owner` `job.json`: whose directory it is
- `fence` which attempt a directory belongs to
- `clock_file` where an attempt's time had gone when it was last alive
- `event_log` the ledger `events.jsonl`
- `claim` taking a directory; `Attempt`, which is handed to all parts of a running job
- `identity` whose directory this is: the wrong run is refused
- `incident` what the watchdog finds, kept where a person looks
- `compile_cache` compiled programs, on this host's disk and in the run's directory
"""
