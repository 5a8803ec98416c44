"""Slabs are not copied into forked children, and a child that merely exists comes to no harm."""

from __future__ import annotations

import faulthandler
import gc
import mmap
import os
import signal
from pathlib import Path

import pytest

from swap import PAGE, Budget, HostPool, StagingPool

pytestmark = pytest.mark.skipif(not hasattr(mmap, "MADV_DONTFORK"), reason="no MADV_DONTFORK here")


def in_child(action: object) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            action()  # type: ignore[operator]
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(part, 16) for part in line.split()[0].split("-"))
        if low <= address < high:
            return True
    return False


@pytest.mark.parametrize("poison", [False, True])
def test_a_child_does_not_have_the_memory_and_lives_well(poison: bool) -> None:
    pool = HostPool(Budget({}), "host", "test", poison=poison)
    tensors = [pool.take(PAGE * 8), pool.take(PAGE * 3000)]

    def child() -> None:
        assert not any(mapped(tensor.data_ptr()) for tensor in tensors)
        tensors.clear()
        gc.collect()
        pool.close()

    assert all(mapped(tensor.data_ptr()) for tensor in tensors)
    assert in_child(child) == 0
    assert in_child(lambda: (faulthandler.disable(), tensors[0][0].item())) == -signal.SIGSEGV
    tensors[0].fill_(3)
    assert int(tensors[0][0]) == 3


def test_a_staging_pool_survives_its_children() -> None:
    with StagingPool(Budget({}), 4 * PAGE, PAGE) as pool:
        slot = pool.acquire()
        slot.tensor.fill_(5)

        def child() -> None:
            gc.collect()
            slot.release()

        assert in_child(child) == 0
        assert int(slot.tensor[0]) == 5 and pool.in_use == 1
