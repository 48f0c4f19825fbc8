"""Text to a corpus of tokens, as a job. The form of a corpus is that of `runner.data.corpus_index`. Read in this order:

- `config`: The keys of a tokenise job. Knows no files and no tokenizers
- `inputs`: Which files `config.source` names, in which order, on a disk or in a bucket. Knows names and sizes,
- `template_process`: A process that renders chat templates, and can do nothing else: run as a program, it imports not
- `chat`: Chat templates: read from the tokenizer's own file, rendered in a process of their own (see `templat
- `documents`: From a part of an input file to its documents, one after the other. Knows no tokens
- `pipeline`: Reading, encoding and writing at the same time: what each makes is ready before the next asks for it
- `corpus`: The output of a tokenise job: shards, a record of each finished piece, whose it is, and at the end t
- `vocabulary`: Which tokenizer a job uses: read from its file, or trained on a sample of the source
- `job`: Tokenise text: a job whose steps are thousandths of its work, with the same corpus at the end whatev
"""

from experiments.tokenise.job import Tokenise

__all__ = ["Tokenise"]
