"""Texts that go on from some prompts, as the weights of a step write them: figures of a row, for people to read."""

from collections.abc import Callable, Sequence
from typing import Any

from runner.hosts.agreement import Hosts
from runner.judge.choice import Choose
from runner.judge.decode import CachedReader, PlainReader, generate, variables_of
from runner.judge.text import Language, pieces
from runner.train.evaluation import TEXT_CHARACTERS_MAX, Figures

SAMPLE = "val/sample"


class Samples:
    """An evaluator: the figures `val/sample/<number of the prompt>`. Made and called on every host.

    `make_reader` is called at the first evaluation. The same weights write the same texts, at any step.
    """

    name = "samples"

    def __init__(
        self,
        prompts: Sequence[tuple[str, list[int]]],
        language: Language | None,
        make_reader: Callable[[Any], CachedReader | PlainReader],
        choose: Choose,
        num_tokens: int,
        length: int,
        is_stopping: Callable[[], bool],
        every_steps: int | None = None,
    ):
        self.every_steps = every_steps
        self._prompts, self._language, self._make_reader, self._choose = prompts, language, make_reader, choose
        self._num_tokens, self._length, self._is_stopping = num_tokens, length, is_stopping
        self._reader: CachedReader | PlainReader | None = None

    def evaluate(self, weights: Any, step: int, hosts: Hosts) -> Figures | None:
        """See `Evaluator`."""
        texts = self.write(weights)
        if texts is None:
            return None
        return {f"{SAMPLE}/{number}": text[:TEXT_CHARACTERS_MAX] for number, text in enumerate(texts)}

    def write(self, weights: Any) -> list[str] | None:
        """A text for each prompt, which it begins with; None if the job was asked to stop. Called on every host."""
        if self._reader is None:
            self._reader = self._make_reader(variables_of(weights))
        texts = []
        for text, ids in self._prompts:
            if self._is_stopping():
                return None
            self._reader.use(variables_of(weights))
            tokens = generate(self._reader, self._choose, ids, self._num_tokens, self._length)
            texts.append("".join(pieces(tokens, ids, text, self._language))[:-1])
        self._reader.use(None)
        return texts
