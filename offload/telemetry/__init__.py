"""What a run records and shows: its directory, progress, seconds by phase, memory of the process."""

from offload.telemetry.process import peak_rss_bytes
from offload.telemetry.progress import Progress, format_bytes
from offload.telemetry.run_directory import RunDirectory, dump_json
from offload.telemetry.timers import PhaseTimers

__all__ = ["PhaseTimers", "Progress", "RunDirectory", "dump_json", "format_bytes", "peak_rss_bytes"]
