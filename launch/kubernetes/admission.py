"""What an API server refuses, refused before it is asked, in one line that names the option.

The rules are Kubernetes' own (apimachinery's `util/validation` and `api/resource`, `core/validation`), and those of
image references (distribution's `reference`), which only the kubelet looks at: a pod with a bad one waits for ever.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from runner.errors import InvalidError

MOST_PODS = 100_000  # of an indexed Job
_MOST_ANNOTATION_BYTES = 256 * 1024  # of all annotations of one object
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_ESCAPED_BY_GO = "<>&\u2028\u2029"  # by 6 bytes each, in JSON

_DNS_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_IN_A_LABEL = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_DOMAIN = r"[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?"
_COMPONENT = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"


@dataclass(frozen=True)
class Rule:
    """What a value must look like.

    Attributes:
        pattern: of all of it.
        most: characters.
        words: what it needs, for a person.
    """

    pattern: str
    most: int
    words: str

    def check(self, option: str, value: str) -> None:
        """Raise `InvalidError` unless the value is such a one."""
        if len(value) > self.most or re.fullmatch(self.pattern, value, re.ASCII) is None:
            raise InvalidError(f"{option} {value!r:.100}: needs {self.words}")


NAMESPACE = Rule(_DNS_LABEL, 63, "at most 63 lower case letters, digits and '-', no '-' first or last")
OBJECT = Rule(rf"{_DNS_LABEL}(\.{_DNS_LABEL})*", 253, "at most 253 lower case letters, digits, '-' and '.'")
LABEL = Rule(
    rf"({_DNS_LABEL}(\.{_DNS_LABEL})*/)?{_IN_A_LABEL}",
    317,
    "[DOMAIN/]NAME of at most 63 letters, digits, '-', '_', '.'",
)
LABEL_VALUE = Rule(
    rf"({_IN_A_LABEL})?", 63, "at most 63 letters, digits, '-', '_' and '.', a letter or digit at the ends"
)
VARIABLE = Rule(r"(?!\.\.?$|\.\.)[-._a-zA-Z][-._a-zA-Z0-9]*", 4096, "letters, digits, '_', '-' and '.', no digit first")
QUANTITY = Rule(r"(\d+\.?\d*|\.\d+)([munkMGTPE]|[KMGTPE]i|[eE][+-]?\d{1,2})?", 32, "a quantity such as 4, 500m, 16Gi")
PATH = Rule(r"/[^:\0]*", 4096, "an absolute path without ':'")
IMAGE = Rule(
    rf"({_DOMAIN}(\.{_DOMAIN})*(:\d+)?/)?{_COMPONENT}(/{_COMPONENT})*(:\w[\w.-]{{0,127}})?(@[A-Za-z][\w.+-]*:[0-9a-fA-F]{{32,}})?",
    512,
    "an image such as registry/job:1, in lower case but for the tag",
)


def check_options(parsed: argparse.Namespace) -> None:
    """Raise `InvalidError` for the first option that an API server, or a kubelet, would refuse."""
    IMAGE.check("--image", parsed.image)
    single = (
        ("namespace", NAMESPACE),
        ("service_account", OBJECT),
        ("priority_class", OBJECT),
        ("cpu", QUANTITY),
        ("memory", QUANTITY),
        ("workdir", PATH),
    )
    for name, rule in single:
        if getattr(parsed, name) is not None:
            rule.check(f"--{name.replace('_', '-')}", getattr(parsed, name))
    for label, value in parsed.node_selector:
        LABEL.check("--node-selector", label)
        LABEL_VALUE.check(f"--node-selector {label}", value)
    for name, _ in parsed.env:
        VARIABLE.check("--env", name)
    for secret in parsed.env_from_secret:
        OBJECT.check("--env-from-secret", secret)
    for claim, path in parsed.volume_claim:
        OBJECT.check("--volume-claim", claim)
        PATH.check(f"--volume-claim {claim}", path)


def check_mounts(paths: Sequence[str]) -> None:
    """Raise `InvalidError` if a path is none to mount at, or two are one."""
    for path in paths:
        PATH.check("the mount at", path)
        if ".." in PurePosixPath(path).parts:
            raise InvalidError(f"the mount at {path}: needs a path without '..'")
    twins = [path for path in paths if sum(PurePosixPath(other) == PurePosixPath(path) for other in paths) > 1]
    if twins:
        raise InvalidError(f"{twins[0]} would be mounted twice; needs a path for each volume")


def check_size(manifest: Mapping[str, object], spec_bytes: int) -> None:
    """Raise `InvalidError` if the manifest does not fit where kubectl puts a copy of it, an annotation of itself."""
    text = json.dumps(manifest, separators=(",", ":"), ensure_ascii=False)
    size = len(text.encode()) + 5 * sum(map(text.count, _ESCAPED_BY_GO)) + len(_LAST_APPLIED)
    if size > _MOST_ANNOTATION_BYTES:
        raise InvalidError(
            f"the manifest has {size} bytes, {spec_bytes} of them the spec's; kubectl keeps a copy in an annotation, "
            f"which ends at {_MOST_ANNOTATION_BYTES}; needs a smaller spec (its comments count too) or fewer options"
        )
