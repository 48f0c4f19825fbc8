"""Optimizers and schedules by the names a spec uses, as optax objects; and which of them a job trains with.

Knows no model beyond the names, the shapes and the logical axes of its parameters. See README.md.

- `config`: Optimizers and schedules by name: which keys of a spec each reads, with what defaults, and its sourc
- `groups`: How each parameter is treated, by the groups of a spec: its rate, its decay, its clip, whether it is
- `transforms`: Schedule-free: the parameters of the train state are a mean, and what is trained stands in the optim
- `library`: Optimizers by name, as optax transformations: each a function of its keys and of how parameters are
"""
