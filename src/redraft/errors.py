"""The errors a user can cause; each names the value, the limit and the remedy in one line."""

from __future__ import annotations


class RedraftError(Exception):
    """Base of all errors that a user can cause and mend."""


class ConfigError(RedraftError):
    """A setting is out of range or contradicts another."""


class ModelFileError(RedraftError):
    """A model file is missing, damaged, incomplete or of a kind that is not supported."""


class RequestError(RedraftError):
    """A request cannot be served as it stands."""


class TaskFileError(RedraftError):
    """A task file breaks its format."""


class StateError(RedraftError):
    """An operation on a slot's state was refused; nothing was changed."""


class ServerError(RedraftError):
    """A server cannot be reached, refuses us, or does not speak the OpenAI API."""
