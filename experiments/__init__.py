"""Jobs that the runner can run: models and their trainers, a tokenise job, and small examples.

- `model`: building blocks of models, and a configurable decoder with its trainer
- `gpt`: GPT-2 and its trainer
- `counter`: the smallest complete job, without a neural net
- `hooks`: a hook that writes generated text
- `tokenise`: job that turns text into a corpus
"""
