"""Requests, slots and steps."""

from redraft.engine.engine import Engine
from redraft.engine.request import Event, FinishReason, Generation, Request, Status

__all__ = ["Engine", "Event", "FinishReason", "Generation", "Request", "Status"]
