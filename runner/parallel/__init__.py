"""Parallelism: the device mesh, batch sharding, gradient reduction and context parallelism, without I/O.

- `mesh`: device mesh, logical axis rules and batch sharding
- `reduction`: all-reduce of gradients once a step, and gradient sums in a fixed order
- `canonical`: canonicalised jaxpr that XLA simplifies identically on any number of devices
- `context`: choice of ring attention or all-gather by predicted time
"""
