"""Predict whether pipeline parallelism would make the shipped specs faster, by arithmetic on the meshes of the planner.

For each spec and accelerator the script takes the best mesh of `plan --search`, before anything is compiled, and the
best one with P stages of equal layers. A stage has the devices of a smaller accelerator and 1/P of all layers, and
every choice below is the one that is best for the pipeline:

- Embedding and head cost a stage nothing beyond their share, and any P that divides layers and hosts is tried.
- The schedule is circular, with 1 to layers / P groups of layers in each stage, and its bubble is (P - 1) / (M groups)
  of the step for M micro-batches. M is at least P.
- Parameters of a stage are gathered once in a step and kept, or in every micro-batch and pass, whichever is faster and
  fits. A device keeps activations of min(M, P) micro-batches of its stage.
- Activations pass between stages in both directions, once for each group, beside the matmuls.

Two step times are printed: that of the planner, in which only collectives over `tensor`, `sequence` and `expert`, and
on TPUs reductions, are waited for, and one in which every collective is. Reality lies between the two.

    python -m tests.benchmarks.pipeline_axis [SPEC=ACCELERATOR ...]
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from runner.accelerator import Accelerator, parse_accelerator
from runner.errors import InvalidError
from runner.parallel.mesh import BATCH_AXES, STATE_AXES
from runner.plan.mesh import iter_meshes
from runner.plan.prediction import Prediction, Predictor
from runner.plan.program import Roofline
from runner.plan.search import Candidate, JobVariant, Search
from runner.train.compile import MEMORY_SHARE

CASES = (
    "gpt2_124m=v5e-16",
    "llama_1b=v5e-64",
    "gpt_7b=v5p-512",
    "llama3_8b=v5p-128",
    "llama3_8b=h100-128",
    "llama3_70b=v5p-2048",
    "llama3_70b=h100-512",
    "gpt3_175b=v5p-4096",
    "gpt3_175b=2xv5p-4096",
)
_GRADIENT_ITEMSIZE = 4


@dataclass(frozen=True)
class Choice:
    """One way to run a step, with its time in seconds if gathers and reductions overlap, and if nothing does."""

    text: str
    overlapped: float
    serial: float


def sum_seconds(times: Roofline) -> float:
    """Return the time of a step in which communication never overlaps with computation."""
    return max(times.compute, times.memory) + times.interconnect + times.network


def list_plain(candidates: list[Candidate]) -> Iterator[Choice]:
    """Yield the choices without a pipeline."""
    for candidate in candidates:
        predicted = candidate.prediction
        sizes = {axis: size for axis, size in candidate.mesh if size > 1}
        text = f"{sizes} micro-batch {predicted.micro_batch_examples} {dict(candidate.choices)}"
        yield Choice(text, predicted.rank[0], sum_seconds(predicted.times))


def list_pipelines(variants: list[JobVariant], accelerator: Accelerator, stages: int) -> Iterator[Choice]:
    """Yield the choices with this number of stages, each on its part of the accelerator."""
    part = split_accelerator(accelerator, stages)
    if part is None:
        return
    speeds = part.chip.speeds
    assert speeds is not None, "every accelerator of the table has peak figures"
    limit_bytes = part.chip.device_hbm_bytes * MEMORY_SHARE
    first = Predictor(variants[0].job, variants[0].flops, part)
    config = first.job.config
    sizing = first.job.sizing(dict.fromkeys(("data", "fsdp", "sequence", "expert", "tensor"), 1))
    length = sizing.get_shardable_length(config.data.units_per_example)
    for mesh in iter_meshes(part.num_devices or 1, length, sizing.num_experts):
        sizes = dict(mesh)
        micro_batches = first.list_micro_batches(sizes)
        if not micro_batches:
            continue
        state = first.measure_state(first.shard_state(mesh))
        for variant in variants:
            predictor = Predictor(variant.job, variant.flops, part)
            for micro_batch in micro_batches:
                number = config.train.global_batch_examples // (
                    micro_batch * math.prod(sizes[axis] for axis in BATCH_AXES)
                )
                if number < stages:
                    continue
                whole = predictor.predict(sizes, micro_batch, state)
                gradients = state.parameter_bytes * min(number, 2)
                activations = (whole.working_bytes - gradients) * min(number, stages) / stages
                needed = (whole.state_bytes + gradients) / stages + activations
                sent = micro_batch * config.data.units_per_example / (sizes["sequence"] * sizes["tensor"])
                sent *= 2 * number * config.model.width * predictor.sent_itemsize
                is_network = part.num_slices < accelerator.num_slices or not part.chip.is_tpu
                rate = speeds.network_bytes_per_second if is_network else speeds.interconnect_bytes_per_second
                seconds = sent / rate * part.chip.devices_per_chip
                kept = keep_parameters(predictor, whole, sizes, number, state.num_parameters)
                kept_bytes = state.num_parameters / sizes["tensor"] * (predictor.sent_itemsize + _GRADIENT_ITEMSIZE)
                forms = [("gathered in each pass", whole, needed), ("kept", kept, needed + kept_bytes / stages)]
                for name, predicted, form_bytes in forms:
                    if form_bytes > limit_bytes:
                        continue
                    for groups in _list_divisors(config.model.layers // stages):
                        yield make_choice(
                            predicted, stages, groups, number, seconds * groups, is_network, f"{sizes} {name}"
                        )


def make_choice(
    predicted: Prediction,
    stages: int,
    groups: int,
    number: int,
    send_seconds: float,
    is_network: bool,
    text: str,
) -> Choice:
    """Return the choice of a pipeline from the prediction of all layers on the devices of one stage."""
    times = Roofline(*(seconds / stages for seconds in vars(predicted.times).values()))
    times = replace(
        times,
        network=times.network + send_seconds * is_network,
        interconnect=times.interconnect + send_seconds * (not is_network),
    )
    bubble = 1 + (stages - 1) / (number * groups)
    return Choice(
        f"{stages} stages of {groups} group(s), {number} micro-batches of {predicted.micro_batch_examples}, {text}",
        max(max(times.compute, times.memory) * bubble, times.step_seconds) + predicted.exposed_seconds / stages,
        max(times.compute, times.memory) * bubble + times.interconnect + times.network,
    )


def keep_parameters(
    predictor: Predictor, whole: Prediction, sizes: dict[str, int], number: int, num_parameters: int
) -> Prediction:
    """Return the prediction with parameters gathered, and gradients scattered, once in a step."""
    passes = 3 if predictor.job.config.memory.remat == "layers" else 2
    shards = math.prod(sizes[axis] for axis in STATE_AXES)
    if shards == 1 or predictor.job.config.train.same_bits_devices is not None:
        return whole
    # What is sent in two rounds instead of (passes + 1) in each micro-batch; gathers are the same share of each time.
    again = number * (passes + 1)
    payload = num_parameters / sizes["tensor"] * predictor.sent_itemsize * (shards - 1) / shards
    share = min(payload * again / whole.sent_bytes, 1.0) * (1 - 2 / again)
    times = replace(
        whole.times,
        interconnect=whole.times.interconnect * (1 - share),
        network=whole.times.network * (1 - share),
    )
    return replace(whole, times=times)


def split_accelerator(accelerator: Accelerator, stages: int) -> Accelerator | None:
    """Return the part of an accelerator that a stage has: whole slices, or a smaller slice; None if there is none."""
    if accelerator.num_slices % stages == 0:
        return replace(accelerator, num_slices=accelerator.num_slices // stages)
    if stages % accelerator.num_slices:
        return None
    inside = stages // accelerator.num_slices
    chips = accelerator.num_chips // inside
    if accelerator.num_chips % inside or chips not in accelerator.chip.slice_sizes:
        return None
    return replace(accelerator, num_slices=1, num_chips=chips)


def _list_divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def main() -> None:
    """Print the best choice with and without a pipeline for each case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", default=CASES, metavar="SPEC=ACCELERATOR")
    for case in parser.parse_args().cases:
        spec, name = case.split("=")
        accelerator = parse_accelerator(name)
        if accelerator is None:
            raise InvalidError(f"{case}: name an accelerator")
        overrides = (f"topology.accelerator={name}", "topology.mesh={data: auto}")
        search = Search(f"specs/{spec}.yaml", overrides)
        variants = search.list_variants()
        plain = list(list_plain(search.list_candidates(variants, accelerator, accelerator.chip.device_hbm_bytes)))
        layers = variants[0].job.config.model.layers
        pipelines = [
            choice for stages in _list_divisors(layers)[1:] for choice in list_pipelines(variants, accelerator, stages)
        ]
        print(f"\n{spec} on {name}")
        for label, key in (("gathers overlap", "overlapped"), ("nothing overlaps", "serial")):
            best = min(plain, key=lambda choice: getattr(choice, key), default=None)
            piped = min(pipelines, key=lambda choice: getattr(choice, key), default=None)
            if best is None or piped is None:
                print(f"  {label}: nothing fits {'without' if best is None else 'with'} a pipeline")
                continue
            gain = 1 - getattr(piped, key) / getattr(best, key)
            print(f"  {label}: {getattr(best, key):.3f} s without, {getattr(piped, key):.3f} s with: {gain:+.1%}")
            print(f"    without: {best.text}\n    with:    {piped.text}", flush=True)


if __name__ == "__main__":
    main()
