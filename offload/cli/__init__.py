"""The ``offload`` command. Heavy imports wait until a configuration is known to be good."""

import os

# OpenMP's threads spin while they wait for work, and on few or busy cores take the time of our I/O threads and of each
# other: a step then takes many times as long. The variable is read once, when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from offload.cli.main import main

__all__ = ["main"]
