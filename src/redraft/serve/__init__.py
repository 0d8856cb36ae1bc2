"""An OpenAI-compatible HTTP server around one engine."""

from redraft.serve.app import ServerSettings, create_app
from redraft.serve.worker import EngineWorker

__all__ = ["EngineWorker", "ServerSettings", "create_app"]
