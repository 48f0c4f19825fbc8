"""`python -m runner plan`: what a job would do on hardware that is not here, before anything is queued.

The map, in layers; a module imports only from those above it.

- `hlo`        what a compiled step communicates, and its largest arrays, from its text
- `forecast`   how long a step will take, op by op, and what is alive meanwhile, from its text
- `progress`   lines on standard error while it works
- `figure`     one number with its unit and basis; a table for people, JSON for scripts
- `machine`    the devices of a topology: libtpu's own, or CPU devices that stand in for them
- `checks`     everything that can be wrong, found and listed at once
- `data_check` the data: reached, counted against the run, its first batch read
- `estimate`   arithmetic on the chips' peak figures: rooflines, traffic
- `program`    the compiled steps' own figures: memory, collectives
- `mesh`       the meshes to choose from, and those near one
- `traffic`    what each axis of a mesh sends, by formula
- `tile`       shards that are smaller than a TPU's tiles
- `prediction` a job on a mesh by arithmetic: what it keeps, sends and computes
- `mesh_check` shapes that betray a mesh
- `probe`      what a compiler makes of one parameter on a mesh
- `outlook`    the first estimate, and a mesh near by that does better
- `profile`    the forecast as sections, and as a file for Perfetto
- `against`    the forecast beside what a run took
- `report`     the sections of a plan
- `search`     meshes x micro-batches x what the job declares, ranked by predicted step time
- `preflight`  the whole of a plan, and of a search
"""
