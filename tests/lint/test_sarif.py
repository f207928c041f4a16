"""SARIF, which code scanning reads: what the schema asks for, and fixes that do what --fix does."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from floatline.lint import RULES, lint_text
from floatline.lint.fixing import fix_text
from floatline.lint.rule import read_examples
from floatline.report.lint import as_sarif

EXAMPLES = [
    (rule, bad) for rule in RULES.values() for bad in read_examples(rule.bad) if bad.fixed and bad.file.endswith(".py")
]


@pytest.mark.parametrize(("rule", "bad"), EXAMPLES, ids=[f"{rule.code}-{i}" for i, (rule, _) in enumerate(EXAMPLES)])
def test_a_fix_in_sarif_is_the_one_that_is_made(rule, bad, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.py").write_text(bad.source, encoding="utf-8")
    findings = [one for one in lint_text(bad.source, "a.py", rules=[rule], half=True) if one.fix]
    first = as_sarif(findings)["runs"][0]["results"][0]["fixes"][0]
    (change,) = first["artifactChanges"]
    assert change["artifactLocation"] == {"uri": "a.py"}
    (replaced,) = change["replacements"]
    region, lines = replaced["deletedRegion"], bad.source.split("\n")
    begin, end = region["startLine"] - 1, region["endLine"] - 1
    before = "\n".join([*lines[:begin], lines[begin][: region["startColumn"] - 1]])
    after = "\n".join([lines[end][region["endColumn"] - 1 :], *lines[end + 1 :]])
    text = f"{before}{replaced['insertedContent']['text']}{after}"
    assert fix_text(text, "a.py", rules=[rule], unsafe=True)[0] == bad.fixed  # the first of them, then the others


# What the schema of SARIF 2.1.0 says of the objects that are written: the keys that must be there, and the others.
SHAPES = {
    "log": ({"version", "runs"}, {"$schema"}),
    "run": ({"tool"}, {"results", "columnKind"}),
    "driver": ({"name"}, {"version", "rules", "informationUri"}),
    "rule": ({"id"}, {"name", "shortDescription", "fullDescription", "help", "helpUri"}),
    "result": ({"message"}, {"ruleId", "level", "locations", "partialFingerprints", "properties", "fixes"}),
    "fix": ({"artifactChanges"}, {"description"}),
    "change": ({"artifactLocation", "replacements"}, set()),
    "replacement": ({"deletedRegion"}, {"insertedContent"}),
    "region": (set(), {"startLine", "startColumn", "endLine", "endColumn"}),
}


def check(shape, written):
    required, others = SHAPES[shape]
    assert required <= set(written) <= required | others, (shape, written)


def check_region(region):
    check("region", region)
    assert all(isinstance(number, int) and number >= 1 for number in region.values())
    assert (region["startLine"], region["startColumn"]) <= (region["endLine"], region["endColumn"])


def test_every_object_has_what_the_schema_asks_for_and_nothing_else():
    found = [one for rule in RULES.values() for bad in read_examples(rule.bad) for one in _lint(rule, bad)]
    log = as_sarif(found)
    check("log", log)
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    check("run", run)
    assert run["columnKind"] == "unicodeCodePoints"
    check("driver", run["tool"]["driver"])
    rules = run["tool"]["driver"]["rules"]
    assert len({rule["id"] for rule in rules}) == len(rules) > 50
    for rule in rules:
        check("rule", rule)
        assert re.fullmatch(r"https://\S+", rule["helpUri"])
    for result in run["results"]:
        check("result", result)
        assert result["message"]["text"] and result["level"] == "warning"
        check_region(result["locations"][0]["physicalLocation"]["region"])
        for fix in result.get("fixes", ()):
            check("fix", fix)
            check("change", fix["artifactChanges"][0])
            check("replacement", fix["artifactChanges"][0]["replacements"][0])
            check_region(fix["artifactChanges"][0]["replacements"][0]["deletedRegion"])


def _lint(rule, bad):
    found = lint_text(bad.source, bad.file, rules=[rule], half=True)
    return [replace(one, fix="") for one in found]  # there is no file to change
