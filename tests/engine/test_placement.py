"""Placement: pure arithmetic over layouts and limits, and its agreement with what an engine really takes."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload import build
from offload.errors import PlanError
from offload.layout import BLOCK, ParameterSpec, UnitLayout, layout_unit
from offload.placement import KINDS, Limits, Plan, Request, make_plan
from offload.state import chunk_granule, staging_bytes_per_chunk
from offload.tiers import Tier
from optimizer_cpu.formats import get_format
from swap.geometry import PAGE, parse_bytes
from tests.engine.common import Case, decoder, running, token_batches

FP32 = torch.float32
BF16 = torch.bfloat16
FORMAT = get_format("fp32")
MIB = 1 << 20
AMPLE = 1 << 40


def unit(name: str, blocks: int, dtype: torch.dtype = BF16, **changes: Any) -> UnitLayout:
    spec = ParameterSpec(name=f"{name}.weight", shape=(blocks * BLOCK,), dtype=dtype, trainable=True)
    return layout_unit(name, [dataclasses.replace(spec, **changes)])


def units(count: int = 4, blocks: int = 16, dtype: torch.dtype = BF16) -> list[UnitLayout]:
    return [unit(f"layers.{i}", blocks, dtype) for i in range(count)]


def request(count: int = 4, **changes: Any) -> Request:
    tiers = {**dict.fromkeys(KINDS, "auto"), **{k: changes.pop(k) for k in KINDS if k in changes}}
    values: dict[str, Any] = {
        "tiers": tiers,
        "roots": [[i] for i in range(count)],
        "held": [],
        "prefetch": 1,
        "staging": MIB,
        "chunk": None,
        "aliases_host": True,
        "device_is_host_memory": True,
        "rest_on_device": True,
        "bounce": 4 * PAGE,
    }
    return Request(**{**values, **changes})


def limits(**changes: Any) -> Limits:
    values = {
        "device": AMPLE,
        "host": AMPLE,
        "nvme": AMPLE,
        "memory_available": AMPLE,
        "memory_limited_by": "the test",
    }
    return Limits(**{**values, **changes})


def plan(layouts: list[UnitLayout], asked: Request, allowed: Limits) -> Plan:
    return make_plan(layouts, FORMAT, FP32, asked, allowed)


def tiers_of(made: Plan, kind: str) -> list[str]:
    field = {"parameters": "weight"}.get(kind, kind)
    return [str(getattr(made.flats[key], field)) for key in sorted(made.flats)]


WEIGHT = 16 * BLOCK * 2
STATE = 16 * BLOCK * 12
GRADIENT = 16 * BLOCK * 6
TO_NVME = {"parameters": "nvme", "optimizer": "nvme", "gradients": "nvme"}


def test_with_room_everything_rests_on_the_device() -> None:
    made = plan(units(), request(), limits())
    for kind in KINDS:
        assert tiers_of(made, kind) == ["device"] * 4
    assert made.planned["device"] == {"parameters": 4 * WEIGHT, "optimizer": 4 * STATE, "gradients": 4 * GRADIENT}
    assert set(made.planned["host"]) == {"staging"} and made.planned["nvme"] == {}


def test_explicit_tiers_are_obeyed_whatever_the_room() -> None:
    for tier in Tier:
        made = plan(units(), request(**dict.fromkeys(KINDS, str(tier))), limits())
        assert all(tiers_of(made, kind) == [str(tier)] * 4 for kind in KINDS)
        assert made.planned[str(tier)]["parameters"] == 4 * WEIGHT
        assert made.planned[str(tier)]["optimizer"] == 4 * STATE
        assert made.planned[str(tier)]["gradients"] == 4 * GRADIENT


def test_auto_fills_device_then_host_then_nvme_weights_first() -> None:
    base = plan(units(6), request(6, **TO_NVME), limits())
    overhead = base.total(Tier.HOST)
    device = base.total(Tier.DEVICE) + 2 * WEIGHT
    made = plan(units(6), request(6), limits(device=device, host=overhead + 4 * WEIGHT + STATE))
    assert tiers_of(made, "parameters") == ["device", "device", "host", "host", "host", "host"]
    assert tiers_of(made, "optimizer") == ["host", *["nvme"] * 5]
    assert tiers_of(made, "gradients") == ["nvme"] * 6
    assert made.total(Tier.DEVICE) <= device and made.total(Tier.HOST) <= overhead + 4 * WEIGHT + STATE
    made = plan(units(6), request(6), limits(device=device, host=overhead + WEIGHT))
    assert tiers_of(made, "parameters") == ["device", "device", "host", "nvme", "nvme", "nvme"]


def test_auto_never_exceeds_any_budget_while_nvme_has_room() -> None:
    base = plan(units(), request(**TO_NVME), limits())
    for extra in range(0, 40 * WEIGHT, 3 * WEIGHT + PAGE):
        for alias in (True, False):
            asked = request(aliases_host=alias)
            least = plan(units(), request(**TO_NVME, aliases_host=alias), limits())
            device = least.total(Tier.DEVICE) + extra // 2
            allowed = limits(device=device + (0 if alias else 3 * least.slot_bytes), host=base.total(Tier.HOST) + extra)
            made = plan(units(), asked, allowed)
            assert made.total(Tier.HOST) <= (allowed.host or 0) and made.total(Tier.DEVICE) <= (allowed.device or 0)


def test_auto_stays_within_the_memory_that_device_and_host_share() -> None:
    base = plan(units(), request(**TO_NVME), limits())
    memory = base.total(Tier.HOST) + base.total(Tier.DEVICE) + 3 * WEIGHT
    made = plan(units(), request(), limits(memory_available=memory))
    assert made.total(Tier.HOST) + made.total(Tier.DEVICE) <= memory
    assert "nvme" in tiers_of(made, "optimizer") and tiers_of(made, "parameters")[0] == "device"


def test_what_is_explicit_gets_its_room_before_what_is_automatic() -> None:
    base = plan(units(), request(**TO_NVME), limits())
    allowed = limits(device=base.total(Tier.DEVICE), host=base.total(Tier.HOST) + 4 * STATE)
    made = plan(units(), request(optimizer="host"), allowed)
    assert tiers_of(made, "optimizer") == ["host"] * 4 and tiers_of(made, "parameters") == ["nvme"] * 4


def test_auto_leaves_the_device_alone_where_it_is_host_memory_without_a_budget() -> None:
    made = plan(units(), request(rest_on_device=False), limits(device=None))
    assert tiers_of(made, "parameters") == ["host"] * 4
    assert made.total(Tier.DEVICE) == 0  # the CPU computes on the planes where they rest


def test_persistent_parameters_rest_on_the_device() -> None:
    specs = [
        ParameterSpec(name="norm", shape=(8,), dtype=BF16, trainable=True, persistent=True),
        ParameterSpec(name="weight", shape=(BLOCK,), dtype=BF16, trainable=True),
    ]
    made = plan([layout_unit("layer", specs)], request(1, **TO_NVME), limits())
    assert tiers_of(made, "parameters") == ["nvme", "device"]
    assert tiers_of(made, "optimizer") == ["nvme", "nvme"]


def test_frozen_units_take_no_state() -> None:
    made = plan([unit("frozen", 4, trainable=False)], request(1, **TO_NVME), limits())
    assert made.planned["nvme"] == {"parameters": 4 * BLOCK * 2}


@pytest.mark.parametrize(
    ("tier", "key"), [("device", "memory.device"), ("host", "memory.host"), ("nvme", "memory.nvme")]
)
def test_a_budget_that_is_too_small_says_by_how_much_for_what_and_which_key(tier: str, key: str) -> None:
    asked = request(**dict.fromkeys(KINDS, tier))
    needed = plan(units(), asked, limits()).total(Tier(tier))
    plan(units(), asked, limits(**{tier: needed}))
    with pytest.raises(PlanError) as raised:
        plan(units(), asked, limits(**{tier: needed - 2048}))
    message = str(raised.value)
    assert f"exceeds {key} by 2 KiB" in message
    assert all(kind in message for kind in KINDS) and f"raise {key}" in message


def test_leases_are_part_of_the_device_plan() -> None:
    made = plan(units(), request(**TO_NVME, roots=[[0], [1, 0], [2], [3]], held=[3]), limits())
    assert made.planned["device"] == {"leases": (1 + 2 + 1) * WEIGHT}  # held, the largest root, one ahead
    for asked in (TO_NVME, {**TO_NVME, "parameters": "host"}):
        with pytest.raises(
            PlanError, match=r"exceeds memory\.device by 64 KiB.*raise memory\.device.*units\.wrap"
        ) as raised:
            plan(units(), request(**asked, aliases_host=False, prefetch=0), limits(device=WEIGHT // 2))
        assert "'host'" not in str(raised.value)  # they are not on the device already: that advice cannot help


def test_prefetching_takes_what_room_there_is_and_never_insists() -> None:
    made = plan(units(), request(**TO_NVME, prefetch=3), limits(device=2 * WEIGHT))
    assert made.planned["device"]["leases"] == 2 * WEIGHT
    made = plan(units(), request(**TO_NVME, prefetch=3), limits(device=WEIGHT))
    assert made.planned["device"]["leases"] == WEIGHT


def test_the_machine_or_a_cgroup_that_grants_less_is_named() -> None:
    asked = request(**dict.fromkeys(KINDS, "host"))
    needed = plan(units(), asked, limits()).total(Tier.HOST)
    with pytest.raises(
        PlanError, match=r"1 MiB more than the memory cgroup /x \(limit 5 bytes\) has left.*memory\.host"
    ):
        plan(
            units(),
            asked,
            limits(memory_available=needed - MIB, memory_limited_by="the memory cgroup /x (limit 5 bytes)"),
        )
    on_gpu = dataclasses.replace(asked, **{"device_is_host_memory": False, "aliases_host": False})
    made = plan(units(), on_gpu, limits(memory_available=needed + MIB))
    assert made.total(Tier.DEVICE) > 0


def test_nvme_without_a_path_names_the_key() -> None:
    for kind in KINDS:
        with pytest.raises(PlanError, match=rf"{kind} .* would rest on nvme.*memory\.nvme_paths"):
            plan(units(), request(**{kind: "nvme"}), limits(nvme=0))
    made = plan(units(), request(), limits(nvme=0))
    assert made.planned["nvme"] == {}
    with pytest.raises(PlanError, match=r"exceeds memory\.host by .*nvme"):
        plan(units(), request(rest_on_device=False), limits(nvme=0, host=4 * MIB))


def test_small_staging_names_the_minimum() -> None:
    granule = chunk_granule(FORMAT, [BF16])
    least = staging_bytes_per_chunk(FORMAT, [BF16], FP32, granule)
    made = plan(units(), request(**TO_NVME, staging=least), limits())
    assert (made.chunk, made.staging) == (granule, least)
    with pytest.raises(PlanError, match=rf"swap\.staging = .* at least .*\({least:,} bytes\) are needed"):
        plan(units(), request(**TO_NVME, staging=least - 1), limits())
    with pytest.raises(PlanError, match=r"swap\.chunk = 4 MiB needs .* of staging.*raise it or lower swap\.chunk"):
        plan(units(), request(**TO_NVME, staging=least, chunk=4 * MIB), limits())


@pytest.mark.parametrize(
    ("count", "blocks", "optimizer", "host", "slots"),
    [
        (4, 16, "nvme", AMPLE, 4),  # the states of all units are four chunks
        (9, 16, "nvme", AMPLE, 9),
        (40, 16, "nvme", AMPLE, 24),
        (40, 256, "nvme", AMPLE, 9),  # 192 MiB
        (40, 16, "nvme", 16 * MIB, 4),  # an eighth of the host budget: four smaller chunks
        (40, 4, "nvme", AMPLE, 4),  # small chunks
        (40, 16, "auto", AMPLE, 4),
        (40, 16, "host", AMPLE, 4),
    ],
)
def test_automatic_staging_has_room_for_reads_ahead_of_states_in_files(
    count: int, blocks: int, optimizer: str, host: int, slots: int
) -> None:
    tiers = {**TO_NVME, "optimizer": optimizer}
    made = plan(units(count, blocks), request(count, **tiers, staging=None), limits(host=host))
    assert made.staging == slots * made.slot_bytes <= host // 8
    assert made.chunk == blocks * BLOCK or host < AMPLE


def test_a_chunk_is_a_multiple_of_the_granule_and_at_least_one() -> None:
    granule = chunk_granule(FORMAT, [BF16])
    for chunk in (1, 4 * granule, 4 * granule + 1, 9 * granule):
        made = plan(units(), request(**TO_NVME, chunk=chunk), limits())
        assert made.chunk == max(1, chunk // 4 // granule) * granule
        assert made.staging % made.slot_bytes == 0 and made.staging >= made.slot_bytes


def test_automatic_staging_fits_the_model_and_an_eighth_of_the_host() -> None:
    tiny = plan(units(1, 1), request(1, **TO_NVME, staging=None), limits())
    assert tiny.chunk == chunk_granule(FORMAT, [BF16])
    large = [unit("large", 4096)]
    for host in (AMPLE, 64 * MIB, 256 * MIB):
        made = plan(large, request(1, **TO_NVME, staging=None), limits(host=host))
        assert made.staging <= max(host // 8, made.slot_bytes)


def test_explicit_staging_is_planned_as_whole_slots() -> None:
    made = plan(units(), request(**TO_NVME, staging=3 * MIB, chunk=64 << 10), limits())
    assert made.staging % made.slot_bytes == 0 and 3 * MIB - made.slot_bytes < made.staging <= 3 * MIB


# Against real engines

CASES = [
    Case(device=device, parameters=p, gradients=g, optimizer=o, dtype=dtype, wide=True)
    for device in ("cpu", "sim")
    for p, g, o in [
        ("nvme",) * 3,
        ("host",) * 3,
        ("device",) * 3,
        ("host", "nvme", "device"),
        ("device", "host", "nvme"),
    ]
    for dtype in ("fp32", "bf16")
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_measured_bytes_are_the_planned_ones(case: Case, swap_folder: Path) -> None:
    with running(decoder(wide=True), case, swap_folder) as engine:
        batches = token_batches(2)
        for _ in range(2):
            for batch in batches:
                engine.backward(engine(batch, labels=batch).loss)
            engine.step()
        report = engine.memory()
        peaks = {tier: engine._memory.budget.peak(tier) for tier in report.planned}
        gathered = 2 * max(_gathered_bytes(engine, unit.index) for unit in engine._residency.units)
    # Sums take the place of first contributions unit by unit, so both are never there of all units, as planned.
    loose = {"leases", "step", "bounce"} | ({"gradients"} if case.dtype != "fp32" else set())
    for tier, kinds in report.planned.items():
        extra = gathered if tier == "host" and case.gradients == "nvme" else 0
        exact = {k: n for k, n in kinds.items() if k not in loose and not (extra and k == "gradients")}
        assert {k: n for k, n in report.peak[tier].items() if k in exact} == exact
        assert report.peak[tier].get("gradients", 0) <= kinds.get("gradients", 0) + extra
        # What the step has on the device is free for prefetching before it: only their sum is bounded.
        assert set(report.peak[tier]) <= set(kinds) and peaks[tier] <= sum(kinds.values()) + extra, tier


def _gathered_bytes(engine: offload.Engine, unit: int) -> int:
    """Host memory in which the gradients of one unit are summed on their way to nvme: of this and of the one before."""
    flats = [state.flat for (index, _), state in engine._states.items() if index == unit and state.gradients]
    return sum(flat.shared_start * (flat.itemsize + (4 if flat.itemsize < 4 else 0)) for flat in flats)


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_host_budget_of_exactly_the_plan_is_enough_and_one_byte_less_is_refused(
    device: str, swap_folder: Path
) -> None:
    case = Case(device=device)
    with running(decoder(), case, swap_folder) as engine:
        planned = {tier: sum(kinds.values()) for tier, kinds in engine.memory().planned.items()}
    folder = [str(swap_folder)]
    exact: dict[str, Any] = {"memory": {**planned, "nvme_paths": folder}}
    batch = token_batches(1)[0]
    with running(decoder(), case, swap_folder, **exact) as engine:
        for _ in range(2):
            engine.backward(engine(batch, labels=batch).loss)
            assert engine.step().stepped
    for tier in ("host", "nvme"):
        less: dict[str, Any] = {"memory": {**planned, tier: planned[tier] - 1, "nvme_paths": folder}}
        with (
            pytest.raises(PlanError, match=rf"exceeds memory\.{tier} by 1 B"),
            running(decoder(), case, swap_folder, **less),
        ):
            pass


@pytest.mark.filterwarnings("ignore:unit layers")
def test_a_plan_that_does_not_fit_allocates_nothing(monkeypatch: pytest.MonkeyPatch, swap_folder: Path) -> None:
    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise AssertionError("something was allocated")

    monkeypatch.setattr(build, "SwapStore", refuse)
    monkeypatch.setattr("offload.tiers.HostPool", refuse)
    monkeypatch.setattr("offload.tiers.StagingPool", refuse)
    monkeypatch.setattr("swap.devices.arena.HostArena.empty", refuse)
    monkeypatch.setattr("offload.initialization._materialise", refuse)
    for memory in ({"host": "1MiB"}, {"device": "16KiB"}, {"nvme": "64KiB"}):
        with offload.empty_init():
            model = decoder(wide=True)
        settings = {
            "device": "cpu",
            "memory": {"nvme_paths": [str(swap_folder)], **memory},
            "placement": {"parameters": "nvme", "optimizer": "host", "gradients": "nvme"},
        }
        with pytest.raises(PlanError, match=rf"exceeds memory\.{next(iter(memory))} by"):
            offload.initialize(model, settings)
        assert all(p.device.type == "meta" for p in model.parameters())


def test_a_disk_that_is_too_small_is_refused_before_anything_else(
    monkeypatch: pytest.MonkeyPatch, swap_folder: Path
) -> None:
    settings = {
        "device": "cpu",
        "memory": {"nvme_paths": [str(swap_folder)]},
        "placement": dict.fromkeys(KINDS, "nvme"),
    }
    monkeypatch.setattr(build, "free_disk", lambda paths: 100_000)
    with pytest.raises(
        PlanError, match=rf"exceeds memory\.nvme by .* of 92\.77 KiB in {swap_folder}; .*free disk space"
    ):
        offload.initialize(decoder(), settings)
    monkeypatch.undo()
    monkeypatch.setattr("offload.tiers.StagingPool", lambda *_a, **_k: pytest.fail("staging before the disk check"))
    monkeypatch.setattr("swap.files.SwapFile.free_bytes", 100_000)
    settings["memory"] = {"nvme_paths": [str(swap_folder)], "nvme": "1GiB"}
    with pytest.raises(ValueError, match=r"swap needs \d+ bytes .* has 100000 bytes .* free.*memory\.nvme"):
        offload.initialize(decoder(), settings)


def test_the_table_says_what_rests_where(swap_folder: Path) -> None:
    case = Case(parameters="host", gradients="nvme", optimizer="nvme")
    with running(decoder(), case, swap_folder) as engine:
        table = engine.describe()
        plan_ = engine._blueprint.plan
    lines = table.splitlines()
    assert lines[0].split() == ["units", "count", "parameters", "weights", "optimizer", "gradients"]
    row = next(line for line in lines if line.startswith("layers.0 .. 2"))
    assert row.split()[3] == "3" and "host" in row and row.count("nvme") == 2
    for tier in ("host", "nvme"):
        line = next(line for line in lines if line.startswith(tier))
        assert all(kind in line for kind in plan_.planned[tier])
    assert "swap threads" in table and "chunk" in table and "prefetch by time" in table


def test_what_gradients_take_on_their_way_is_said(swap_folder: Path) -> None:
    case = Case(parameters="nvme", gradients="nvme", optimizer="nvme")
    with running(Wide(), case, swap_folder) as engine:
        line = next(line for line in engine.describe().splitlines() if line.startswith("host"))
        said = re.search(r"; in backward up to (.*) more for gradients on their way$", line)
        assert said is not None
        engine.backward(engine(torch.ones(2, 128)).sum())
        engine.step()
        engine.synchronize()
        memory = engine.memory()
        more = sum(memory.peak["host"].values()) - sum(memory.planned["host"].values())
        assert 0 < more <= parse_bytes(said[1].replace(" ", ""))
    with running(Wide(), Case(parameters="host", gradients="host", optimizer="host"), swap_folder) as engine:
        assert "on their way" not in engine.describe()


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_effective_placement_follows_the_budgets_end_to_end(swap_folder: Path) -> None:
    """A device budget for one unit more than the leases: that unit rests there and is never loaded."""
    settings = {
        "device": "cpu",
        "memory": {"device": 5 * 81920, "host": "16MiB", "nvme_paths": [str(swap_folder)]},
        "swap": {"staging": "512KiB"},
    }
    with offload.initialize(Wide(), settings) as engine:
        weights = [str(engine._blueprint.plan.flats[i, 0].weight) for i in range(3)]
        assert weights[0] == "device"
        engine.backward(engine(torch.ones(2, 128)).sum())
        assert engine.step().stepped
        assert engine.memory().peak["device"].get("parameters", 0) >= 81920
