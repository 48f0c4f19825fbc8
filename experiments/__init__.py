"""Jobs that the runner can run: models and their trainers, a tokenise job, and small examples.

- `model`: building blocks of models, and a configurable decoder with its trainer
- `gpt`: GPT-2 and its trainer
- `distill`: distillation of a GPT-2 from the predictions of a teacher
- `counter`: the smallest complete job, without a neural network
- `hooks`: a hook that writes generated text
- `tokenise`: job that tokenises text to a corpus
- `vit`, `mae`, `clip`: models of images, on data sets of arrays
"""
