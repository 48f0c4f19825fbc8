"""The micro-batch that was chosen for some hardware, as manifests remember it: another one would move the bits."""

from runner.checkpoint.manifest import newest_manifest
from runner.hosts.agreement import Hosts
from runner.storage import JsonObject, Store
from runner.train.batch_layout import BatchLayout
from runner.train.blueprint import Blueprint
from runner.train.mesh import AXES


def record_of(blueprint: Blueprint, layout: BatchLayout, hosts: Hosts) -> JsonObject:
    """For the manifest: the hardware, and the micro-batch chosen for it."""
    return blueprint.hardware(hosts.num_processes) | {"micro_batch_examples": layout.micro_batch_examples}


def known_micro_batch(blueprint: Blueprint, store: Store, hosts: Hosts) -> int | None:
    """The size that an earlier attempt chose on the same hardware, else None. Called on every host.

    Until this attempt has claimed the directory an earlier one may still commit: the answer then is the one to go by.
    """
    hardware = blueprint.hardware(hosts.num_processes)
    ones = dict.fromkeys(AXES, 1)  # a manifest may be older than an axis
    manifest = newest_manifest(store) if hosts.is_main else None
    record = hosts.agree(manifest and manifest.topology)
    if not record or hardware != {key: record.get(key) for key in hardware} | {"mesh": ones | record.get("mesh", {})}:
        return None
    return record.get("micro_batch_examples")
