"""Many processes as one job. Host 0 decides, everyone hears, everyone acts; no wait is without an end.

- `preemption` SIGTERM on any host becomes one agreed moment on all
- `gcp_preemption` the notice that a Google Cloud machine gives of its own end
- `placement` which of several processes this is, from what the engine has set
- `rendezvous` how the processes find each other, and who is missing
- `join` start-up, main host, agreement, loss of a peer
- `progress` what the training thread is at
- `straggler` which hosts come late to a step
- `watchdog` who has crashed, who stands still
"""
