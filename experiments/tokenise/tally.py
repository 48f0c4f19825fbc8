"""How far a tokenise job is, in a line for a person now and then."""

import time
from collections.abc import Sequence

from experiments.tokenise.corpus import Done

_EVERY_SECONDS = 10.0


class Tally:
    """What this host has made in this attempt."""

    def __init__(self, num_pieces: int) -> None:
        self._num_pieces = num_pieces
        self._num_earlier = 0  # pieces made before this attempt
        self._own = [0, 0, 0, 0]  # pieces, documents, tokens, bad lines
        self.first_bad = ""
        self._began_seconds = self._said_seconds = time.monotonic()

    def begin(self, num_earlier: int) -> None:
        """With so many pieces done by earlier attempts."""
        self._num_earlier = num_earlier

    def add(self, done: Done) -> None:
        """A piece more."""
        more = (1, done.num_documents, done.num_tokens, done.num_bad)
        self._own = [own + other for own, other in zip(self._own, more, strict=True)]
        self.first_bad = self.first_bad or done.first_bad

    def own(self) -> list[int]:
        """For the other hosts: pieces, documents, tokens, bad lines."""
        return self._own

    def line(self, hosts: Sequence[Sequence[int]], now_seconds: float) -> str | None:
        """What all hosts have made, if it is time to say so."""
        if now_seconds - self._said_seconds < _EVERY_SECONDS:
            return None
        self._said_seconds = now_seconds
        pieces, documents, tokens, _ = (sum(column) for column in zip(*hosts, strict=True))
        seconds = now_seconds - self._began_seconds
        made = self._num_earlier + pieces
        left_seconds = seconds / max(pieces, 1) * (self._num_pieces - made)
        return (
            f"{made:,} of {self._num_pieces:,} pieces; now {documents:,} documents, {tokens:,} tokens, "
            f"{tokens / seconds:,.0f} tokens/s, {_duration(left_seconds)} left"
        )


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
