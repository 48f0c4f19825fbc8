"""Files that other tools have written: ids in documents.

- `document`     what all of them become: files that know where their documents end
- `megatron`     Megatron's pairs of `.idx` and `.bin`
- `mds_column`   where the ids lie in a sample of MDS
- `mds`          MosaicML's directories of shards
- `array_record` files whose records are documents
- `opening`      which of them opens what
"""
