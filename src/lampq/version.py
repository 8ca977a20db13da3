"""The version of lampq."""

__version__ = "0.1.0"
