"""Launchers: run the job of a spec on an engine, `python -m launch ENGINE SPEC`.

A launcher runs the runner's command on every host. It uses exit codes, specs, the chip catalogue and the history of a
run, and imports no jax. The runner never imports it. `skypilot.yaml` is a file for SkyPilot that runs `worker`.

- `options`: base of the engines' command lines, and shell programs
- `checks`: checks of a job before it is submitted
- `code`: the commit, the runner and the packages that hosts without this machine's disk get
- `kubernetes`: a JobSet on Kubernetes
- `image`: the container image of a job
- `slurm`: a batch job of SLURM
- `supervisor`: restarts by exit code, for engines that restart nothing by themselves
- `local`: processes on this machine, with simulated CPU devices on request
- `tpu_vm`: TPU VMs of Google Cloud, through a queued resource
- `app`: the command line of `python -m launch`
- `__main__`: its entry point
- `worker`: one host's part of a job, restarted in its place, for `kubernetes`, `tpu_vm` and SkyPilot
"""
