"""Sizes of a decoder by one dial: the depth, from which width, heads, tokens, batch and learning rate follow.

A base spec is one member of the family, with the learning rate and batch that suit it; other sizes are relative to it.
Each derived value comes with its rule and the rule's source. N counts all parameters, embeddings included, as
Chinchilla does: laws in N without embeddings bend at small sizes (Pearce and Song, arXiv:2406.12907).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.checkpoint.leaves import flatten_with_names
from runner.errors import InvalidError
from runner.plan.checks import Findings, open_job
from runner.plan.prediction import SINGLE_DEVICE, build_abstract
from runner.plan.program import count_elements
from runner.plan.search import Search
from runner.spec.document import format_overrides
from runner.trainer import BaseTrainer

_BATCH_POWER = 0.383  # of the tokens, arXiv:2505.13738
_DIALS = ("layers", "width", "heads")
_DERIVED = (
    *(f"config.model.{key}" for key in _DIALS),
    *(f"config.train.{key}" for key in ("total_steps", "total_tokens", "total_epochs")),
)
# Sections of a model that add sizes of which no rule says how they grow.
_OTHER_SIZES = ("moe", "latent", "linear", "layer_embedding_width", "full_heads", "key_value_sharing")
_EMBEDDINGS = ("embedding", "positions")  # last part of the names of these parameters


@dataclass(frozen=True, kw_only=True)
class DecoderSize:
    """One size of a family of decoders."""

    depth: int
    tokens_per_parameter: float  # as asked for; `tokens` are those of whole steps
    parameters: int  # embeddings included
    embedding_parameters: int  # of embeddings of tokens and positions
    tokens: int
    values: Mapping[str, Any]  # values by dotted key of the spec
    rules: Mapping[str, str]  # rule and source of each, by dotted key


def derive_sizes(
    spec: str,
    overrides: Sequence[str],
    depths: Sequence[int],
    ratios: Sequence[float],
    width_per_layer: int,
    head_size: int | None,
) -> list[DecoderSize]:
    """Return the sizes of a base spec, for each depth with each ratio of tokens to parameters.

    The size of a head is that of the base, unless `head_size` is given. Raises `InvalidError` if the spec is not of a
    decoder whose sizes follow from its depth.
    """
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key in _DERIVED:
            raise InvalidError(f"--set {override}: {key} follows from the depth; leave it out")
    search = Search(spec, tuple(overrides))
    job = search.open_job([])
    document, config, model = job.document, job.setup_builder.config_in_steps, job.config.model
    if not config.data.has_tokens or not all(isinstance(getattr(model, key, None), int) for key in _DIALS):
        needed = f"needs a decoder, whose data are tokens and whose model has {', '.join(_DIALS)}"
        raise document.error("job", f"{job.spec.job}: {needed}, such as experiments.gpt:PretrainGPT")
    for key in _OTHER_SIZES:
        if getattr(model, key, None) is not None:
            raise document.error(f"config.model.{key}", "no rule says how it grows with the depth; leave it out")
    if config.stages:
        raise document.error("config.stages", "stages begin at steps, whose number differs by size; leave them out")

    length, schedule = config.data.units_per_example, config.schedule
    batch, steps, rate = config.train.global_batch_examples, config.total_steps, config.optimizer.learning_rate
    head_dim, key_heads = getattr(model, "head_dim", "auto"), getattr(model, "key_value_heads", None)
    head: Any = head_size or (model.width // model.heads if head_dim == "auto" else head_dim)
    has_mup = hasattr(model, "base_width") and config.optimizer.name == "adamw"
    mlp_width = getattr(model, "mlp_width", None)

    def open_size(values: Mapping[str, Any]) -> BaseTrainer:
        findings = Findings()
        found = open_job(search.load_document(format_overrides(values)), findings)
        if not isinstance(found, BaseTrainer):
            raise InvalidError("\n".join(findings.problems))
        return found

    sizes = []
    for depth in depths:
        width = head * math.ceil(depth * width_per_layer / head)
        heads = width // head
        shape: dict[str, tuple[Any, str]] = {
            "config.model.layers": (depth, "the dial"),
            "config.model.width": (width, f"{width_per_layer} a layer, in heads of {head} (nanochat)"),
            "config.model.heads": (heads, f"width / {head}"),
        }
        if head_dim != "auto":
            shape["config.model.head_dim"] = head, "constant (mu-P)"
        if isinstance(mlp_width, int):
            share = mlp_width / model.width
            new = head * max(1, round(share * width / head))
            shape["config.model.mlp_width"] = new, f"{share:.4g} x width, as the base, in multiples of {head}"
        if isinstance(key_heads, int):
            most = max(1, heads * key_heads // model.heads)
            new = max(each for each in range(1, most + 1) if heads % each == 0)
            shape["config.model.key_value_heads"] = new, f"one for {model.heads / key_heads:g} heads, as the base"
        if has_mup:
            new = model.base_width or model.width
            shape["config.model.base_width"] = new, "width that the learning rate suits (mu-P, arXiv:2203.03466)"

        # With the vocabulary of the base nothing is read again to count the parameters.
        counted = {key: value for key, (value, _) in shape.items()}
        counted["config.model.vocabulary_size"] = job.setup_builder.vocabulary_size
        abstract = build_abstract(open_size(counted).setup_builder, SINGLE_DEVICE).abstract_state
        leaves = flatten_with_names(abstract.params)
        parameters = count_elements(leaves)
        embeddings = {name: leaf for name, leaf in leaves.items() if name.rpartition(".")[2] in _EMBEDDINGS}

        for ratio in ratios:
            growth = ratio * parameters / (steps * batch * length)
            new_batch = 2 ** max(0, round(math.log2(batch * growth**_BATCH_POWER)))
            new_steps = max(1, round(ratio * parameters / (new_batch * length)))
            rules = shape | {
                "config.train.total_steps": (new_steps, f"{ratio:g} tokens for each of {parameters:,} parameters"),
                "config.train.global_batch_examples": (
                    new_batch,
                    f"{batch} of the base x growth of the tokens^{_BATCH_POWER}, a power of two (arXiv:2505.13738)",
                ),
            }
            for key in ("total_tokens", "total_epochs"):
                if getattr(job.config.train, key) is not None:
                    rules[f"config.train.{key}"] = None, "the total is in steps"
            if config.train.micro_batch_examples != "auto" and config.train.micro_batch_examples > new_batch:
                rules["config.train.micro_batch_examples"] = new_batch, "at most the batch"
            new = max(1, round(config.eval.batches * batch / new_batch))
            rules["config.eval.batches"] = new, f"{config.eval.batches * batch} validation examples, as the base"
            if rate is not None:
                factor = math.sqrt(new_batch / batch) * (1.0 if has_mup else math.sqrt(model.width / width))
                rule = f"{rate:g} of the base x sqrt(batch / {batch})"
                rule += "" if has_mup else f" x sqrt({model.width} / width) (nanochat)"
                rules["config.optimizer.learning_rate"] = float(f"{rate * factor:.4g}"), rule
                if schedule.final_learning_rate:
                    new_rate = float(f"{schedule.final_learning_rate * factor:.4g}")
                    rules["config.schedule.final_learning_rate"] = new_rate, "in proportion to the learning rate"
            for key in ("warmup_steps", "decay_steps"):
                if number := getattr(schedule, key):
                    new = max(1, round(number / steps * new_steps))
                    rules[f"config.schedule.{key}"] = new, f"{number / steps:.2%} of the steps, as the base"
            values = {key: value for key, (value, _) in rules.items()}
            open_size(values)
            sizes.append(
                DecoderSize(
                    depth=depth,
                    tokens_per_parameter=ratio,
                    parameters=parameters,
                    embedding_parameters=count_elements(embeddings),
                    tokens=new_steps * new_batch * length,
                    values=values,
                    rules={key: rule for key, (_, rule) in rules.items()},
                )
            )
    return sizes
