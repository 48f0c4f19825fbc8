"""Training: train state, step, compilation, validation and report.

- `optimizer`: optimizer and schedule of a job
- `profiler`: profiles of devices
- `auxiliary`: auxiliary train state (averages, counters)
- `state`: train state, variables and shardings
- `loss`: cross-entropy and fields of a batch
- `replay`: steps whose gradients are computed twice, to find defective devices
- `step`: optimizer step and validation step
- `lora`: LoRA adapters
- `weights`: weights of the model in a state, for whoever does not train it
- `evaluators`: evaluators, their schedule, and validation
- `feature`: what a key of the config switches on
- `features`: features, each in one file
- `report`: rows of metrics
- `layout`: split of the batch over devices and micro-batches
- `compile`: compiled steps, and the micro-batch that fits
- `observation`: values of a forward pass for tools that inspect it
- `kernel_check`: self-test of the kernels of a step
- `setup`: abstract train state, shardings and optimizer on a mesh
- `stages`: stages of a run: configs and trajectory
- `checks`: checks of hardware, data, earlier attempts and the loss
- `flops`: FLOPs, memory and traffic of a step
- `program`: programs of a run by stage: layout of the batch, data, compiled steps
- `program_history`: programs that have made a run's steps, by which edited code is noticed
- `text_first`: texts that are tokenised before the run
"""
