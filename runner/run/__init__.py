"""One start of a job, on all its hosts, in its directory.

- `clock_file`: `attempts/<number>.clock`: how far an attempt had come, and where its time had gone, when it was las
- `compile_cache`: Compiled programs: kept on each host's own disk, and on request in the run's directory, so that no
- `environment`: What a start runs with: versions, CPUs, the commit of the job's code, the hosts. Main host only; kno
- `events`: The events of the ledger `events.jsonl`: every name that is ever written, with its details and its w
- `layout`: The names in a run's directory, what kind of thing each must be, and how its records are read
- `fence`: Whose directory this is, and whether a spec would continue what is there: the wrong run is refused
- `logs`: `logs/<attempt>.<process>.log`: what a process has said, for who asks after its end. Never in a run'
- `notifications`: Whoever wants to hear of a run is told what happened to it: by a command, or by a POST to a URL. Ma
- `attempt`: An attempt: one start of a job, on all its hosts, in a directory that is now its own
"""
