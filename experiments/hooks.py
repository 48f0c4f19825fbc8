"""Hooks of an experiment's own, listed in a spec as `experiments.hooks:CLASS`. See runner/hook/README.md."""

from typing import Any, ClassVar

import jax
from pydantic import Field, NonNegativeFloat, PositiveInt

from runner.evaluation.generation import (
    SampleEvaluator,
    Sampler,
    encode_prompt,
    find_start_token,
    load_data_codec,
    make_decoder,
)
from runner.hook import HookConfig, Moment, Observer, SeenJob


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
        self._samples: SampleEvaluator | None = None
        self._every_steps = config.every_evaluations * (job.config.eval.every_steps or 1)

    def on_evaluation(self, moment: Moment) -> None:
        """Every host reads the weights, which are cut over all of them; the main host writes."""
        if moment.step % self._every_steps:
            return
        if self._samples is None:
            self._samples = self._make_samples(moment.weights)
        texts = self._samples.write(moment.weights) or []
        if moment.hosts.is_main:
            self.job.store.write(f"samples/{moment.step}.txt", "\n".join(f"{text}\n" for text in texts).encode())

    def _make_samples(self, weights: Any) -> SampleEvaluator:
        """What writes the texts, with a program that is compiled once."""
        config, told = self.job.config, self.config
        data, length, dtype = config.data, config.data.sequence_length, config.precision.compute
        language = load_data_codec(data)
        prompts = [(text, encode_prompt(language, text) or [find_start_token(language, data)]) for text in told.prompts]
        mesh = jax.tree.leaves(weights["params"])[0].sharding.mesh
        choose = Sampler(told.temperature).make_chooser(language.tokenizer.vocabulary_size)

        def reader(variables: Any) -> Any:
            return make_decoder(self.job.model(), variables, length, dtype, mesh)

        return SampleEvaluator(prompts, language, reader, choose, told.tokens, length, lambda: False)
