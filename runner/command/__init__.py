"""The commands of `python -m runner`, one module each with `main(arguments) -> exit code`.

- `arguments` how command lines are read
- `run` a SPEC
- `plan` what a job would do on hardware that is not here
- `checkpoints` list, verify and copy checkpoints
- `resume_proof` one undisturbed run and one killed again and again, compared
- `verify_resume` prove resume on this machine
- `schema` the JSON Schema of a spec
"""
