"""The commands of `python -m runner`, one module each with `main(arguments) -> exit code`.

- `arguments`: How command lines are read: a mistake is an `InvalidError` with the usage of all commands
- `checkpoints`: `python -m runner checkpoints`: list, verify or copy checkpoints, on a disk or in a bucket. Claims n
- `dashboard`: `python -m runner dashboard`: all runs below a directory or a bucket's prefix, live. Claims and chan
- `export`: `python -m runner export`: the weights of a run in the form that everything else reads. Claims nothi
- `metrics`: `python -m runner metrics`: the rows of the surviving trajectory, on a disk or in a bucket. Claims n
- `plan`: `python -m runner plan`: what the job would do on hardware that is not here. See `runner.plan`
- `profile`: `python -m runner profile`: have a running job record its next steps. Asks; claims nothing and waits
- `report`: `python -m runner report`: one page with pictures, of one run or several. Claims nothing; works besi
- `run`: `python -m runner SPEC`: join the other hosts, run the job, end with its exit code
- `evaluate`: `python -m runner evaluate`: the loss of a run's weights on data. Claims nothing; works beside the r
- `sample`: `python -m runner sample`: text from a run's model. Claims nothing; works beside the run
- `schema`: `python -m runner schema [SPEC]`: the JSON Schema of a spec, for editors and checkers
- `status`: A run's history as one screen of a terminal: plain text without one, never wider than it, nothing ob
- `verify_resume`: Prove resume on this machine, with the user's own job: one undisturbed run and one killed again and
"""
