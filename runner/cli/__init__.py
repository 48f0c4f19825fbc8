"""The command line of `python -m runner`.

`arguments` declares the options of every command, `app` parses a command line and calls the function that carries it
out. A function takes the dataclass of its arguments and returns the exit code. Read-only commands claim no attempt, so
that they work beside a running job.

- `arguments`: arguments and options of each command, without jax
- `traceback`: text of an error in code of the user's own
- `run`: `runner SPEC`
- `sweep`: screen of a sweep, for `status`
- `status`: `status`, and access to a run for read-only commands
- `retrace`: `explain`, `replay`, `trial`, `bundle`, `reproduce`
- `inspect`: `spec`, `lineage`, `metrics`, `report`, `dashboard`, without jax
- `checkpoints`: `checkpoints`, `checkpoints copy`, `sample`, `evaluate`, `predict`, `export`, `profile`
- `plan`: `plan`, `schema`, `spec-from`, `scale`
- `init`: `init`
- `verify_resume`: `verify-resume`
- `app`: table of commands, with their help and exit codes, and `main`
"""
