"""What `initialize` takes from the configuration, optimizer state dicts, Ctrl-C in a step, engines that stay open."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from tests.engine.resources import run_script


def settings(folder: Path, **optimizer: Any) -> dict[str, Any]:
    return {
        "device": "cpu",
        "memory": {"nvme_paths": [str(folder)]},
        "placement": dict.fromkeys(("parameters", "optimizer", "gradients"), "nvme"),
        "optimizer": {"lr": 1e-2, **optimizer},
    }


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))


def train(run: offload.Engine, start: int, stop: int) -> None:
    for step in range(start, stop):
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(step))
        run.backward(run(x).square().mean())
        run.step()


def weights(run: offload.Engine) -> dict[str, torch.Tensor]:
    return dict(run.named_full_parameters())


def test_groups_and_schedule_come_from_the_configuration(swap_folder: Path) -> None:
    config = settings(swap_folder, no_decay=["norms", "biases"], weight_decay=0.5, scheduler="linear", total_steps=5)
    with offload.initialize(model(), config) as run:
        groups = run.optimizer.param_groups
        assert [(len(g["params"]), g["weight_decay"]) for g in groups] == [(2, 0.5), (4, 0.0)]
        rates = []
        for step in range(5):
            rates.append(groups[0]["lr"])
            train(run, step, step + 1)
    assert rates == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3, 0.0])


def test_a_schedule_without_a_length_is_refused(swap_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"optimizer\.total_steps"):
        offload.initialize(model(), settings(swap_folder, scheduler="cosine"))
    with pytest.raises(ValueError, match="matches no parameter"):
        offload.initialize(model(), settings(swap_folder, no_decay=["typo"]))


def test_training_goes_on_from_a_state_dict(swap_folder: Path) -> None:
    with offload.initialize(model(), settings(swap_folder)) as run:
        train(run, 0, 3)
        saved = {name: t.clone() for name, t in run.module.state_dict().items()}, run.optimizer.state_dict()
        train(run, 3, 6)
        expected = weights(run)
    twin = model()
    twin.load_state_dict(saved[0])
    with offload.initialize(twin, settings(swap_folder)) as run:
        run.optimizer.load_state_dict(saved[1])
        train(run, 3, 6)
        assert all(torch.equal(value, expected[name]) for name, value in weights(run).items())


def test_the_state_is_that_of_torch(swap_folder: Path) -> None:
    """In both directions: torch's AdamW goes on from ours, and ours from torch's."""
    plain = model()
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.01)
    with offload.initialize(model(), settings(swap_folder)) as run:
        train(run, 0, 2)
        plain.load_state_dict(run.module.state_dict())
        adamw.load_state_dict(run.optimizer.state_dict())
        for step in range(2, 5):
            x = torch.randn(3, 8, generator=torch.Generator().manual_seed(step))
            adamw.zero_grad()
            plain(x).square().mean().backward()
            adamw.step()
        run.optimizer.load_state_dict(run.optimizer.state_dict())
        train(run, 2, 5)
        for name, value in weights(run).items():
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=0, atol=1e-6)
        run.optimizer.load_state_dict(adamw.state_dict())
        for name, parameter in plain.named_parameters():
            assert torch.equal(run.get_full(name, "exp_avg_sq"), adamw.state[parameter]["exp_avg_sq"])


def test_a_state_that_does_not_fit_changes_nothing(swap_folder: Path) -> None:
    with offload.initialize(model(), settings(swap_folder)) as run:
        train(run, 0, 2)
        good = run.optimizer.state_dict()
        bad = {
            **good,
            "state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}},
        }
        with pytest.raises(ValueError, match="parameter 0"):
            run.optimizer.load_state_dict(bad)
        after = run.optimizer.state_dict()
        assert all(torch.equal(after["state"][i]["exp_avg"], good["state"][i]["exp_avg"]) for i in good["state"])


def test_ctrl_c_waits_for_the_end_of_the_step(swap_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        offload.initialize(model(), settings(swap_folder)) as run,
        offload.initialize(model(), settings(swap_folder)) as twin,
    ):
        real = run._run

        def interrupted(*args: Any) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            real(*args)

        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
        run.backward(run(x).square().mean())
        monkeypatch.setattr(run, "_run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.step()
        monkeypatch.undo()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        train(run, 1, 3)
        train(twin, 0, 3)
        assert all(torch.equal(value, weights(twin)[name]) for name, value in weights(run).items())


SCRIPT = """
import sys, torch, offload
from torch import nn
model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
engine = offload.initialize(model, {
    "memory": {"nvme_paths": [sys.argv[1]]},
    "placement": dict.fromkeys(("parameters", "optimizer", "gradients"), sys.argv[2]),
})
for _ in range(2):
    engine.backward(engine(torch.randn(4, 16)).sum())
    engine.step()
print("trained")
"""


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_a_program_may_end_without_closing(swap_folder: Path, tier: str) -> None:
    ran = run_script(SCRIPT, str(swap_folder), tier, timeout=100)
    assert (ran.returncode, ran.stdout) == (0, "trained\n"), ran.stderr
    assert "nanobind" not in ran.stderr


def test_a_module_does_not_go_to_the_meta_device(swap_folder: Path) -> None:
    with offload.initialize(model(), settings(swap_folder)) as run:
        train(run, 0, 1)
        before = {name: value.clone() for name, value in run.module.state_dict().items()}
        for move in (
            lambda m: m.to("meta"),
            lambda m: m.to(device=torch.device("meta")),
            lambda m: m.to_empty(device="meta"),
        ):
            with pytest.raises(offload.OffloadError, match="meta"):
                move(run.module)
        assert all(torch.equal(value, before[name]) for name, value in run.module.state_dict().items())
