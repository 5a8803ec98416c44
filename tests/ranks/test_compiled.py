"""`torch.compile` of each block's forward with weights that are gathered for every use: no graph break inside a block,
no recompilation over steps, and the numbers of the blocks that are not compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.engine.common import decoder, running, states_of, token_batches
from tests.ranks.harness import RankPool
from tests.ranks.training import Run, case_of, own_folder, sections_of

PoolOf = Callable[[int], RankPool]
STEPS = 3


def trained(backend: str | None, kept: bool | int, device: str, folder: Path) -> tuple[list[float], dict[str, Any]]:
    """On a rank: losses and states; blocks are compiled as whole graphs, or not at all."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = decoder()
    if backend is not None:
        for layer in model.layers:
            compiled = torch.compile(layer.forward, backend=backend, fullgraph=True)
            layer.forward = compiled  # type: ignore[method-assign]
    run = Run(world=2, kept=kept, device=device, clip=False)
    losses, graphs = [], 0
    with running(model, case_of(run), own_folder(folder), **sections_of(run)) as engine:
        for step in range(STEPS):
            ids = token_batches(2, seed=step)[dist.get_rank()]
            loss: Tensor = engine(ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
            seen = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            assert step == 0 or seen == graphs, "compiled again"
            graphs = seen
        assert not torch._dynamo.utils.counters["graph_break"]
        assert (graphs > 0) == (backend is not None)
        states = states_of(engine)
    torch._dynamo.reset()
    return losses, states


def check(backend: str, kept: bool | int, device: str, pool: RankPool, folder: Path, tolerance: float) -> None:
    """With `tolerance` 0 the same bits; else losses and weights within it, relative to the largest element."""
    plain, found = (pool.run(trained, which, kept, device, folder, timeout=500) for which in (None, backend))
    for (losses, states), (expected, others) in zip(found, plain, strict=True):
        assert losses == pytest.approx(expected, rel=tolerance, abs=0.0)
        for name, state in states.items():
            weight, other = state["weight"].float(), others[name]["weight"].float()
            assert (weight - other).abs().max() <= tolerance * other.abs().max(), name


@pytest.mark.parametrize(("kept", "device"), [(True, "sim"), (False, "cpu")])
def test_whole_blocks_as_one_graph(kept: bool, device: str, pool_of: PoolOf, tmp_path: Path) -> None:
    check("aot_eager", kept, device, pool_of(2), tmp_path, 0.0)


@pytest.mark.acceptance
def test_inductor(pool_of: PoolOf, tmp_path: Path) -> None:
    """Its sums have another order, and AdamW's first steps are as large for tiny gradients as for others: up to twice
    the learning rate of 3e-3 a step where a gradient is nothing but rounding.
    """
    check("inductor", True, "cpu", pool_of(2), tmp_path, 2e-2)
