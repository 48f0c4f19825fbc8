"""A run's weights at work, for whoever only looks: text from them, and their loss on data. Claims and writes nothing.

- `opening`  from the directory of a run to its job, which is never run, and to the weights of a step
- `sample`   text from a run: the above, in order
- `scored_data` what weights are scored on
- `scoring`  the loss of weights on sets of examples, over all tokens and over all bytes
- `harness`  a run's weights as a model of lm-evaluation-harness
- `evaluation` the score of one step, or of all
"""
