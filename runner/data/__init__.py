"""Tokens: from files on this host, or in a bucket, to the batch of a step. Read the modules in this order:


**A batch is a pure function of (seed, step).** Nothing here holds a position: example r of step k is example
`k * global_batch_examples + r` of an endless stream, any example of it is found in O(1), and so nothing of the data
needs a checkpoint. The package must not know models, optimizers, checkpoints or how many hosts there are.

Importing it imports jax and grain (half a second and more): do that when a job runs, not to check a spec.

- `corpus_index`: The index of a corpus: what must be known of its tokens, so that nobody has to read them before the
- `sampling`: Arithmetic of windows: how a token sequence is split, cut and shuffled. Reads no token and no file
- `source`: `Source`: tokens by position, from wherever they come. A class of one's own is named in the spec, `m
- `source_files`: Which files a `data.source` names, in which order, on the disk or in a bucket. Knows names and sizes
- `readers`: The bytes of a source's files, asked for by ranges: what every format reads through, wherever the fi
- `remote`: Objects of a bucket, read by exact ranges: through the cache, many requests at a time
- `packing`: How a stretch of tokens is cut into examples. Reads token ids and where documents end; knows no orde
- `token_files`: Token ids at rest: arrays, files and objects, read as one long sequence. Knows no text and no window
- `corpus`: A corpus: shards of ids with an index, on a disk or in a bucket, and where its documents end
- `documents`: Megatron's token files: of each pair `<name>.idx`, `<name>.bin` the spec names the `.idx`
- `array_record`: ArrayRecord files of token ids: a record is a document, its bytes are little-endian ids of `data.opt
- `mds`: MosaicML's MDS: a directory of shards and of `index.json`, as `mosaicml-streaming` writes it. A samp
- `tokenizers`: Tokenizers that take many documents at once, most of them from a file: bytes, Hugging Face, sentence
- `text`: Text files to tokens, once: later starts map the cached array. Knows no windows and no splits
- `open_source`: From the keys of a spec to a `Source`: which class reads what they name. Refuses keys that it does n
- `dataset`: A data set as the trainer sees it: examples by number. Knows no devices, steps or micro-batches
- `batches`: What a generator yields, made ahead on a thread, such as batches. It holds no position that must sur
"""

from runner.data.batches import Prefetcher, load_global_batch
from runner.data.dataset import Dataset, get_batch_fields, load_dataset, load_validation_set
from runner.data.packing import Sequences
from runner.data.source import Source
from runner.data.source_files import is_available
from runner.data.tokenizers import ByteTokenizer, CharacterTokenizer, Tokenizer
from runner.storage import default_cache_directory

__all__ = [
    "ByteTokenizer",
    "CharacterTokenizer",
    "Dataset",
    "Prefetcher",
    "Sequences",
    "Source",
    "Tokenizer",
    "default_cache_directory",
    "get_batch_fields",
    "is_available",
    "load_dataset",
    "load_global_batch",
    "load_validation_set",
]
