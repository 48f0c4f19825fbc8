"""How a spec reaches an engine: `python -m launch ENGINE SPEC`. Runs the runner's command; never imported by it.

Exit codes, specs and the names of chips are all that is known of a job here. The map; a module imports only from those
above it, and the same holds inside each folder.

- `options`     what the command lines of several engines share
- `shell`       shell programs, which are files beside the module that knows what they are given
- `restart`     exit codes -> what to do: start again, stop, sum up
- `worker`      one host's part of a job, started again by exit code, for engines that restart nothing
- `local`       the job as several processes on this machine
- `slurm`       the job as a batch job
- `kubernetes`  the job as a JobSet
- `tpu_vm`      the job on TPU VMs of Google Cloud
- `__main__`    the command line
"""
