"""Sweeps: one spec with many settings, each an ordinary run in a directory of its own below one root.

`sweep.json` in the root (`runner.history.sweep`) has the settings. All else is read from the directories of the runs,
so a sweep that was interrupted, by kill -9 too, goes on with the same command.

- `points`: the settings: grids, random draws, search
- `halving`: the rule that stops runs early
- `record`: the root of a sweep, its lock and its record
- `children`: runs as processes of this machine, `--engine local` and `tpu-vm`
- `queues`: runs as jobs of a queue, `--engine slurm` and `jobset`
- `command`: the command line, checks and the summary
- `ladder`: runs of ascending depth, their scaling law, and its forecast for a larger run
"""
