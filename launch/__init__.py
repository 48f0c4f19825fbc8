"""How a spec reaches an engine: `python -m launch ENGINE SPEC`. Runs the runner's command; never imported by it.

Exit codes, specs and the names of chips are all that is known of a job here. The map; a module imports only from those
above it, and the same holds inside each folder.

- `options`: What the command lines of several engines share
- `kubernetes`: The job as a JobSet on Kubernetes: one child Job a slice, one pod a host
- `slurm`: The job as a batch job of SLURM: one task a node
- `supervisor`: Run a job again until it is done: what every engine does with the exit codes
- `local`: The job as N processes on this machine: a pod in miniature, on faked CPU devices where asked for
- `tpu_vm`: The job on TPU VMs of Google Cloud: one queued resource, one supervised process group a host
- `__main__`: `python -m launch ENGINE SPEC ...`
- `worker`: One host's part of a job, started again by exit code: `python -m launch.worker SPEC`, on every host
"""
