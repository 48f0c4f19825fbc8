"""Every row of the table for those who come from another trainer that says yes names a test, and that test is there."""

import ast
import re

from tests.repository.test_readme import ROOT

_ROW = re.compile(r"^\| (?P<there>[^|]+) \| (?P<here>.+) \| (?P<test>`[^`|]+`)? ?\|$", re.MULTILINE)


def rows() -> list[re.Match[str]]:
    text = (ROOT / "experiments/README.md").read_text().partition("## Coming from another trainer")[2]
    return [row for row in _ROW.finditer(text) if row["there"].strip() not in ("there", "---")]


def test_each_row_says_no_or_is_run_by_a_test_that_is_there() -> None:
    found = rows()
    assert len(found) >= 20
    for row in found:
        if row["here"].startswith("no"):
            assert row["test"] is None, row[0]
            continue
        assert row["test"] is not None, row[0]
        path, _, name = row["test"].strip("`").partition("::")
        tree = ast.parse((ROOT / "tests" / path).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, row["test"]
