"""The Tangram Chat gateway: HTTP API, chat pages, and the supervisor of the engine process."""

__version__ = "0.1.0"
