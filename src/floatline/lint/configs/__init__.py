"""Configurations: settings with places, from YAML, JSON, TOML, commands and Python calls, for one set of rules."""

from floatline.lint.configs.linting import CONFIG_ENDINGS, ConfigRule, lint_config
from floatline.lint.configs.view import UNKNOWN, Kind, Mode, RunConfig, Setting, SettingsDocument, read_dtype

__all__ = [
    "CONFIG_ENDINGS",
    "UNKNOWN",
    "ConfigRule",
    "Kind",
    "Mode",
    "RunConfig",
    "Setting",
    "SettingsDocument",
    "lint_config",
    "read_dtype",
]
