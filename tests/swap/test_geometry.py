from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swap import PAGE, align_up, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (0, 0),
        (4096, 4096),
        ("0B", 0),
        ("8GiB", 8 * 2**30),
        ("500MB", 500_000_000),
        ("1.5GiB", 3 * 2**29),
        (" 1.5 GiB ", 3 * 2**29),
        (".5KiB", 512),
        ("2.kib", 2048),
        ("0.1GB", 100_000_000),
        ("3TB", 3 * 10**12),
        ("1PiB", 2**50),
    ],
)
def test_sizes_as_people_write_them(text: str | int, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text", ["8", "1.5", "", "GiB", "-1GiB", "8 gigs", "8GiB8", "1e3MB", "8Gi", "nan", -1, True, False, 1.5, None, [8]]
)
def test_what_is_not_a_size_is_named(text: object) -> None:
    with pytest.raises(ValueError, match="size") as caught:
        parse_bytes(text)  # type: ignore[arg-type]
    assert str(text) in str(caught.value)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (2**20 - 1, "1 MiB"), (8 * 2**30, "8 GiB")],
)
def test_sizes_for_people(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text
    assert format_bytes(-nbytes) == (f"-{text}" if nbytes else text)


@given(st.integers(0, 2**60))
def test_what_is_printed_reads_back_within_the_rounding(nbytes: int) -> None:
    assert abs(parse_bytes(format_bytes(nbytes)) - nbytes) <= max(1, nbytes // 150)


@given(st.integers(0, 2**50), st.integers(1, 2**20))
def test_align_up(nbytes: int, alignment: int) -> None:
    aligned = align_up(nbytes, alignment)
    assert aligned % alignment == 0
    assert 0 <= aligned - nbytes < alignment


def test_align_up_refuses_a_senseless_alignment() -> None:
    with pytest.raises(ValueError, match="alignment"):
        align_up(PAGE, 0)
