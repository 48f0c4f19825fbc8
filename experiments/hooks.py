"""Hooks for experiments, listed in a spec as `experiments.hooks:CLASS`; `.github/docs/hooks.md` explains hooks."""

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
    """Configuration of `SampleText`."""

    prompts: list[str] = Field(default=[""], min_length=1, description="Prompts, one for each text.")
    tokens: PositiveInt = Field(default=100, description="Tokens of each text.")
    temperature: NonNegativeFloat = Field(
        default=0.8, description="Sampling temperature; 0 takes the most probable token."
    )
    every_evaluations: PositiveInt = Field(default=1, description="Write a file at every so many evaluations.")


class SampleText(Observer):
    """Hook that writes generated text to `samples/STEP.txt` at evaluations.

    The same weights give the same text. A file belongs to one step and is written whole, so a step that is repeated
    after a kill writes the same file again.
    """

    Config: ClassVar[type[HookConfig]] = SampleTextConfig

    def __init__(self, config: Any, job: SeenJob):
        super().__init__(config, job)
        self._evaluator: SampleEvaluator | None = None
        self._every_steps = config.every_evaluations * (job.config.eval.every_steps or 1)

    def on_evaluation(self, moment: Moment) -> None:
        """Generate on every host, because the weights are sharded over all hosts, and write on process 0."""
        if moment.step % self._every_steps:
            return
        # The evaluator is made once: it compiles a program.
        if self._evaluator is None:
            self._evaluator = self._make_evaluator(moment.weights)
        texts = self._evaluator.write(moment.weights) or []
        if moment.hosts.is_main:
            self.job.store.write(f"samples/{moment.step}.txt", "\n".join(f"{text}\n" for text in texts).encode())

    def _make_evaluator(self, weights: Any) -> SampleEvaluator:
        job, options = self.job.config, self.config
        data, length, dtype = job.data, job.data.tokens_per_example, job.precision.compute
        codec = load_data_codec(data)
        prompts = [(text, encode_prompt(codec, text) or [find_start_token(codec, data)]) for text in options.prompts]
        mesh = jax.tree.leaves(weights["params"])[0].sharding.mesh
        choose = Sampler(options.temperature).make_chooser(codec.tokenizer.vocabulary_size)

        def make_reader(variables: Any) -> Any:
            return make_decoder(self.job.model(), variables, length, dtype, mesh)

        return SampleEvaluator(prompts, codec, make_reader, choose, options.tokens, length, lambda: False)
