"""The layout rules, as properties of arbitrary parameters and world sizes."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.layout import ALIGN, BLOCK, Flat, ParameterSpec, UnitLayout, ceil_to, layout_unit

DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.int64)
SIZES = (0, 1, 7, 63, 64, 65, 511, 512, 513, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5, 1_000_003)


def _spec(name: str, shape: tuple[int, ...], **changes: object) -> ParameterSpec:
    values: dict[str, object] = {"dtype": torch.float32, "trainable": True, **changes}
    return ParameterSpec(name=name, shape=shape, **values)  # type: ignore[arg-type]


@st.composite
def _specs(draw: st.DrawFn) -> list[ParameterSpec]:
    count = draw(st.integers(0, 25))
    size = st.one_of(st.sampled_from(SIZES), st.integers(0, 3 * BLOCK))
    return [
        _spec(
            f"p{i}",
            draw(st.sampled_from([(n,), (n, 1), (1, n, 1)])) if (n := draw(size)) is not None else (),
            dtype=draw(st.sampled_from(DTYPES)),
            trainable=draw(st.booleans()),
            persistent=draw(st.booleans()),
        )
        for i in range(count)
    ]


def _check_flat(flat: Flat, world: int) -> None:
    end = 0
    for slot in flat.slots:
        assert slot.offset >= end, "slots are in order and do not overlap"
        end = slot.end
        assert slot.offset % (ALIGN if slot.numel < BLOCK else BLOCK) == 0
        if 0 < slot.numel < BLOCK:
            assert slot.offset // BLOCK == (slot.end - 1) // BLOCK, "a small parameter lies within one block"
        if slot.trainable:
            assert slot.end <= flat.trainable_end
            assert (slot.offset < flat.shared_start) == (slot.numel >= BLOCK) or slot.numel == 0
        else:
            assert slot.offset >= flat.trainable_end
    assert end <= flat.padded
    assert flat.shared_start % BLOCK == flat.trainable_end % BLOCK == 0
    assert flat.shared_start <= flat.trainable_end <= flat.padded
    assert flat.padded % (world * BLOCK) == 0
    assert flat.padded - end < world * BLOCK + BLOCK, "no more padding than the rule asks for"
    assert flat.nbytes % 4096 == 0 and flat.nbytes == flat.padded * flat.dtype.itemsize


@settings(max_examples=150, deadline=None)
@given(_specs(), st.integers(1, 9))
def test_every_layout_keeps_the_rules(specs: list[ParameterSpec], world: int) -> None:
    layout = layout_unit("unit", specs, world)
    assert sorted(slot.name for flat in layout.flats for slot in flat.slots) == sorted(spec.name for spec in specs)
    by_name = {spec.name: spec for spec in specs}
    keys = [(flat.dtype, flat.persistent) for flat in layout.flats]
    assert len(set(keys)) == len(keys), "one flat per dtype and persistence"
    assert [persistent for _, persistent in keys] == sorted(persistent for _, persistent in keys)
    for flat in layout.flats:
        _check_flat(flat, world)
        for slot in flat.slots:
            spec = by_name[slot.name]
            assert (slot.shape, slot.numel, slot.trainable) == (spec.shape, spec.numel, spec.trainable)
            assert (flat.dtype, flat.persistent) == (spec.dtype, spec.persistent)


@settings(max_examples=60, deadline=None)
@given(_specs(), st.integers(1, 9))
def test_shards_partition_a_flat_in_whole_equal_blocks(specs: list[ParameterSpec], world: int) -> None:
    for flat in layout_unit("unit", specs, world).flats:
        shards = [flat.shard(rank, world) for rank in range(world)]
        assert shards[0][0] == 0 and shards[-1][1] == flat.padded
        assert all(before[1] == after[0] for before, after in itertools.pairwise(shards))
        assert len({hi - lo for lo, hi in shards}) == 1
        assert all(lo % BLOCK == hi % BLOCK == 0 and hi > lo for lo, hi in shards)


@settings(max_examples=60, deadline=None)
@given(_specs(), st.integers(1, 4), st.integers(1, 5))
def test_chunks_cover_a_shard_once_and_stay_on_blocks(specs: list[ParameterSpec], world: int, blocks: int) -> None:
    for flat in layout_unit("unit", specs, world).flats:
        lo, hi = flat.shard(world - 1, world)
        chunks = list(flat.chunks(blocks * BLOCK, lo, hi))
        assert chunks[0][0] == lo and chunks[-1][1] == hi
        assert all(a[1] == b[0] for a, b in itertools.pairwise(chunks))
        assert all(0 < stop - start <= blocks * BLOCK for start, stop in chunks)


@settings(max_examples=60, deadline=None)
@given(_specs(), st.integers(2, 9))
def test_the_world_size_moves_no_parameter(specs: list[ParameterSpec], world: int) -> None:
    def places(layout: UnitLayout) -> list[tuple[object, ...]]:
        return [(f.dtype, f.persistent, f.slots, f.shared_start, f.trainable_end) for f in layout.flats]

    assert places(layout_unit("unit", specs, 1)) == places(layout_unit("unit", specs, world))


@settings(max_examples=60, deadline=None)
@given(_specs())
def test_within_a_class_registration_order_is_kept(specs: list[ParameterSpec]) -> None:
    order = {spec.name: index for index, spec in enumerate(specs)}
    for flat in layout_unit("unit", specs).flats:
        for trainable in (True, False):
            for small in (True, False):
                kept = [order[s.name] for s in flat.slots if (s.trainable, s.small) == (trainable, small)]
                assert kept == sorted(kept)


def test_small_parameters_share_blocks() -> None:
    specs = [_spec(f"p{i}", (BLOCK // 4,)) for i in range(8)]
    assert layout_unit("unit", specs).flats[0].padded == 2 * BLOCK


def test_a_small_parameter_that_does_not_fit_starts_the_next_block() -> None:
    flat = layout_unit("unit", [_spec("a", (BLOCK - ALIGN,)), _spec("b", (ALIGN + 1,))]).flats[0]
    assert [slot.offset for slot in flat.slots] == [0, BLOCK]


def test_large_trainable_parameters_come_first_then_small_then_frozen_ones_on_a_new_block() -> None:
    specs = [_spec("frozen", (3,), trainable=False), _spec("small", (5,)), _spec("large", (BLOCK + 1,))]
    flat = layout_unit("unit", specs).flats[0]
    assert [(slot.name, slot.offset) for slot in flat.slots] == [
        ("large", 0),
        ("small", 2 * BLOCK),
        ("frozen", 3 * BLOCK),
    ]
    assert (flat.shared_start, flat.trainable_end, flat.padded) == (2 * BLOCK, 3 * BLOCK, 4 * BLOCK)


def test_a_flat_without_trainable_parameters_has_no_trainable_range() -> None:
    flat = layout_unit("unit", [_spec("a", (BLOCK,), trainable=False)]).flats[0]
    assert (flat.shared_start, flat.trainable_end) == (0, 0)


def test_empty_parameters_keep_their_shape_and_the_flat_an_address() -> None:
    layout = layout_unit("unit", [_spec("empty", (0, 8)), _spec("none", (0,))])
    assert [slot.shape for slot in layout.flats[0].slots] == [(0, 8), (0,)]
    assert layout.flats[0].padded == BLOCK and layout.nbytes == 4 * BLOCK


def test_a_scalar_has_one_element() -> None:
    slot = layout_unit("unit", [_spec("scalar", ())]).flats[0].slots[0]
    assert (slot.numel, slot.shape, slot.end) == (1, (), 1)


def test_no_parameters_no_flats() -> None:
    assert layout_unit("unit", []).flats == () and layout_unit("unit", []).nbytes == 0


def test_a_world_larger_than_the_parameters_gives_shards_of_padding() -> None:
    flat = layout_unit("unit", [_spec("p", (1,))], world=8).flats[0]
    assert flat.padded == 8 * BLOCK
    assert flat.shard(7, 8) == (7 * BLOCK, 8 * BLOCK)


def test_wrong_arguments_name_the_unit_and_the_value() -> None:
    with pytest.raises(ValueError, match=r"layers\.3: world size 0"):
        layout_unit("layers.3", [], world=0)
    with pytest.raises(ValueError, match="parameter w is listed twice"):
        layout_unit("unit", [_spec("w", (1,)), _spec("w", (2,))])
    flat = layout_unit("unit", [_spec("p", (1,))], world=2).flats[0]
    for rank, world in ((2, 2), (-1, 2), (0, 3)):
        with pytest.raises(ValueError, match=rf"no shard {rank} of {world} in a flat of {2 * BLOCK} elements"):
            flat.shard(rank, world)


def test_ceil_to() -> None:
    assert [ceil_to(n, 4) for n in (0, 1, 4, 5)] == [0, 4, 4, 8]
