"""Many processes as one job. Host 0 decides, everyone hears, everyone acts; no wait is without an end.

- `clock`: Where the time of a process goes: each second of it in one bucket. Does no I/O
- `key_value`: The coordinator's key-value store: every key that the runner uses, and the only calls that reach the
- `preemption`: Preemption: SIGTERM or Ctrl-C on any host becomes one agreed stop on all of them. So do SIGHUP, SIGU
- `agreement`: How the processes of a job agree. Host 0 decides, everyone hears
- `heartbeat`: What every process reports each second, and the one line that says what is wrong by all reports
- `rendezvous`: How the processes of a job find each other: all report to process 0, which says who is there
- `watchdog`: Notices that a job does not go on: a process has crashed, one stands still, one is late
"""
