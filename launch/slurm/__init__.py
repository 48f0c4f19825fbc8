"""The job as a batch job of SLURM: one task a node.

- `allocation`    the nodes and GPUs that a spec's accelerator is
- `batch_script`  what is submitted; `batch_script.sh` is its part below the options
- `engine`        the command line, and sbatch
"""
