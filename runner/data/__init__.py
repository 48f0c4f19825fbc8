"""Data pipeline: tokens, from files on this host or in a bucket, or examples of arrays, to the batch of a step.

**A batch is a pure function of (seed, step).** Example i of step k is example `k * global_batch_examples + i` of an
endless stream with random access in O(1), so checkpoints contain no iterator state. The package does not depend on
models, optimizers, checkpoints or the number of hosts.

A batch is made in five steps: `open_source` makes a `Source` from the keys of a spec; `packing` divides its tokens into
examples; `sampling` orders them; `dataset` mixes several sources; `batches` makes the global arrays of a step, ahead of
time.

Importing the package imports jax (half a second and more): do so when a job runs, not to validate a spec.

- `corpus_index`: index of a corpus
- `sampling`: token splits, shuffled orders and mixtures
- `source`: the `Source` interface, tokens by position
- `source_files`: resolution of `data.source` into files or objects
- `readers`: readers of byte ranges, and the cache of derived files
- `remote`: reader of objects in a bucket, cache of ranges, whole copies
- `packing`: examples: token windows, packed documents, padded documents
- `array_examples`: examples of a data set of arrays, such as images
- `token_headers`: recognition of token files by their first bytes
- `token_files`: token files as one long sequence
- `corpus`: corpus of shards with an index
- `megatron`: Megatron's indexed token files
- `array_record`: ArrayRecord files
- `mds`: MosaicML's MDS
- `tables`: Parquet and Arrow files of ids
- `tokenizers`: byte, character, Hugging Face, sentencepiece and tiktoken tokenizers
- `template_process`: sandboxed process that renders chat templates
- `chat`: dialogues, chat templates, and the marking of completion tokens
- `open_source`: from the keys of a spec to a `Source`; text files, tokenised once on each host
- `dataset`: training stream and validation sets as examples by number
- `batches`: global batch of a step, and prefetch
"""

from runner.data.batches import (
    DataPosition,
    Prefetcher,
    SeekablePrefetcher,
    SkippedBatches,
    has_targets,
    load_global_batch,
)
from runner.data.dataset import TRAIN, Dataset, SkippedExamples, get_batch_fields, load_dataset, load_validation_set
from runner.data.packing import Fields, FieldSpec, Sequences
from runner.data.readers import adopt_records
from runner.data.source import Source
from runner.data.source_files import is_available
from runner.data.tokenizers import ByteTokenizer, CharacterTokenizer, Tokenizer
from runner.storage import default_cache_directory

__all__ = [
    "TRAIN",
    "ByteTokenizer",
    "CharacterTokenizer",
    "DataPosition",
    "Dataset",
    "FieldSpec",
    "Fields",
    "Prefetcher",
    "SeekablePrefetcher",
    "Sequences",
    "SkippedBatches",
    "SkippedExamples",
    "Source",
    "Tokenizer",
    "adopt_records",
    "default_cache_directory",
    "get_batch_fields",
    "has_targets",
    "is_available",
    "load_dataset",
    "load_global_batch",
    "load_validation_set",
]
