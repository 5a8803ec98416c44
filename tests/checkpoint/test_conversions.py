"""Any number of ranks, tier and state format to any other."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.checkpoint.boundary import encode_rng, raw_rng
from offload.checkpoint.content import describe, make_manifest
from offload.checkpoint.directory import commit, saved_files
from offload.checkpoint.format import rank_file
from offload.checkpoint.load import Loader
from offload.checkpoint.reader import Source
from offload.checkpoint.save import RankFile, RankSaver
from tests.engine.common import Case, assert_states_equal, decoder, running, states_of, token_batches

SMALL: dict[str, Any] = {"staging": 4 << 20, "chunk": 64 << 10}


def train(engine: offload.Engine, steps: int = 2) -> None:
    for ids in token_batches(steps):
        engine.backward(engine(ids, labels=ids).loss)
        engine.step()


def save_as_ranks(engine: offload.Engine, directory: Path, world: int) -> None:
    """What `world` ranks would write."""
    directory.mkdir(parents=True)
    names = [rank_file(rank, world) for rank in range(world)]
    for rank, name in enumerate(names):
        saver = RankSaver(
            engine._memory,
            engine._states,
            RankFile(directory=directory, name=name, rank=rank, world=world),
            buffers={},
            rng=encode_rng(raw_rng()),
        )
        saver.start()
        saver.run()
    commit(
        directory,
        make_manifest(describe(engine, {}, step=2, world=world, data=None, extra=None), saved_files(directory, names)),
    )


def load_whole(engine: offload.Engine, directory: Path) -> None:
    """What the files of several ranks hold together."""
    with Source(directory) as source:
        names = {name: name for name in source.manifest.parameters}
        loader = Loader(source, names, engine._step_queue, engine._checkpoint_memory, weights_only=False)
        loader.load_all(engine._states)
        for name in engine._steps:
            engine._steps[name] = source.manifest.parameters[name].steps


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return decoder(wide=True)


@pytest.mark.parametrize("form", [("fp32", "fp32"), ("compact", "bf16")], ids=str)
def test_one_two_three_one(tmp_path: Path, model: nn.Module, form: tuple[str, str]) -> None:
    case = Case(parameters="host", optimizer="host", gradients="host", dtype=form[1], **SMALL)
    options: dict[str, Any] = {"optimizer": {"state_format": form[0]}}
    with running(copy.deepcopy(model), case, tmp_path, **options) as engine:
        train(engine)
        expected = states_of(engine)
        save_as_ranks(engine, tmp_path / "one", 1)
    for before, world, name in (("one", 2, "two"), ("two", 3, "three"), ("three", 1, "again")):
        with running(decoder(wide=True, seed=world), case, tmp_path, **options) as engine:
            load_whole(engine, tmp_path / before)
            assert_states_equal(states_of(engine), expected)
            save_as_ranks(engine, tmp_path / name, world)
    with running(decoder(wide=True, seed=8), case, tmp_path, **options) as engine:
        engine.load_checkpoint(tmp_path / "three")
        assert_states_equal(states_of(engine), expected)


def test_ranks_of_many_more_than_there_are_blocks(tmp_path: Path) -> None:
    case = Case(parameters="host", optimizer="host", gradients="host", **SMALL)
    with running(decoder(), case, tmp_path) as engine:
        train(engine)
        expected = states_of(engine)
        save_as_ranks(engine, tmp_path / "many", 9)
    with running(decoder(seed=3), case, tmp_path) as engine:
        engine.load_checkpoint(tmp_path / "many")
        assert_states_equal(states_of(engine), expected)


CONVERSIONS = [
    (("fp32", "host", "nvme"), ("split", "nvme", "host")),
    (("split", "nvme", "nvme"), ("fp32", "device", "device")),
    (("compact", "device", "host"), ("fp32", "nvme", "nvme")),
    (("compact", "nvme", "nvme"), ("split", "host", "host")),
    (("compact", "host", "nvme"), ("compact", "nvme", "host")),
    (("fp32", "nvme", "host"), ("compact", "nvme", "nvme")),
    (("split", "device", "nvme"), ("compact", "host", "host")),
]


@pytest.mark.parametrize(("before", "after"), CONVERSIONS, ids=lambda side: "-".join(side))
def test_tiers_and_formats(tmp_path: Path, model: nn.Module, before: Any, after: Any) -> None:
    def case(side: Any) -> Case:
        return Case(parameters=side[1], gradients="host", optimizer=side[2], dtype="bf16", **SMALL)

    with running(copy.deepcopy(model), case(before), tmp_path, optimizer={"state_format": before[0]}) as engine:
        train(engine)
        expected = states_of(engine)
        engine.save_checkpoint(tmp_path / "ck")
    with running(decoder(wide=True, seed=4), case(after), tmp_path, optimizer={"state_format": after[0]}) as engine:
        report = engine.load_checkpoint(tmp_path / "ck")
        found = states_of(engine)
        lossy = after[0] == "compact" != before[0]
        assert bool(report.lossy) == lossy and bool(report.converted) == (before[0] != after[0])
        if not lossy:
            assert_states_equal(found, expected)
            return
        # The stated loss: what one encoding into compact codes loses, no more. Masters: 2^-16, 2^-14 at a tie.
        for name, entry in expected.items():
            assert found[name]["step"] == entry["step"]
            error = (found[name]["parameter"] - entry["parameter"]).abs()
            assert bool((error <= entry["parameter"].abs() * 2.0**-14).all()), name
            for kind in ("exp_avg", "exp_avg_sq"):
                assert (found[name][kind] - entry[kind]).abs().max() <= entry[kind].abs().max() * 0.1, (name, kind)


def test_other_dtypes(tmp_path: Path) -> None:
    """Weights in fp32 continue as bf16 with fp32 masters of the same bits, but for ties."""
    with running(decoder(), Case(**SMALL), tmp_path) as engine:
        train(engine)
        engine.save_checkpoint(tmp_path / "ck")
        expected = states_of(engine)
    with running(decoder(seed=1), Case(dtype="bf16", **SMALL), tmp_path) as engine:
        engine.load_checkpoint(tmp_path / "ck")
        for name, entry in states_of(engine).items():
            assert torch.equal(entry["weight"], entry["parameter"].bfloat16()), name
            assert (entry["parameter"] - expected[name]["parameter"]).abs().max() <= 1e-7
            assert torch.equal(entry["exp_avg"], expected[name]["exp_avg"])


def freeze(model: nn.Module, *names: str) -> nn.Module:
    for name, parameter in model.named_parameters():
        if any(part in name for part in names):
            parameter.requires_grad_(False)
    return model


def test_frozen_to_trained_and_back(tmp_path: Path) -> None:
    case = Case(dtype="bf16", **SMALL)
    with running(freeze(decoder(), "layers.0"), case, tmp_path) as engine:
        train(engine)
        expected = states_of(engine)
        engine.save_checkpoint(tmp_path / "ck")
    with running(decoder(seed=1), case, tmp_path) as engine:
        engine.load_checkpoint(tmp_path / "ck")
        found = states_of(engine)
        for name, entry in expected.items():
            assert torch.equal(found[name]["weight"], entry["weight"])
            if "exp_avg" in entry:
                assert torch.equal(found[name]["exp_avg"], entry["exp_avg"])
            else:
                assert found[name]["step"] == 0 and not found[name]["exp_avg"].any()
    with running(freeze(decoder(seed=1), "layers.0", "layers.1"), case, tmp_path) as engine:
        engine.load_checkpoint(tmp_path / "ck")
        weights = dict(engine.named_full_parameters())
        assert all(torch.equal(weights[name], entry["weight"]) for name, entry in expected.items())


def test_weights_only_starts_moments_anew(tmp_path: Path) -> None:
    for state_format in ("fp32", "compact"):
        options: dict[str, Any] = {"optimizer": {"state_format": state_format}}
        case = Case(dtype="bf16", **SMALL)
        with running(decoder(), case, tmp_path, **options) as engine:
            train(engine)
            expected = states_of(engine)
            engine.save_checkpoint(tmp_path / state_format)
        with running(decoder(seed=1), case, tmp_path, **options) as engine:
            train(engine, 1)
            state = torch.get_rng_state()
            engine.load_checkpoint(tmp_path / state_format, weights_only=True)
            assert engine.counters()["steps"] == 1
            for name, entry in states_of(engine).items():
                assert torch.equal(entry["weight"], expected[name]["weight"])
                assert torch.equal(entry["parameter"], expected[name]["parameter"])
                assert not entry["exp_avg"].any() and not entry["exp_avg_sq"].any() and entry["step"] == 0
            assert torch.equal(torch.get_rng_state(), state)


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[Path]:
    with running(decoder(), Case(**SMALL), tmp_path) as engine:
        train(engine)
        engine.save_checkpoint(tmp_path / "ck")
    yield tmp_path / "ck"


def test_missing_extra_and_reshaped_are_listed(tmp_path: Path, saved: Path) -> None:
    other = decoder(seed=1)
    del other.layers[2]
    other.extra_bias = nn.Parameter(torch.zeros(7))
    other.norm.weight = nn.Parameter(torch.zeros(9))
    with running(other, Case(**SMALL), tmp_path) as engine:
        before = states_of(engine)
        with pytest.raises(offload.checkpoint.CheckpointMismatchError) as caught:
            engine.load_checkpoint(saved)
        text = str(caught.value)
        assert "extra_bias" in text and "norm.weight (saved [24], here [9])" in text and "layers.2." in text
        assert_states_equal(states_of(engine), before)
        report = engine.load_checkpoint(saved, missing="keep", extra="ignore", reshaped="keep")
        assert report.missing == ("extra_bias",) and len(report.reshaped) == 1 and report.extra
        found = states_of(engine)
        assert torch.equal(found["extra_bias"]["weight"], before["extra_bias"]["weight"])
    with pytest.raises(ValueError, match="missing = 'yes'"), running(decoder(), Case(**SMALL), tmp_path) as engine:
        engine.load_checkpoint(saved, missing="yes")  # type: ignore[arg-type]
