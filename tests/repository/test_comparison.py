"""The feature table in .github/docs/coming_from.md: each row without "no" names an existing test."""

import ast
import re

from tests.repository.test_readme import ROOT

_ROW = re.compile(r"^\| (?P<there>[^|]+) \| (?P<here>.+) \| (?P<test>`[^`|]+`)? ?\|$", re.MULTILINE)


def find_rows() -> list[re.Match[str]]:
    text = (ROOT / ".github/docs/coming_from.md").read_text()
    return [row for row in _ROW.finditer(text) if row["there"].strip() not in ("there", "---")]


def test_each_supported_feature_names_an_existing_test() -> None:
    found = find_rows()
    assert len(found) >= 20
    for row in found:
        if row["here"].startswith("no"):
            assert row["test"] is None, row[0]
            continue
        assert row["test"] is not None, row[0]
        path, _, name = row["test"].strip("`").partition("::")
        tree = ast.parse((ROOT / "tests" / path).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, row["test"]
