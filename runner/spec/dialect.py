"""The YAML that specs are written in: one document, plain values only, every key once.

Owns what a scalar means and the place of every key. Knows no key of a spec.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import yaml

from runner.errors import SpecError
from runner.spec.wording import KeyPath, Place


def parse(text: str, at: Callable[[int], Place]) -> tuple[Any, dict[KeyPath, Place]]:
    """Plain data of one YAML document and the place of every key in it; `at` makes a place of a line."""
    try:
        loader = _Loader(text, at)
        node = loader.get_single_node()
        data = None if node is None else loader.build(node, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        raise _unreadable(at(mark.line + 1 if mark else 1), reason) from None
    except yaml.reader.ReaderError as error:
        raise _unreadable(at(text[: error.position].count("\n") + 1), error.reason) from None
    except RecursionError:
        raise _unreadable(at(1), "nested too deeply") from None
    if loader.problems:
        raise SpecError("\n".join(loader.problems))
    return data, loader.places


def _unreadable(place: Place, reason: str) -> SpecError:
    return SpecError(place.blame((), f"unreadable YAML: {reason}"))


class _Loader(yaml.SafeLoader):
    """SafeLoader with the plain scalars of YAML 1.2: `1e-3` is a number; `on`, `012` and `2024-01-01` are text."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML's own way to replace the resolvers of the base class

    def __init__(self, text: str, at: Callable[[int], Place]):
        super().__init__(text)
        self.at = at
        self.places: dict[KeyPath, Place] = {(): at(1)}
        self.problems: list[str] = []

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if getattr(event, "anchor", None) or getattr(event, "tag", None):
            raise yaml.composer.ComposerError(None, None, "anchors, aliases and tags are refused", event.start_mark)
        return super().compose_node(parent, index)

    def build(self, node: yaml.Node, path: KeyPath) -> Any:
        """Plain data of a node; notes the place of each key and, as problems, what cannot be read."""
        if isinstance(node, yaml.MappingNode):
            return self._build_mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            items = [((*path, str(i)), item) for i, item in enumerate(node.value)]
            self.places.update({child: self.at(item.start_mark.line + 1) for child, item in items})
            return [self.build(item, child) for child, item in items]
        try:
            value = self.construct_object(node)
        except ValueError:  # Python refuses to read a whole number of thousands of digits
            value = math.inf
        if isinstance(value, float) and not math.isfinite(value):
            self.problems.append(self.places[path].blame(path, f"{node.value[:20]} is too large a number"))
        return value

    def _build_mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            place = self.at(key_node.start_mark.line + 1)
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.append(place.blame((), "a key must be text, not a list or a mapping"))
                continue
            key = key_node.value  # as written: `on` and `1` are keys like any other
            child = (*path, key)
            if key in data:
                repeat = f"{'.'.join(child)}: duplicate key, first given at {self.places[child].text}"
                self.problems.append(place.blame((), repeat))
                continue
            self.places[child] = place
            data[key] = self.build(value_node, child)
        return data


for _tag, _pattern, _first in (
    ("null", r"~|null|", ["~", "n", ""]),
    ("bool", r"true|false", list("tf")),
    ("int", r"[-+]?(0|[1-9][0-9_]*)", list("-+0123456789")),
    ("float", r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+", list("-+0123456789")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)


class Dumper(yaml.SafeDumper):
    """Writes what `parse` reads back as the same value."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        return True
