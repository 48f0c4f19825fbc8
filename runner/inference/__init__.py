"""A run's weights at work, for whoever only looks: text from them, and their loss on data. Claims and writes nothing.

- `open_run`: From the directory of a run to its job, which is never run, and to the weights of one of its steps
- `evaluate`: The loss of a run's weights on sets of examples: over all tokens, and over all bytes of their text
- `harness`: A run's weights as a model of lm-evaluation-harness, for its own tasks (`pip install 'runner[lm-eval
- `sample`: Text from a run's model, as it comes
"""
