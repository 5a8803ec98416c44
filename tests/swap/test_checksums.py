"""CRC32C and CRC-32: known values, native against slow twin, and what a store does with a page that differs."""

from __future__ import annotations

import errno
import os
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swap import PAGE, Budget, FaultPlan, SwapIOError, SwapStore
from swap.checksums import (
    BYTES_PER_PAGE,
    PageChecksums,
    crc32,
    first_difference,
    page_checksums,
    portable_checksums,
)
from swap.native import load

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture(params=["io_uring", "threads", "aiofiles"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def random_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def sums_of(data: bytes) -> list[int]:
    out = np.zeros(-(-len(data) // PAGE), dtype=np.uint32)
    page_checksums(memoryview(data), out)
    return [int(value) for value in out]


def test_published_values() -> None:
    assert sums_of(b"123456789") == [0xE3069283]
    assert sums_of(bytes(32)) == [0x8A9136AA]
    assert sums_of(b"\xff" * 32) == [0x62A8AB43]
    assert sums_of(bytes(range(32))) == [0x46DD794E]


@pytest.mark.parametrize("nbytes", [1, 7, 8, 4095, PAGE, PAGE + 1, 3 * PAGE, 4 * PAGE, 9 * PAGE + 17])
def test_native_and_portable_agree(nbytes: int) -> None:
    if load()[0] is None:
        pytest.skip(load()[1])
    data = random_bytes(nbytes).numpy().data
    native, portable = (np.zeros(-(-nbytes // PAGE), dtype=np.uint32) for _ in range(2))
    page_checksums(data, native)
    portable_checksums(data, portable)
    assert np.array_equal(native, portable)
    assert first_difference(data, native) is None
    data[nbytes - 1] ^= 1
    assert first_difference(data, native) == len(native) - 1


@given(data=st.binary(max_size=700), value=st.integers(0, 2**32 - 1), offset=st.integers(0, 15))
def test_crc32_is_that_of_zlib(data: bytes, value: int, offset: int) -> None:
    part = memoryview(data)[offset:]
    assert crc32(part, value) == zlib.crc32(part, value)
    for cut in {len(part) // 3, max(0, len(part) - 17)}:  # in two parts as in one
        assert crc32(part[cut:], crc32(part[:cut], value)) == zlib.crc32(part, value)


def test_crc32_of_much_and_of_other_types() -> None:
    data = random_bytes((8 << 20) + 13).numpy()
    assert crc32(data.data) == zlib.crc32(data)
    numbers = np.arange(1000, dtype=np.float32)
    assert crc32(numbers.data) == zlib.crc32(numbers.tobytes())
    assert crc32(b"123456789") == 0xCBF43926 and crc32(b"") == 0 and crc32(b"", 7) == 7
    with pytest.raises(BufferError, match="contiguous"):
        crc32(numbers[::2].data)


def test_pages_written_in_part_and_never() -> None:
    sums = PageChecksums(4 * PAGE)
    data = random_bytes(2 * PAGE).numpy().data
    sums.record(PAGE, data[: PAGE + 100])
    assert sums.check(PAGE, data[: PAGE + 100]) is None
    assert sums.check(PAGE, data) is None  # the rest of the page is undefined, not wrong
    assert sums.length(2 * PAGE) == 100 and sums.length(0) == 0
    assert sums.check(0, data) == (0, "these bytes were never written")
    data[PAGE + 99] ^= 4
    assert sums.check(PAGE, data) == (2 * PAGE, "checksum mismatch")
    data[0] ^= 4
    assert sums.check(PAGE, data) == (PAGE, "checksum mismatch")


@pytest.mark.parametrize("direct", [True, False])
def test_every_length_and_offset_reads_back(tmp_path: Path, engine: str, direct: bool) -> None:
    budget = Budget({})
    with SwapStore([tmp_path], engine=engine, checksum=True, budget=budget, block=4 * PAGE, direct=direct) as store:
        extent = store.allocate(20 * PAGE)
        assert budget.used_by_kind("host")["checksums"] == 20 * BYTES_PER_PAGE
        data = random_bytes(19 * PAGE + 1234)
        store.write(extent, data).wait(60)
        for offset, nbytes in ((0, data.numel()), (PAGE, 10), (18 * PAGE, PAGE + 1233), (19 * PAGE, 5), (0, 0)):
            for shift in (0, 1):
                buffer = torch.zeros(nbytes + shift + 8, dtype=torch.uint8)
                store.read(extent, buffer[shift:], offset=offset, nbytes=nbytes).wait(60)
                assert torch.equal(buffer[shift : shift + nbytes], data[offset : offset + nbytes])
                assert not buffer[:shift].any() and not buffer[shift + nbytes :].any()
        store.free(extent)
        assert "checksums" not in budget.used_by_kind("host")


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_flipped_bit_is_found_at_the_next_read(tmp_path: Path, engine: str, operation: str) -> None:
    plan = FaultPlan(seed=3).flip(operation, nth=2)
    with SwapStore([tmp_path], engine=engine, checksum=True, block=PAGE, faults=plan) as store:
        extent = store.allocate(4 * PAGE)
        data = random_bytes(4 * PAGE)
        store.write(extent, data).wait(60)
        buffer = torch.zeros_like(data)
        with pytest.raises(SwapIOError, match=r"checksum mismatch.*EBADMSG") as caught:
            store.read(extent, buffer).wait(60)
        assert plan.injected["flip"] == 1
        assert caught.value.errno == errno.EBADMSG and str(tmp_path) in caught.value.path
        assert caught.value.nbytes == PAGE and caught.value.offset % PAGE == 0
        with pytest.raises(SwapIOError, match="checksum mismatch"):
            store.read(extent, buffer)


def test_without_checksums_the_flip_goes_unseen(tmp_path: Path, engine: str) -> None:
    plan = FaultPlan(seed=3).flip("write")
    with SwapStore([tmp_path], engine=engine, faults=plan) as store:
        extent = store.allocate(PAGE)
        store.write(extent, torch.zeros(PAGE, dtype=torch.uint8)).wait(60)
        buffer = torch.ones(PAGE, dtype=torch.uint8)
        store.read(extent, buffer).wait(60)
        assert sum(bin(int(value)).count("1") for value in buffer[buffer != 0]) == 1


def test_foreign_truncated_and_unwritten_extents(tmp_path: Path) -> None:
    def fresh_store() -> tuple[SwapStore, torch.Tensor]:
        store = SwapStore([tmp_path], checksum=True)
        return store, random_bytes(2 * PAGE)

    buffer = torch.zeros(2 * PAGE, dtype=torch.uint8)
    store, data = fresh_store()
    with store, pytest.raises(SwapIOError, match="never written"):
        store.read(store.allocate(PAGE), buffer, nbytes=PAGE).wait(60)
    store, data = fresh_store()
    with store:
        first, second = store.allocate(2 * PAGE), store.allocate(2 * PAGE)
        store.write(first, data).wait(60)
        store.write(second, random_bytes(2 * PAGE, seed=1)).wait(60)
        file = store._core.files[0]
        (here,), (there,) = first.segments, second.segments
        os.copy_file_range(file.fd, file.fd, PAGE, here.offset + PAGE, there.offset + PAGE)
        store.read(first, buffer).wait(60)
        with pytest.raises(SwapIOError, match="checksum mismatch") as caught:
            store.read(second, buffer).wait(60)
        assert caught.value.offset == there.offset + PAGE
    store, data = fresh_store()
    with store:
        extent = store.allocate(2 * PAGE)
        store.write(extent, data).wait(60)
        os.ftruncate(store._core.files[0].fd, extent.segments[0].offset + PAGE)
        with pytest.raises(SwapIOError, match=r"end of file.*") as caught:
            store.read(extent, buffer).wait(60)
        assert str(tmp_path) in caught.value.path
