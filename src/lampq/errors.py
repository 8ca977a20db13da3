"""Every exception lampq raises on purpose."""

from __future__ import annotations


class LampqError(Exception):
    """Base of all errors a user can act on; its message is one sentence."""


class ConfigError(LampqError):
    """An option has a value that cannot be used."""


class DataError(LampqError):
    """Images or labels are missing, unreadable or do not fit the model."""


class GraphError(LampqError):
    """The model has nothing lampq can quantize, or a site it names does not exist."""


class BudgetError(LampqError):
    """No assignment of widths fits the budget."""


class FormatError(LampqError):
    """A file is not what its name or header says."""


class ExportError(LampqError):
    """A model cannot be exported, or its exported form is not what it should be."""


class MissingDependencyError(LampqError):
    """An optional package is needed and not installed."""
