"""`python -m runner plan`: what a job would do on hardware that is not here, before anything is queued.

The map, in layers; a module imports only from those above it.

- `figures`: One number of a plan with its unit and how it is known, and how a plan is shown: a table for people,
- `checks`: Everything that can be wrong before a job is queued, found and listed at once. Writes nothing that s
- `forecast`: How long a step will take, op by op, and why: read from the compiled program, on a machine without t
- `mesh`: Shapes that betray a mesh: said before the step is compiled, from shapes and shardings, and after, f
- `machine`: The devices that a job is sized for, without having them: libtpu's own, or CPU devices that stand in
- `program`: What a job's compiled steps say of themselves: memory, collectives, how long the compiler took
- `prediction`: What arithmetic says of a job on a mesh, before anything is compiled: what it keeps, sends and compu
- `estimate`: What is known of a job before its step is compiled, and which mesh near its own would do better
- `profile`: The forecast of a step as sections of a plan, and as a file that Perfetto opens
- `report`: The sections of a plan: what the job is, what it costs in memory, time and traffic, and what each nu
- `search`: What to ask for: meshes x micro-batches x what the job declares, ranked by predicted step time
- `preflight`: The whole of a plan: check, compile, report; exit 0 when the job would run, 2 when not
"""
