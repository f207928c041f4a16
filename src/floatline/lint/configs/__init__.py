"""Configurations: settings with places, from YAML, JSON, TOML and Python calls, for one set of rules."""

from floatline.lint.configs.linting import CONFIG_ENDINGS, ConfigRule, lint_config
from floatline.lint.configs.view import UNKNOWN, Config, Document, Kind, Mode, Setting, read_dtype

__all__ = [
    "CONFIG_ENDINGS",
    "UNKNOWN",
    "Config",
    "ConfigRule",
    "Document",
    "Kind",
    "Mode",
    "Setting",
    "lint_config",
    "read_dtype",
]
