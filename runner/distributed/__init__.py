"""Coordination of the processes of one job: process 0 decides, every process learns, every wait has a deadline.

- `clock`: wall-time accounting of one process, and the progress of its training thread
- `key_value`: the coordinator's key-value store, with every key that the runner uses
- `preemption`: agreed stop after SIGTERM on any process, and notice of a preempted Google Cloud VM
- `agreement`: `Hosts`: broadcasts, gathers and barriers between processes, and detection of lost peers
- `limits`: open files and threads that the system allows
- `rendezvous`: launch environment, rendezvous with process 0, start of `jax.distributed`
- `watchdog`: heartbeats of all processes; ends a stalled job with exit code 76, and detects stragglers
"""
