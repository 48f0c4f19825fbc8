"""Evaluation of weights besides their loss: generated text and multiple-choice tasks, inside a run and outside of it.

These modules depend on models and weights, not on jobs or run directories.

- `generation`: codecs, sampling, decoders and sample texts
- `likelihood`: likelihood of texts, and multiple choice
- `harness`: weights as a model of lm-evaluation-harness
- `builtin`: evaluators of a trainer and the tasks of its spec
"""
