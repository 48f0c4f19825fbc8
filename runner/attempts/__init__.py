"""One attempt (start of a job on all its processes) in its run directory.

- `clock_file`: `attempts/<number>.clock`, the time accounting of an attempt up to its last heartbeat or step
- `compile_cache`: compiled programs on each host's disk, and optionally shared in the run's directory
- `environment`: versions, CPUs, commit, hosts and file system of a start
- `events`: events of the ledger `events.jsonl`, with their details and writers
- `layout`: file names in a run's directory, and the records `job.json` and `result.json`
- `ended`: the files of ended attempts, folded into blocks
- `fence`: single-writer rule, and the check that a spec continues the run in the directory
- `logs`: `logs/<attempt>.<process>.log`, the log file of a process
- `membership`: missing, waiting and returning hosts of an elastic job
- `notify`: notifications by command or webhook
- `progress_file`: `progress.json`, how far the run is, for supervisors
- `take_over`: question and line of a start in the directory of an attempt that runs
- `attempt`: `Attempt`: claim of the directory, outcome of the attempt, reports to the user
"""
