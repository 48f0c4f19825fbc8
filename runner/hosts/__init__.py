"""Many processes as one job. Host 0 decides, everyone hears, everyone acts; no wait is without an end.

- `clock` where the time of a process goes, by bucket
- `preemption` SIGTERM on any host becomes one agreed stop on all
- `gcp_preemption` the announced preemption of a Google Cloud machine is a stop too
- `placement` which of several processes this is, from what the engine has set
- `rendezvous` how the processes find each other, and who is missing
- `key_value` the coordinator's key-value store: every key, who writes it, who deletes it
- `liveness` who has disconnected, who has crashed, how to leave in order
- `agreement` `Hosts`: host 0 decides, every host hears
- `join` start-up: makes `Hosts`
- `progress` the phase and the last completed step of the training thread
- `straggler` which hosts come late to a step
- `beat` what every process reports each second
- `watchdog` ends the job when a process has crashed or stands still
"""
