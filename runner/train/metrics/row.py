"""A row of `metrics.jsonl`: what one logged step says of itself."""

from typing import Any

Row = dict[str, Any]
