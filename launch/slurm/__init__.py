"""The job as a batch job of SLURM, one task per node or per GPU.

- `engine`: the script for sbatch, and its submission
"""
