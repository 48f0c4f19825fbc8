"""The accelerator kit: one command that measures in minutes all that can only be seen on a machine with a GPU.

    python -m tests.benchmarks.accelerator --out results.json [--sections NAME ...] [--minutes 10] [--wheels DIRECTORY]

The map, in layers; a module imports only from those above it. Those above `section` need nothing but the standard
library: they run before what was carried along has been unpacked.

- `result`    what was seen: figures, sections, the machine; one JSON
- `size`      the models that are measured, at full size and tiny
- `wheels`    what is carried along, packed and unpacked
- `turn`      processes held open that take turns, by a pipe
- `process`   a command run to its end
- `machine`   the device, its host and the versions
- `torch_gpt` the peer: a compiled nanoGPT, or Llama, in torch
- `trainer`   the runner's own loop, taking turns
- `section`   one module a section: each yields figures as it sees them
- `agenda`    which sections there are, in the order of their worth, and how long each may take
- `kit`       runs them, each in a process of its own, and writes what was seen after each figure
- `table`     the Markdown table of a JSON
"""
