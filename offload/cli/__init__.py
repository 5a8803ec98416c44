"""The ``offload`` command. Heavy imports wait until a configuration is known to be good."""

from offload.cli.main import main

__all__ = ["main"]
