"""Training, in parts that do no I/O but for the metrics.

- `mesh` spec -> mesh, logical axis rules
- `variables` what the train state holds of a model besides its parameters
- `state` the train state and its eval_shape-based sharded init
- `fields` what the step knows of the fields of a batch, and what it refuses to leave unread
- `batch_layout` how the examples of a step are split over devices and micro-batches
- `meta` what `forward` may return beside the loss, and how a row holds it
- `norm` norms of gradients and parameters, by group
- `step` pure train_step and val_step with accumulation
- `loss` token cross entropy
- `optimizer` optimizers and schedules by name
- `compilation` the compiled step, and the micro-batch that fits a device
- `blueprint` what a job is on certain devices, before anything is allocated
- `micro_batch` the micro-batch that was chosen for some hardware, as manifests remember it
- `same_data` every host trains on the same data, from the first step to the last
- `design` what a job is before any device is touched, and how it is drawn on devices
- `flops` what a train step computes, by formula and counted in a traced program
- `metrics` the rows of the surviving trajectory, and where people see them
- `evaluation` who judges the weights, each at its own cadence
- `validation` the loss on a validation set
- `profile` traces of some steps, by jax.profiler
- `report` the rows of an attempt: collected, evaluated, written, shown
- `hint` other hardware is refused, with what would make the job run there
"""
