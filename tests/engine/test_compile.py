"""`torch.compile` of a block's forward, of blocks and of the whole model, with weights that come and go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import offload
from offload.errors import UnsupportedModelError
from tests.engine.binding_models import NVME, Stack, checkpointed, inputs, paired, square
from tests.engine.common import Case, config_of

swapped = pytest.mark.parametrize("case", NVME, ids=str)


@pytest.fixture(scope="module", autouse=True)
def compiler_threads() -> None:
    """The compiler's first use starts threads that stay; the check for left-over threads must not count them."""
    torch.compile(torch.sin, backend="aot_eager")(torch.zeros(1))


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def compile_blocks(model: Stack, backend: str) -> None:
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)


@swapped
def test_block_forward(case: Case, swap_folder: Path) -> None:
    with paired(Stack(3), case, swap_folder) as pair:
        compile_blocks(pair.offloaded, "aot_eager")
        pair.train(square(inputs(grad=True)), steps=2)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        with torch.no_grad():
            pair.both(lambda model: model(inputs()))
        pair.train(square(inputs(grad=True)), steps=2)
        stats = torch._dynamo.utils.counters
        assert stats["stats"]["unique_graphs"] <= graphs + 1  # one more for no_grad, none for new buffers
        assert not stats["graph_break"]


@swapped
@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
def test_block_forward_under_checkpointing(case: Case, swap_folder: Path, reentrant: bool) -> None:
    with paired(Stack(3, run=checkpointed(reentrant, 1)), case, swap_folder) as pair:
        compile_blocks(pair.offloaded, "aot_eager")
        pair.train(square(inputs(grad=True)))


@swapped
def test_two_backwards_and_a_stale_one(case: Case, swap_folder: Path) -> None:
    with paired(Stack(3), case, swap_folder) as pair:
        compile_blocks(pair.offloaded, "aot_eager")
        ours, theirs = (square(inputs())(model) for model in (pair.offloaded, pair.plain))
        for last in (False, True):
            ours.backward(retain_graph=not last)
            theirs.backward(retain_graph=not last)
            pair.gradients_equal()
        stale = square(inputs())(pair.offloaded)
        pair.step()
        with pytest.raises(RuntimeError, match="run the forward again"):
            stale.backward()
        pair.engine.zero_grad()
        pair.nothing_resident()


def test_inductor(swap_folder: Path) -> None:
    """Fusing changes bits, so the twin is compiled too."""
    with paired(Stack(2), NVME[0], swap_folder) as pair:
        compile_blocks(pair.offloaded, "inductor")
        compile_blocks(pair.plain, "inductor")
        try:
            pair.train(square(inputs(grad=True)), steps=3)
        except torch._inductor.exc.InductorError as error:
            if "compiler" in str(error).lower():
                pytest.skip("Inductor found no C++ compiler")
            raise


@pytest.mark.parametrize("whole", [False, True], ids=["blocks", "model"])
def test_compile_with_the_hooks_inside(swap_folder: Path, whole: bool) -> None:
    """The hooks break the graph and run as they are."""
    with paired(Stack(3), NVME[0], swap_folder) as pair:
        for module in [pair.offloaded] if whole else pair.offloaded.blocks:
            module.compile(backend="aot_eager")
        pair.train(square(inputs(grad=True)), steps=2)
        wrapped = torch.compile(pair.offloaded, backend="aot_eager")
        with torch.no_grad():
            assert torch.equal(wrapped(inputs()), pair.plain(inputs()))
        pair.nothing_resident()


def test_model_wrapped_by_compile_is_refused(swap_folder: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"block\.forward = torch\.compile\(block\.forward\)"):
        offload.initialize(torch.compile(Stack()), config_of(NVME[0], swap_folder))
