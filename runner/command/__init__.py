"""The commands of `python -m runner` besides the run itself, one module each.

- `verify_resume` prove resume on this machine
"""
