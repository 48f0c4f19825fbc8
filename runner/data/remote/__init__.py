"""A source in a bucket: exactly what is asked for is fetched, and kept on this host's disk.

- `cache`  ranges of objects, in one file of bounded size
- `copy`   whole objects, for what cannot be read by ranges
- `reader` objects read by ranges, many requests at a time
"""
