"""Tokens: from files on this host, or in a bucket, to the batch of a step. Read the modules in this order:

- `protocol`   `Source`: tokens by position, and what is asked of somebody else's class
- `index`      what stands beside the tokens of a corpus
- `source`     which files `data.source` names
- `id_file`    what is asked of a file of ids, wherever it lies
- `tokenizer`  text <-> token ids
- `extra`      packages that not everybody has
- `subword`    tokenizers of files, which take many documents at once
- `cache`      records and arrays on disk that many processes may race for and that no kill leaves half written
- `reader`     the bytes of files by ranges; here those of a disk
- `remote`     the same of a bucket: exactly what is asked for, kept on this host's disk
- `store`      token arrays, files and objects, read as one sequence
- `answers`    which tokens of dialogues count
- `corpus`     shards with an index, and their documents
- `format`     files that other tools have written
- `text`       text files -> cached tokens
- `opening`    from the keys of a spec to a `Source`
- `window`     the split into train and validation, and the shuffled order of examples
- `packing`    tokens -> examples: runs of them, or whole documents
- `mixture`    which source each example comes from
- `dataset`    `load_dataset` and the rows of an example range
- `batch`      rows -> the sharded arrays of one step
- `prefetch`   what a generator yields, such as batches, made ahead on a thread

**A batch is a pure function of (seed, step).** Nothing here holds a position: example r of step k is example
`k * global_batch_examples + r` of an endless stream, any example of it is found in O(1), and so nothing of the data
needs a checkpoint. The package must not know models, optimizers, checkpoints or how many hosts there are.

Importing it imports jax and grain (half a second and more): do that when a job runs, not to check a spec.
"""

from runner.data.batch import global_batch
from runner.data.dataset import Dataset, batch_fields, load_dataset, load_set
from runner.data.packing import Rows
from runner.data.prefetch import Prefetcher
from runner.data.protocol import Source
from runner.data.source import is_available
from runner.data.tokenizer import ByteTokenizer, CharacterTokenizer, Tokenizer
from runner.storage import default_cache_directory

__all__ = [
    "ByteTokenizer",
    "CharacterTokenizer",
    "Dataset",
    "Prefetcher",
    "Rows",
    "Source",
    "Tokenizer",
    "batch_fields",
    "default_cache_directory",
    "global_batch",
    "is_available",
    "load_dataset",
    "load_set",
]
