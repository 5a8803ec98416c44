"""Byte-level text: windows, splits, determinism, and the errors of paths and lengths."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from offload.data import ByteTokenizer, TextData
from offload.text_files import find_files


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def counting(count: int) -> bytes:
    """Bytes from which a window's place can be read: 2-byte big-endian counters."""
    return b"".join(index.to_bytes(2, "big") for index in range(count // 2))


def places(batch: dict[str, torch.Tensor]) -> list[int]:
    """Start of each window of `counting` text."""
    starts = []
    for row in batch["input_ids"].tolist():
        even = row[0] * 256 + row[1], row[2] * 256 + row[3]
        starts.append(2 * even[0] if even[1] == even[0] + 1 else 2 * (row[1] * 256 + row[2]) - 1)
    return starts


def test_default_text_ships_with_python() -> None:
    data = TextData(None, 64, 2, 0)
    assert data.train_bytes + data.eval_bytes > 100_000
    assert data.eval_bytes == int((data.train_bytes + data.eval_bytes) * 0.05)
    text = data.tokenizer.decode(torch.cat([row for batch in data.eval_batches(4) for row in batch["input_ids"]]))
    assert " the " in text


def test_batches_are_int64_windows_with_labels_of_their_own(tmp_path: Path) -> None:
    data = TextData([write(tmp_path / "a", counting(4000))], 16, 3, 1)
    batch = data.train_batch(0, 0)
    assert batch["input_ids"].shape == (3, 16) and batch["input_ids"].dtype == torch.int64
    assert torch.equal(batch["labels"], batch["input_ids"])
    batch["labels"][:] = -100
    assert (batch["input_ids"] >= 0).all()
    source = counting(4000)
    for row, start in zip(batch["input_ids"].tolist(), places(batch), strict=True):
        assert bytes(row) == source[start : start + 16]


def test_a_batch_depends_on_seed_step_and_micro_batch_only(tmp_path: Path) -> None:
    path = write(tmp_path / "a", counting(60_000))
    first, second = TextData([path], 16, 4, 7), TextData([path], 16, 4, 7)
    state = torch.get_rng_state()
    expected = first.train_batch(3, 1)["input_ids"]
    assert torch.equal(torch.get_rng_state(), state)
    second.train_batch(0, 0)
    torch.manual_seed(99)
    assert torch.equal(second.train_batch(3, 1)["input_ids"], expected)
    for other in (first.train_batch(3, 2), first.train_batch(4, 1), TextData([path], 16, 4, 8).train_batch(3, 1)):
        assert not torch.equal(other["input_ids"], expected)
    # step 1, micro-batch 12 and step 11, micro-batch 2 are different draws
    assert places(first.train_batch(1, 12)) != places(first.train_batch(11, 2))


def test_splits_never_overlap_and_are_used_to_their_ends(tmp_path: Path) -> None:
    data = TextData([write(tmp_path / "a", counting(400))], 16, 8, 0, eval_fraction=0.25)
    assert (data.train_bytes, data.eval_bytes) == (300, 100)
    trained = [start for step in range(300) for start in places(data.train_batch(step, 0))]
    assert min(trained) == 0 and max(trained) == 300 - 16
    held_out = [start for batch in data.eval_batches(2) for start in places(batch)]
    assert len(held_out) == 16
    assert min(held_out) == 300 and max(held_out) == 400 - 16


def test_evaluation_is_fixed(tmp_path: Path) -> None:
    path = write(tmp_path / "a", counting(4000))
    runs = [list(TextData([path], 16, 2, seed).eval_batches(3)) for seed in (0, 1)]
    assert len(runs[0]) == 3
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(*runs, strict=True))
    data = TextData([path], 16, 1, 0)
    assert len(list(data.eval_batches(1))) == 1 and list(data.eval_batches(0)) == []
    with pytest.raises(ValueError, match="negative"):
        data.eval_batches(-1)
    with pytest.raises(ValueError, match="eval_fraction = 0"):
        TextData([path], 16, 1, 0, eval_fraction=0.0).eval_batches(1)


def test_files_are_one_text_across_their_borders(tmp_path: Path) -> None:
    whole = counting(3000)
    cuts = [0, 5, 5, 1000, 1001, 3000]  # an empty file and one of a single byte among them
    paths = [write(tmp_path / f"{index}", whole[low:high]) for index, (low, high) in enumerate(pairwise(cuts))]
    parts, one = TextData(paths, 100, 8, 3), TextData([write(tmp_path / "whole", whole)], 100, 8, 3)
    for step in range(20):
        assert torch.equal(parts.train_batch(step, 0)["input_ids"], one.train_batch(step, 0)["input_ids"])


def test_paths_globs_order_and_duplicates(tmp_path: Path) -> None:
    b, a = write(tmp_path / "sub/b.txt", b"b"), write(tmp_path / "a.txt", b"a")
    odd = write(tmp_path / "[x].txt", b"x")
    assert find_files([b, str(tmp_path / "**/*.txt")]) == [b, odd, a]
    assert find_files([str(odd)]) == [odd]


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    data = TextData([write(tmp_path / "binary", bytes(range(128, 256)) * 40)], 8, 2, 0)
    assert data.train_batch(0, 0)["input_ids"].min() >= 128


def test_path_errors_name_the_path(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data.files: '.*missing.txt' does not exist"):
        TextData([tmp_path / "missing.txt"], 8, 1, 0)
    with pytest.raises(ValueError, match=r"data.files: '.*\*.md' matches no file"):
        TextData([str(tmp_path / "*.md")], 8, 1, 0)
    with pytest.raises(ValueError, match="is a directory"):
        TextData([tmp_path], 8, 1, 0)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_unreadable_file(tmp_path: Path) -> None:
    path = write(tmp_path / "secret", b"x" * 100)
    path.chmod(0)
    with pytest.raises(ValueError, match="cannot be read"):
        TextData([path], 8, 1, 0)


def test_text_too_short_says_how_much_is_needed(tmp_path: Path) -> None:
    path = write(tmp_path / "short", b"x" * 100)
    with pytest.raises(ValueError, match=r"short\) has 100 bytes, 95 of them for training; data.context = 96"):
        TextData([path], 96, 1, 0)
    with pytest.raises(ValueError, match=r"has 100 bytes.*data.context = 8.*give at least 160 bytes"):
        TextData([path], 8, 1, 0)
    write(path, b"x" * 159)
    with pytest.raises(ValueError, match="160"):
        TextData([path], 8, 1, 0)
    write(path, b"x" * 160)
    assert len(list(TextData([path], 8, 1, 0).eval_batches(2))) == 2
    assert TextData([path], 8, 1, 0, eval_fraction=0.0).train_bytes == 160
    with pytest.raises(ValueError, match="has 0 bytes"):
        TextData([write(tmp_path / "empty", b"")], 8, 1, 0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"context": 1}, "data.context"), ({"batch_size": 0}, "batch_size"), ({"eval_fraction": 1.0}, "eval_fraction")],
)
def test_bad_settings_are_refused(changes: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        TextData(None, **({"context": 8, "batch_size": 1, "seed": 0} | changes))  # type: ignore[arg-type]


def test_file_that_shrinks_during_the_run(tmp_path: Path) -> None:
    path = write(tmp_path / "a", counting(4000))
    data = TextData([path], 16, 4, 0)
    os.truncate(path, 10)
    with pytest.raises(ValueError, match=r"'.*a' has become shorter during the run"):
        for step in range(20):
            data.train_batch(step, 0)


def test_nothing_is_left_open(tmp_path: Path) -> None:
    def open_files() -> set[str]:
        links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
        return {os.readlink(link) for link in links if link.exists()}

    path = write(tmp_path / "a", counting(4000))
    data = TextData([path], 16, 4, 0)
    data.train_batch(0, 0)
    if os.path.isdir("/proc/self/fd"):
        assert str(path) not in open_files()


def test_tokenizer_round_trip() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.vocab_size == 256
    ids = tokenizer.encode("naïve ✓")
    assert ids.dtype == torch.int64 and tokenizer.decode(ids) == "naïve ✓"
    assert tokenizer.encode(b"\xff\x00").tolist() == [255, 0]
    assert tokenizer.decode([255]) == "\ufffd"
    assert tokenizer.encode("").numel() == 0 and tokenizer.decode([]) == ""
    with pytest.raises(ValueError, match="got 256"):
        tokenizer.decode([97, 256])
