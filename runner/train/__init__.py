"""Training, in parts that do no I/O but for the metrics.

- `mesh` spec -> mesh, logical axis rules
- `batch_layout` how the examples of a step are split over devices and micro-batches
- `variables` what the train state holds of a model besides its parameters
- `rider` what rides along with the parameters, such as averages of them
- `ema` averages of the weights
- `noise_scale` how much of a gradient is noise
- `adapter` LoRA: what is trained beside parameters that stand still
- `rounding` new parameters of a narrow type, rounded stochastically
- `riding` which riders a config asks for
- `state` the train state and its eval_shape-based sharded init
- `fields` what the step knows of the fields of a batch, and what it refuses to leave unread
- `step` pure train_step and val_step with accumulation
- `loss` token cross entropy
- `optimizer` optimizers and schedules by name
- `compilation` the compiled step, and the micro-batch that fits a device
- `blueprint` what a job is on certain devices, before anything is allocated
- `micro_batch` the micro-batch that was chosen for some hardware, as manifests remember it
- `same_data` every host trains on the same data, from the first step to the last
- `design` what a job is before any device is touched, and how it is drawn on devices
- `flops` what a train step computes, by formula and counted in a traced program
- `validation` the loss on a validation set
- `ema_validation` that of averages of the weights
- `metrics` the rows of the surviving trajectory, and where people see them
- `profile` traces of some steps, by jax.profiler
- `report` the rows of an attempt: collected, evaluated, written, shown
- `hint` other hardware is refused, with what would make the job run there
"""
