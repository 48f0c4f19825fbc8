"""Weights in the form that everything else reads: Hugging Face's, in and out.

- `family`    what the weights of a job are called there
- `header`    the header of a safetensors file
- `directory` a directory or URL of them, checked
- `match`     which tensor goes into which leaf, and all that does not fit
- `read`      leaves from tensors, each host its part
- `base`      the fingerprint of what an adapter is trained beside
- `source`    what `checkpoint.init_from` names: a run, or weights of others
- `tokenizer` the files by which others find the tokenizer
- `write`     a directory of safetensors, leaf by leaf, whole or not
- `export`    the weights of a run, written
- `peft`      its adapter alone
"""
