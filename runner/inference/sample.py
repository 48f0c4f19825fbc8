"""Text from a run's model, as it comes."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh

from runner.console import warn
from runner.errors import DataError, InvalidError
from runner.evaluation.generation import (
    Sampler,
    TextCodec,
    encode_prompt,
    find_start_token,
    generate,
    infer_vocabulary_size,
    load_data_codec,
    make_decoder,
    make_variables,
    parse_ids,
    stream_output,
)
from runner.inference.open_run import NEWEST, ReadOnlyRun, parse_step
from runner.parallel.mesh import AXES, make_mesh, read_device_memory_bytes
from runner.records import PARAMS
from runner.trainer import BaseTrainer


@dataclass(frozen=True)
class SampleRequest:
    """What is asked for: `num_tokens` after `prompt`, by the `weights` of `step` (a number, newest or best)."""

    prompt: str = ""
    step: str = NEWEST
    num_tokens: int = 200
    sampling: Sampler = field(default_factory=Sampler)
    weights: str = PARAMS

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise InvalidError(f"--tokens {self.num_tokens}: needs at least 1")


def sample(run: ReadOnlyRun, request: SampleRequest) -> Iterator[str]:
    """The prompt, and the text of each token after it; ids between spaces, where the data names no tokenizer.

    Raises `InvalidError` before the first piece.
    """
    job = run.job
    data, length = job.config.data, job.config.data.sequence_length
    try:
        language: TextCodec | None = load_data_codec(data)
    except DataError as error:
        warn(f"ids instead of text: {error}")
        language = None
    checkpoint = run.find_checkpoint(request.step)
    abstract, mesh = _draw(job)
    model = job.model()
    num_ids = infer_vocabulary_size(model, make_variables(abstract), length)
    if language is not None and language.tokenizer.vocabulary_size > num_ids:
        size = language.tokenizer.vocabulary_size
        raise InvalidError(
            f"{run.store.url}: its tokenizer has {size:,} ids, its model {num_ids:,}: not the same run's"
        )
    if language is None:
        prompt = parse_ids(request.prompt, num_ids) or [0]
    else:
        num_ids = language.tokenizer.vocabulary_size
        prompt = encode_prompt(language, request.prompt) or [find_start_token(language, data)]
    variables = make_variables(run.load_weights(checkpoint, abstract, request.weights))
    warn(f"{job.spec.name}: step {parse_step(checkpoint)}{'' if request.weights == PARAMS else f', {request.weights}'}")
    read = make_decoder(model, variables, length, job.config.precision.compute, mesh)
    tokens = generate(read, request.sampling.make_chooser(num_ids), prompt, request.num_tokens, length)
    return stream_output(tokens, prompt, request.prompt, language)


def _draw(job: BaseTrainer) -> tuple[Any, Mesh]:
    """The abstract weights, and where they go: the first device of this process, or all, if they fill half of it."""
    for devices in (jax.local_devices()[:1], jax.local_devices()):
        mesh = make_mesh(dict.fromkeys(AXES, 1) | {"fsdp": len(devices)}, devices)
        abstract = job.weights(job.setup_builder.build_on_mesh(mesh, jax.random.key(job.spec.seed)).abstract_state)
        if sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract)) < read_device_memory_bytes() / 2:
            break
    return abstract, mesh
