"""Text from a run's model, a piece at a time."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import jax

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


@dataclass(frozen=True)
class SampleRequest:
    """Request for `num_tokens` tokens after `prompt`.

    Attributes:
        step: number of a step, `newest` or `best`.
        sampling: temperature, top-p and seed.
        weights: `params`, or an average such as `ema_0.999`.
    """

    prompt: str = ""
    step: str = NEWEST
    num_tokens: int = 200
    sampling: Sampler = field(default_factory=Sampler)
    weights: str = PARAMS

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise InvalidError(f"--tokens {self.num_tokens}: needs at least 1")


def sample(run: ReadOnlyRun, request: SampleRequest) -> Iterator[str]:
    """Return an iterator over the prompt and the text of each token; ids between spaces if no tokenizer is known.

    Raises:
        InvalidError: the request does not fit the run; raised before the first piece.
    """
    job = run.job
    data, length = job.config.data, job.config.data.sequence_length
    try:
        codec: TextCodec | None = load_data_codec(data)
    except DataError as error:
        warn(f"ids instead of text: {error}")
        codec = None
    # The checkpoint is found before the model is built, so that a wrong step is reported at once.
    checkpoint = run.find_checkpoint(request.step)

    # One device of this process holds the weights, unless they would fill half of its memory: then all devices do.
    for devices in (jax.local_devices()[:1], jax.local_devices()):
        mesh = make_mesh(dict.fromkeys(AXES, 1) | {"fsdp": len(devices)}, devices)
        abstract = job.weights(job.setup_builder.build_on_mesh(mesh, jax.random.key(job.spec.seed)).abstract_state)
        if sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract)) < read_device_memory_bytes() / 2:
            break

    model = job.model()
    num_ids = infer_vocabulary_size(model, make_variables(abstract), length)
    if codec is not None and codec.tokenizer.vocabulary_size > num_ids:
        size = codec.tokenizer.vocabulary_size
        raise InvalidError(
            f"{run.store.url}: its tokenizer has {size:,} ids, its model {num_ids:,}: not the same run's"
        )
    if codec is None:
        prompt = parse_ids(request.prompt, num_ids) or [0]
    else:
        num_ids = codec.tokenizer.vocabulary_size  # ids of the model beyond the tokenizer have no text
        prompt = encode_prompt(codec, request.prompt) or [find_start_token(codec, data)]
    variables = make_variables(run.load_weights(checkpoint, abstract, request.weights))
    warn(f"{job.spec.name}: step {parse_step(checkpoint)}{'' if request.weights == PARAMS else f', {request.weights}'}")
    decoder = make_decoder(model, variables, length, job.config.precision.compute, mesh)
    tokens = generate(decoder, request.sampling.make_chooser(num_ids), prompt, request.num_tokens, length)
    return stream_output(tokens, prompt, request.prompt, codec)
