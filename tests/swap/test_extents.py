"""The allocator against a model: no overlap, no leak, full reuse."""

from __future__ import annotations

import errno
import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from swap import PAGE, Extent, Segment, SwapIOError
from swap.extents import FreeSpace
from swap.space import SwapSpace

PAGES = st.integers(1, 12)


class FakeFile:
    """Stands for a swap file on a disk with ``room`` bytes."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.size = 0

    @property
    def free_bytes(self) -> int:
        return self.room - self.size

    def grow(self, system: object, nbytes: int) -> None:
        if nbytes > self.free_bytes:
            raise SwapIOError(operation="allocate", path="/full", offset=self.size, nbytes=nbytes, errno=errno.ENOSPC)
        self.size += nbytes


def make_space(rooms: list[int], *, stripe: int = 2 * PAGE, capacity: int | None = None) -> SwapSpace:
    return SwapSpace([FakeFile(room) for room in rooms], None, stripe=stripe, capacity=capacity)  # type: ignore


class FreeSpaceMachine(RuleBasedStateMachine):
    ranges = Bundle("ranges")

    def __init__(self) -> None:
        super().__init__()
        self.free = FreeSpace()
        self.owned: set[int] = set()  # page numbers in use

    def own(self, offset: int, nbytes: int) -> None:
        pages = set(range(offset // PAGE, (offset + nbytes) // PAGE))
        assert not pages & self.owned, "handed out twice"
        assert offset >= 0 and offset + nbytes <= self.free.size
        self.owned |= pages

    @rule(pages=PAGES)
    def grow(self, pages: int) -> None:
        self.free.grow(pages * PAGE)

    @rule(target=ranges, pages=PAGES)
    def take(self, pages: int) -> object:
        holes = self.free.holes()
        offset = self.free.take(pages * PAGE)
        fitting = [start for start, size in holes if size >= pages * PAGE]
        assert offset == (fitting[0] if fitting else None), "first fit"
        if offset is None:
            return multiple()
        self.own(offset, pages * PAGE)
        return offset, pages * PAGE

    @rule(target=ranges, pages=PAGES)
    def take_pieces(self, pages: int) -> object:
        available = self.free.free_bytes
        pieces = self.free.take_pieces(pages * PAGE)
        assert (pieces is None) == (available < pages * PAGE)
        for offset, nbytes in pieces or []:
            self.own(offset, nbytes)
        assert pieces is None or sum(nbytes for _, nbytes in pieces) == pages * PAGE
        return multiple(*(pieces or []))

    @rule(taken=consumes(ranges))
    def give(self, taken: tuple[int, int]) -> None:
        offset, nbytes = taken
        self.free.give(offset, nbytes)
        self.owned -= set(range(offset // PAGE, (offset + nbytes) // PAGE))
        with pytest.raises(ValueError, match="not an allocated range"):
            self.free.give(offset, nbytes)

    @invariant()
    def free_and_owned_make_up_the_file(self) -> None:
        holes = self.free.holes()
        assert self.free.free_bytes == sum(size for _, size in holes)
        assert self.free.used_bytes == len(self.owned) * PAGE
        for (start, size), (following, _) in itertools.pairwise(holes):
            assert start + size < following, "neighbouring holes must have been joined"
        free_pages = {page for start, size in holes for page in range(start // PAGE, (start + size) // PAGE)}
        assert free_pages | self.owned == set(range(self.free.size // PAGE))
        last = holes[-1] if holes else None
        assert self.free.tail_bytes() == (last[1] if last and sum(last) == self.free.size else 0)


class SwapSpaceMachine(RuleBasedStateMachine):
    """Three disks of different size, a capacity, stripes of two pages."""

    extents = Bundle("extents")

    def __init__(self) -> None:
        super().__init__()
        self.rooms = [40 * PAGE, 9 * PAGE, 25 * PAGE]
        self.space = make_space(self.rooms, capacity=60 * PAGE)
        self.owned: dict[tuple[int, int], None] = {}

    @rule(target=extents, pages=PAGES)
    def allocate(self, pages: int) -> object:
        try:
            segments = self.space.allocate(pages * PAGE)
        except SwapIOError as error:
            assert error.errno == errno.ENOSPC
            return multiple()
        if segments is None:
            return multiple()
        assert sum(segment.nbytes for segment in segments) == pages * PAGE
        for page in self.pages(segments):
            assert page not in self.owned, "handed out twice"
            self.owned[page] = None
        return segments

    @rule(segments=consumes(extents))
    def give(self, segments: tuple[Segment, ...]) -> None:
        self.space.give(segments)
        for page in self.pages(segments):
            del self.owned[page]

    @staticmethod
    def pages(segments: tuple[Segment, ...]) -> list[tuple[int, int]]:
        return [
            (segment.path, page)
            for segment in segments
            for page in range(segment.offset // PAGE, (segment.offset + segment.nbytes) // PAGE)
        ]

    @invariant()
    def everything_is_counted(self) -> None:
        assert self.space.used_bytes == len(self.owned) * PAGE
        assert self.space.file_bytes <= 60 * PAGE
        for file, room in zip(self.space._files, self.rooms, strict=True):
            assert file.size <= room

    def teardown(self) -> None:
        for path, page in self.owned:
            self.space.give((Segment(path, page * PAGE, PAGE),))
        assert self.space.used_bytes == 0


TestFreeSpace = FreeSpaceMachine.TestCase
TestSwapSpace = SwapSpaceMachine.TestCase
for case in (TestFreeSpace, TestSwapSpace):
    case.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_one_path_gives_one_segment_and_is_fully_reused() -> None:
    space = make_space([10**9], capacity=30 * PAGE)
    extents = [space.allocate(10 * PAGE) for _ in range(3)]
    assert all(extent is not None and len(extent) == 1 for extent in extents)
    assert space.allocate(PAGE) is None
    for extent in extents:
        assert extent is not None
        space.give(extent)
    whole = space.allocate(30 * PAGE)
    assert whole == (Segment(0, 0, 30 * PAGE),)
    assert space.file_bytes == 30 * PAGE


def test_holes_are_used_in_pieces_before_capacity_is_said_to_be_short() -> None:
    space = make_space([10**9], capacity=10 * PAGE)
    extents = [space.allocate(PAGE) for _ in range(10)]
    for extent in extents[::2]:
        assert extent is not None
        space.give(extent)
    pieces = space.allocate(5 * PAGE)
    assert pieces is not None and sum(segment.nbytes for segment in pieces) == 5 * PAGE
    assert space.allocate(PAGE) is None


def test_stripes_go_round_the_paths_and_rest_on_all_of_them() -> None:
    space = make_space([10**9, 10**9, 10**9])
    segments = space.allocate(12 * PAGE)
    assert segments is not None
    assert [segment.path for segment in segments] == [0, 1, 2, 0, 1, 2]
    assert all(segment.nbytes == 2 * PAGE for segment in segments)
    again = space.allocate(3 * PAGE)
    assert again is not None and [segment.nbytes for segment in again] == [2 * PAGE, PAGE]
    assert len({segment.path for segment in again}) == 2


def test_a_small_extent_goes_where_most_room_is() -> None:
    space = make_space([20 * PAGE, 50 * PAGE, 30 * PAGE])
    segments = space.allocate(2 * PAGE)
    assert segments is not None and [segment.path for segment in segments] == [1]


def test_full_paths_are_left_out_and_a_full_disk_says_so() -> None:
    space = make_space([4 * PAGE, 20 * PAGE])
    segments = space.allocate(16 * PAGE)
    assert segments is not None and {segment.path for segment in segments} == {1}
    with pytest.raises(SwapIOError, match="ENOSPC"):
        space.allocate(16 * PAGE)
    assert space.used_bytes == 16 * PAGE
    assert space.allocate(8 * PAGE) is not None


def test_slices_cut_an_extent_anywhere() -> None:
    extent = Extent(segments=(Segment(0, 40, 10), Segment(1, 7, 5), Segment(0, 100, 20)), nbytes=35)
    assert list(extent.slices(0, 35)) == list(extent.segments)
    assert list(extent.slices(8, 10)) == [Segment(0, 48, 2), Segment(1, 7, 5), Segment(0, 100, 3)]
    assert list(extent.slices(12, 2)) == [Segment(1, 9, 2)]
    assert list(extent.slices(3, 0)) == []


def test_ranges_must_be_whole_pages() -> None:
    for nbytes in (0, -PAGE, PAGE + 1):
        with pytest.raises(ValueError, match="page"):
            FreeSpace().take(nbytes)
