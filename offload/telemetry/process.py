"""What the operating system says about this process."""

from __future__ import annotations

import resource
import sys


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far, in bytes.

    ``VmHWM`` where the kernel has it: ``ru_maxrss`` of a new process starts at its parent's peak.
    """
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
