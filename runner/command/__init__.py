"""The commands of `python -m runner`, one module each with `main(arguments) -> exit code`.

- `arguments` how command lines are read
- `looking` what commands share that only look at a run
- `run` a SPEC
- `plan` what a job would do on hardware that is not here
- `appending` a file of one's own that grows by a line a step
- `screen` a run's history as one screen of a terminal
- `status` where a run stands, and where its time went
- `evaluate` the loss of a run's weights
- `sample` text from a run's model
- `metrics` the rows of a run, as JSON or CSV
- `profile` have a running job record some steps
- `report` a page with pictures, of one run or several
- `dashboard` all runs below a directory or prefix, live
- `checkpoints` list, verify and copy checkpoints
- `export` the weights of a run in Hugging Face's layout, here or on its Hub
- `resume_proof` one undisturbed run and one killed again and again, compared
- `verify_resume` prove resume on this machine
- `schema` the JSON Schema of a spec
"""
