"""Import and export of weights in Hugging Face's layout, adapters in PEFT's layout, and pushes to the Hub.

- `safetensors`: files of weights: headers, index and directories
- `mapping`: mapping between leaves of the train state and tensors of the files
- `assets`: tokenizer, special tokens and context of an export, and the run's record of them
- `export`: export of weights and assets
- `hub`: model card and push to the Hub
- `load`: import by `checkpoint.init_from`, and the base of adapters
"""
