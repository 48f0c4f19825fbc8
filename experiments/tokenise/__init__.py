"""Tokenise job: converts text to a corpus of tokens, in the format of `runner.data.corpus_index`.

- `config`: keys of the job
- `inputs`: resolution of `config.source` to files, and reading of objects in buckets
- `documents`: documents and dialogues of an input file, and the split of the input into pieces
- `pipeline`: concurrent fetching, reading and encoding
- `corpus`: output files: shards, piece records, owner, index; exact duplicates
- `job`: the job itself, and its tokenizers, loaded from a file or trained
"""

from experiments.tokenise.job import Tokenise

__all__ = ["Tokenise"]
