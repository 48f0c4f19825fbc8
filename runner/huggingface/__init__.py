"""Weights in the form that everything else reads: Hugging Face's, in and out.

- `safetensors`: A directory or URL in Hugging Face's layout: `config.json`, and safetensors in one file or in shards
- `mapping`: What the weights of a job are called in Hugging Face's files: a table of pieces, which serves both w
- `export`: A directory of safetensors, written leaf by leaf: no more than a leaf is in memory, and it is there
- `hub`: The model card of an export: README.md, with the front matter that the Hub reads
- `load`: Leaves from tensors: each host reads the byte ranges that its devices' parts of a leaf lie in, and n
- `peft`: The adapter of a run alone, in the layout of PEFT: `adapter_config.json` and `adapter_model.safetens
"""
