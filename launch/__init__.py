"""Launchers: from a spec to a running job on an engine, `python -m launch ENGINE SPEC`.

A launcher runs the runner's command on every host, and is never imported by the runner. It knows exit codes, specs, the
names of chips and the history of a run, and imports no jax.

- `options`: base of the engines' command lines, and shell programs
- `kubernetes`: a JobSet on Kubernetes
- `slurm`: a batch job of SLURM
- `supervisor`: restarts by exit code, for engines that restart nothing by themselves
- `local`: processes on this machine, with faked CPU devices on request
- `tpu_vm`: TPU VMs of Google Cloud, through a queued resource
- `__main__`: the command line `python -m launch`
- `worker`: one host's part of a job, restarted in its place, for `kubernetes` and `tpu_vm`
"""
