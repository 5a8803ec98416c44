"""What the machine grants, read from made-up /proc and /sys trees."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from offload.machine import free_disk, host_memory

GIB = 1 << 30


def tree(root: Path, lines: str, files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(lines)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_cgroups_the_machine_is_the_limit(tmp_path: Path) -> None:
    memory = host_memory(tmp_path)
    assert memory.limited_by == "the machine's available memory"
    assert 0 < memory.available <= psutil.virtual_memory().total


def test_version_2_counts_reclaimable_cache_as_available(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        "0::/job\n",
        {
            "job/memory.max": f"{4 << 20}\n",
            "job/memory.current": f"{3 << 20}\n",
            "job/memory.stat": f"anon 5\ninactive_file {1 << 19}\nactive_file 7\n",
        },
    )
    memory = host_memory(root)
    assert memory.available == (1 << 20) + (1 << 19)
    assert "job" in memory.limited_by and "limit 4,194,304 bytes" in memory.limited_by


def test_the_tightest_ancestor_counts(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        "0::/slice/job\n",
        {
            "slice/job/memory.max": "max\n",
            "slice/job/memory.current": "100\n",
            "slice/memory.max": f"{1 << 20}\n",
            "slice/memory.current": "1000\n",
        },
    )
    memory = host_memory(root)
    assert memory.available == (1 << 20) - 1000 and memory.limited_by.endswith("slice (limit 1,048,576 bytes)")


def test_version_1(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        "5:cpu,cpuacct:/x\n3:memory:/job\n",
        {
            "memory/job/memory.limit_in_bytes": "1000000",
            "memory/job/memory.usage_in_bytes": "400000",
            "memory/job/memory.stat": "cache 9\ntotal_inactive_file 50000\n",
            "memory/memory.limit_in_bytes": "9223372036854771712",
            "memory/memory.usage_in_bytes": "1",
        },
    )
    assert host_memory(root).available == 650_000


def test_a_group_above_its_limit_grants_nothing(tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/job\n", {"job/memory.max": "1000", "job/memory.current": "4000"})
    assert host_memory(root).available == 0


def test_unreadable_files_are_no_limit(tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/job\nodd line\n", {"job/memory.max": "what", "job/memory.current": "4000"})
    assert host_memory(root).limited_by == "the machine's available memory"


def test_free_disk_counts_each_filesystem_once_and_missing_folders_with_their_parent(tmp_path: Path) -> None:
    free = free_disk([tmp_path])
    status = os.statvfs(tmp_path)
    assert free == pytest.approx(status.f_bavail * status.f_frsize, rel=0.2)
    (tmp_path / "a").mkdir()
    both = free_disk([tmp_path, tmp_path / "a", tmp_path / "not" / "there"])
    assert both == pytest.approx(free, rel=0.2)
    assert free_disk([]) == 0


_BLOCKS = """
import ctypes, sys
from offload.machine import map_large_blocks_apart
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
done = map_large_blocks_apart()
libc.free(libc.malloc(31 << 20))  # from now on glibc would take such blocks from its heap
below, block, above = libc.malloc(1 << 20), libc.malloc(30 << 20), libc.malloc(1 << 20)
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
ctypes.memset(block, 1, 30 << 20)
full = resident()
libc.free(block)
print(done, full - resident() > 25 << 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap of another C library")
@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "True True"),  # a freed block goes back to the system though others lie behind it
        ({"MALLOC_TRIM_THRESHOLD_": "1000000000", "MALLOC_MMAP_THRESHOLD_": "33554432"}, "False False"),
        ({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=33554432:glibc.malloc.top_pad=0"}, "False False"),
    ],
)
def test_large_blocks_are_mapped_apart(environment: dict[str, str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _BLOCKS], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == said.split(), done.stderr
