"""Training, in parts that do no I/O but for the metrics.

- `optimizer`: What a job trains with: optimizer and schedule of the library, or of its own
- `profiler`: Profiles: what the devices of process 0 did in some steps, recorded by jax.profiler into the run's d
- `state`: The train state, born sharded: abstract shapes, then shardings, then one jit with out_shardings. Doe
- `loss`: Token cross entropy as sums, so that a mean over any split of a batch is exact
- `batch_layout`: How the examples of a step are split: over the devices of a mesh, and over micro-batches in time. Ar
- `step`: The optimizer step and the validation step, pure. Knows no host, no file, no spec
- `auxiliary`: The gradient-noise scale: the batch, in tokens, at which more data in a step begins to gain little
- `compile`: The compiled steps: traced from abstract shapes, never from arrays, and the micro-batch that fits a
- `lora`: LoRA (arXiv 2106.09685): small matrices A and B are trained, and the model's own parameters stand st
- `evaluators`: Whoever judges the weights, each at its own cadence; and what becomes of their figures. Called on ev
- `report`: The rows of a run: collected without waiting, evaluated, written on the main host, shown wherever a
- `setup`: What a training job is before any device is touched, and how it is drawn on devices
- `checks`: Every host trains on the same data, from the first step to the last. Called on every host
- `flops`: How many floating-point operations a train step takes: by formula, and counted in a traced program.
"""
