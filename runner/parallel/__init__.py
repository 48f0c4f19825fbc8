"""Parallelism: the device mesh, batch sharding and gradient reduction, without I/O.

- `mesh`: device mesh, logical axis rules and batch sharding
- `reduction`: all-reduce of gradients once a step, and gradient sums in a fixed order
- `canonical`: canonicalised jaxpr that XLA simplifies identically on any number of devices
"""
