"""From exit codes to what is done next: what engines share that start a job again by themselves.

- `exit_code`   the job's, from those of its processes
- `ledger`      what the job has written down of itself
- `supervisor`  start again after 75 and 76, end after the rest and in a crash loop
- `summary`     where the time went over all attempts
"""
