"""What judges weights beside their loss: text from them, and their answers to questions. In a run and beside it.

Knows models and their weights, no job and no run: whoever asks hands in what it has.

- `generation`: Token after token, each from those before it, as far as the model's sequence length reaches
- `likelihood`: How probable a text is after another, in nats, by a model of tokens
- `builtin`: What `config.eval` asks for besides the loss, read and checked before the first step; and who answer
"""
