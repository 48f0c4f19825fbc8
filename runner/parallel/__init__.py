"""Parallelism: the device mesh, batch sharding, gradient reduction and context parallelism. Does no I/O.

- `canonical`: A traced program with each of its operations once, and nothing in it that a compiler must unfold fir
- `context`: Which of two ways attention takes where the positions of a row lie on several devices: by the time t
- `mesh`: From a spec's topology to a mesh: axis arithmetic, logical axis rules, the split of a batch
- `reduction`: Sums over the micro-batches of a step in one order, whatever number of devices computes them. Pure
"""
