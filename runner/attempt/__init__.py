"""One start of a job, on all its hosts, in its directory.

- `event` every name in the ledger, what it means and who writes it
- `result` the keys of `result.json`
- `hint` lines for a person at the end of a run
- `fence` which attempt a directory belongs to
- `environment` versions, the commit of the code and the hosts, and what a resume finds changed
- `event_log` the ledger `events.jsonl`
- `claim` taking a directory; `Attempt`, which is handed to all parts of a running job
- `identity` whose directory this is: the wrong run is refused
- `incident` what the watchdog finds, kept where a person looks
- `compile_cache` compiled programs, on this host's disk and in the run's directory
"""
