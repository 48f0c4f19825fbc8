"""What judges weights beside their loss: text from them, and their answers to questions. In a run and beside it.

Knows models and their weights, no job and no run: whoever asks hands in what it has.

- `text`     how tokens become text, as it comes
- `choice`   the next token, from logits and a key
- `decode`   token after token, each from those before it
- `size`     what weights are scored on, and the bytes of its text
- `question` questions with choices, in a file
- `likelihood` how probable a text is after another
- `multiple_choice` how many questions are answered right
- `samples`  texts that go on from some prompts
- `asked`    what a spec's `eval` asks for of these
- `shipped`  the evaluators that come with a trainer
"""
