"""Text to a corpus of tokens, as a job. The form of a corpus is that of `runner.data.index`. Read in this order:

- `config`      the keys
- `source`      which files are read
- `object_file` a large file in a bucket, in blocks
- `dialogue`    records of dialogues, and which tokens are of answers
- `template`    chat templates, in a process of their own: `template_process`
- `reading`     a part of a file to its documents
- `chat`        what the keys say of dialogues, checked
- `piece`       the work, cut into pieces
- `pipeline`    documents to ids, on all cores
- `vocabulary`  the tokenizer, read or trained
- `corpus`      what is written, in which order
- `tally`       how far it is
- `job`         `Tokenise`
"""

from experiments.tokenise.job import Tokenise

__all__ = ["Tokenise"]
