"""Hooks of an experiment's own, listed in a spec as `experiments.hooks:CLASS`. See runner/hook/README.md."""

from typing import Any, ClassVar

import jax
from pydantic import Field, NonNegativeFloat, PositiveInt

from runner.hook import HookConfig, Moment, Observer, SeenJob
from runner.judge.choice import Sampling
from runner.judge.decode import generate, make_reader, variables_of
from runner.judge.text import encode_prompt, first_token, language_of, stream_text


class SampleTextConfig(HookConfig):
    """What to write, and after which evaluations."""

    prompts: list[str] = Field(default=[""], min_length=1, description="What each text goes on from.")
    tokens: PositiveInt = Field(default=100, description="Length of each text.")
    temperature: NonNegativeFloat = Field(default=0.8, description="0 takes the most probable token.")
    every_evaluations: PositiveInt = Field(default=1, description="Evaluations from one file to the next.")


class SampleText(Observer):
    """Writes `samples/STEP.txt` at evaluations: text from the weights, the same for the same weights.

    A file has one step and is written whole, so a step that is done again after a kill writes the same once more.
    """

    Config: ClassVar[type[HookConfig]] = SampleTextConfig

    def __init__(self, config: Any, job: SeenJob):
        super().__init__(config, job)
        self._every_steps = config.every_evaluations * (job.config.eval.every_steps or 1)

    def on_evaluation(self, moment: Moment) -> None:
        """Every host reads the weights, which are cut over all of them; the main host writes."""
        if moment.step % self._every_steps:
            return
        texts = "\n".join(self._text(prompt, moment.weights) for prompt in self.config.prompts)
        if moment.hosts.is_main:
            self.job.store.write(f"samples/{moment.step}.txt", texts.encode())

    def _text(self, prompt: str, weights: Any) -> str:
        config = self.job.config
        data, length = config.data, config.data.sequence_length
        language = language_of(data)
        ids = encode_prompt(language, prompt) or [first_token(language, data)]
        mesh = jax.tree.leaves(weights["params"])[0].sharding.mesh
        read = make_reader(self.job.model(), variables_of(weights), length, config.precision.compute, mesh)
        choose = Sampling(self.config.temperature).make_choose(language.tokenizer.vocabulary_size)
        tokens = generate(read, choose, ids, self.config.tokens, length)
        return prompt + "".join(stream_text(tokens, ids, language.tokenizer.decode)) + "\n"
