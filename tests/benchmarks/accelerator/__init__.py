"""Accelerator benchmark kit: one command that takes all measurements that need a GPU, in about ten minutes.

    python -m tests.benchmarks.accelerator --out results.json [--sections NAME ...] [--minutes 10] [--wheels DIRECTORY]

Modules, in layers: a module imports only from modules above it. Importing the modules up to `kit`, and the package
`sections` itself, needs only the standard library, because they run before the bundled wheels are unpacked.

- `result`    figures, section results and the results of a run, stored as JSON
- `config`    the measured models and the sizes of all sections, full and tiny
- `wheels`    download and unpack the bundled dependencies
- `worker`    subprocesses: commands run to completion, and workers that run slices of steps on request
- `machine`   description of the device, the host and the package versions
- `torch_gpt` worker that trains a GPT-2 or Llama with PyTorch
- `trainer`   worker that trains with the runner's own loop
- `sections`  list of the sections, and one module per kind of section, which yields its figures
- `kit`       runs each section in a subprocess with a time limit and writes the results after each figure
- `table`     renders results as a Markdown table
"""
