"""Many small parameters and few huge ones: the same numbers, and a measurement of what the bookkeeping costs.

Times are measured by `offload bench overhead`, not asserted here. Compared with `torch.equal`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from offload.bench import overhead
from offload.cli.main import main
from tests.engine.common import Case
from tests.models.common import cover, duo


@pytest.mark.parametrize(("model", "case"), cover(["small", "huge"], share=2))
def test_the_same_numbers(model: str, case: Case, swap_folder: Path) -> None:
    build = {
        "small": lambda: overhead.small_parameters(units=10, each=40),
        "huge": lambda: overhead.huge_parameters(width=300),
    }[model]
    module, x = build()
    with duo(module, case, swap_folder, units={"wrap": [type(next(module.children())).__name__]}) as pair:
        for step in range(2):
            pair.backward(lambda m, step=step: (m(x + step) - 3).square().sum())
            pair.backward(lambda m: m(x).sum())
            pair.step()


@pytest.mark.acceptance
@pytest.mark.parametrize(("model", "case"), cover(["small"], share=6))
def test_two_thousand_parameters_in_fifty_units(model: str, case: Case, swap_folder: Path) -> None:
    module, x = overhead.small_parameters()
    with duo(module, case, swap_folder, units={"wrap": ["_Unit"]}) as pair:
        assert len(list(pair.offloaded.parameters())) == 2000 and len(pair.engine._residency.units) == 50
        pair.train(lambda m: (m(x) - 3).square().sum())


def test_the_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, huge = overhead.small_parameters, overhead.huge_parameters
    monkeypatch.setattr(overhead, "small_parameters", lambda: small(units=3, each=5))
    monkeypatch.setattr(overhead, "huge_parameters", lambda **_: huge(width=64))
    result = CliRunner().invoke(main, ["bench", "overhead", str(tmp_path), "--json", "--rounds", "1"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["limit_ms"] == overhead.LIMIT
    assert {(r["model"], r["tier"]) for r in found["results"]} == {
        (m, t) for m in ("small", "huge", "lone") for t in ("device", "host", "nvme")
    }
    assert all(r["plain_forward_ms"] > 0 and r["step_ms"] > 0 for r in found["results"])
    assert list(tmp_path.iterdir()) == [] and torch.get_num_threads() == 1
