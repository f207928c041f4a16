"""The findings of a configuration, and the base of the rules that make them."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from floatline.lint.baseline import drop_allowed, read_allowed
from floatline.lint.configs.calls import read_calls
from floatline.lint.configs.commands import SHELL_ENDINGS, read_commands
from floatline.lint.configs.files import read_documents
from floatline.lint.configs.kinds import find_configs
from floatline.lint.configs.view import RunConfig, Setting
from floatline.lint.reading.source import Source
from floatline.lint.rule import LintFinding, Rule

if TYPE_CHECKING:
    from floatline.fixes import FixKind
    from floatline.hardware import Hardware

CONFIG_ENDINGS = (".yaml", ".yml", ".json", ".toml", *SHELL_ENDINGS)


class ConfigRule(Rule, ABC):
    """A rule about settings, whatever they are written in.

    `visit_config` sees those of YAML, JSON and TOML, of commands in shell scripts and of calls in Python alike;
    `words` decide for all of them whether a file is looked at.
    """

    @abstractmethod
    def visit_config(self, config: RunConfig) -> None:
        """One known group of settings."""

    def visit_Module(self, node: ast.Module) -> None:  # noqa: N802
        """Python: the calls that configure something."""
        del node
        for config in read_calls(self.source).configs:
            self.visit_config(config)

    def report_setting(self, setting: Setting, *, seen: str = "", advice: str = "", fix: FixKind | None = None) -> None:
        """Flag a setting.

        Args:
            setting: Where.
            seen: What stands there, with its numbers; '' is the rule's message.
            advice: '' is the rule's.
            fix: As in `Rule.report`.
        """
        self.report_at(
            setting.line,
            setting.column,
            end_line=setting.end_line,
            end_column=setting.end_column,
            seen=seen,
            advice=advice,
            fix=fix,
        )


def lint_config(text: str, file: str, *, rules: Sequence[type[Rule]], on: Hardware | None = None) -> list[LintFinding]:
    """The findings of one configuration, in the order of its lines.

    A file that is broken, or that no known tool reads, has none.

    Args:
        text: The file.
        file: Its name; its ending says what it is.
        rules: What is looked for; those about code are not asked.
        on: The hardware that the run is for, where it is known.
    """
    wanted = [
        rule
        for rule in rules
        if issubclass(rule, ConfigRule) and any(word in text for word in rule.words or rule.calls)
    ]
    if not wanted:
        return []
    source = Source("", file)  # a configuration has lines, and no tree
    source.text, source.lines = text, text.split("\n")
    made = [rule(source, on=on) for rule in wanted]
    first = 0
    read = read_commands if file.endswith(SHELL_ENDINGS) else read_documents
    for document in read(text, file):
        find_configs(document)
        first = first or min((setting.line for setting in document.settings.values()), default=0)
        for rule in made:
            for config in document.configs:
                rule.visit_config(config)
    findings = list(dict.fromkeys(finding for rule in made for finding in rule.found))
    findings = drop_allowed(findings, *read_allowed(source.lines, first))
    return sorted(findings, key=lambda one: (one.line, one.column, one.rule.code))
