"""The job as a batch job of SLURM: one task a node.

- `engine`: The script for sbatch: its options, the variables of `batch_script.sh`, and that program below them
"""
