"""Plan of a job before it is queued, for hardware that need not be present: `python -m runner plan`.

- `figures`: figures with units and basis, tables and JSON, progress messages
- `checks`: checks of spec, data and directory, all reported at once
- `forecast`: step time and memory, op by op, from the compiled program's text
- `mesh`: meshes to choose from, and warnings about inefficient ones
- `gpu`: devices that stand for NVIDIA GPUs
- `program`: compiled steps for devices that need not be present, by the chip's compiler or simulated CPUs; roofline
- `prediction`: memory, traffic and step time by arithmetic, before compiling
- `profile`: forecast of a step as sections, as a trace, and against a run
- `report`: first estimate of a job with mesh warnings, and sections of a plan, each number with its basis
- `search`: best meshes, micro-batches and job settings by predicted step time
- `size`: sizes of a decoder by its depth, with tokens, batch and learning rate
- `preflight`: the command from end to end
"""
