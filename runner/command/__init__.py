"""The commands of `python -m runner` besides the run itself, one module each.

- `schema` the JSON Schema of a spec
- `verify_resume` prove resume on this machine
"""
