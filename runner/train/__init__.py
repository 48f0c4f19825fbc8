"""Training, in parts that do no I/O but for the metrics.

- `mesh` spec -> mesh, logical axis rules, batch arithmetic
- `state` the train state and its eval_shape-based sharded init
- `step` pure train_step and val_step with accumulation
- `loss` token cross entropy
- `optimizer` optimizers and schedules by name
- `flops` what a train step computes, by formula and counted in a traced program
- `compilation` the compiled steps, and the micro-batch that fits a device
- `metrics` the rows of the surviving trajectory, and where people see them
"""
