"""The data of a job, looked for as the job would: each source reached, its tokens against what the run takes of it."""

import time
from dataclasses import dataclass

from runner.data import Dataset
from runner.plan.checks import Findings
from runner.plan.figure import Section
from runner.train.design import Design


@dataclass(frozen=True)
class DataCheck:
    """What is known of the data of a job after looking for them."""

    section: Section
    is_found: bool
    can_draw: bool  # what the train step is made of is known, if the data was needed for it


def load_data(design: Design, findings: Findings) -> tuple[Dataset | None, bool]:
    """The data as the job would load them, None if they cannot be; and whether the vocabulary is known and fits.

    Where the total is in epochs, they are counted: data that do not serve that cannot be used either.
    """
    with findings.collect():
        found, _ = design.dataset, design.counted
        with findings.collect():
            found.refuse_vocabulary(design.vocabulary_size)
            return found, True
        return found, False
    return None, not design.needs_data


def check_data(design: Design, findings: Findings, num_hosts: int) -> DataCheck:
    """Load the data, as each of `num_hosts` would: its tokens against what the run takes, its first batch."""
    section = Section("data")
    began = time.perf_counter()
    found, can_draw = load_data(design, findings)
    if found is None:
        return DataCheck(section, False, can_draw)
    batch, is_read = design.config.train.global_batch_examples, False
    with findings.collect():
        found.rows("train", 0, -(-batch // num_hosts))
        is_read = True
    seconds = time.perf_counter() - began
    _describe(section, found, design.counted.total_steps * batch)
    if is_read:
        section.add("first batch", seconds, "seconds", "measured", "the data opened and a host's part read, from here")
    return DataCheck(section, is_read, can_draw)


def _describe(section: Section, found: Dataset, num_examples: int) -> None:
    """What each source holds, and what it gives to the run."""
    section.add("fingerprint", found.fingerprint, "text", "counted")
    shares = found.shares(num_examples)
    for part, share in zip(found.parts, shares, strict=True):
        of = f" of {part.name}" if len(shares) > 1 else ""
        section.add(f"source{of}", part.label.partition("=")[2], "text", "counted", "reached")
        section.add(f"training examples{of}", part.examples.num_examples, "", "counted", "of sequence_length tokens")
        section.add(f"training tokens{of}", part.num_tokens, "", "counted")
        section.add(f"epochs{of}", share.epochs, "", "counted", f"{share.tokens:,} tokens of the run")
    for name, examples in found.validation.items():
        section.add(
            f"{name} examples" if name == "validation" else f"validation examples of {name}",
            examples.num_examples,
            "",
            "counted",
        )
    if fetched := sum(share.bytes_fetched for share in shares):
        section.add("fetched from buckets", fetched, "bytes", "counted", "by all hosts together, if none is cached")
    if copied := sum(part.source.bytes_copied for part in found.parts):
        section.add("copied from buckets", copied, "bytes", "counted", "by each host, whole, at its first start")
