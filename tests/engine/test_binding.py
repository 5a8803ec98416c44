"""Training through the engine equals a plain twin bit for bit, however the model is called and differentiated."""

from __future__ import annotations

import contextlib
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from offload.errors import OffloadError, StaleWeightsError
from tests.engine.binding_models import (
    NVME,
    PLACES,
    WIDTH,
    Block,
    Stack,
    checkpointed,
    inputs,
    nested,
    paired,
    plainly,
    square,
)
from tests.engine.common import Case, decoder, token_batches

everywhere = pytest.mark.parametrize("case", PLACES, ids=str)
swapped = pytest.mark.parametrize("case", NVME, ids=str)


class Looped(nn.Module):
    """A Linear used three times, and once more from outside the loop."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.shared(x))
        return self.head(x)


class Tied(nn.Module):
    """The embedding's weight is also the head, read by the parent."""

    def __init__(self, vocabulary: int = 11) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(x @ self.emb.weight.t(), ids)


class Experts(nn.Module):
    """A router that sends tokens to two of four experts; the last expert never gets one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)[:, :3].softmax(-1)
        best = scores.argmax(-1)
        out = torch.zeros_like(x)
        for index in range(3):
            rows = (best == index).nonzero().flatten()
            if rows.numel():
                out = out.index_add(0, rows, self.experts[index](x[rows]) * scores[rows, index, None])
        return out


IDS = torch.tensor([1, 2, 3, 5, 8, 1])


@everywhere
def test_module_used_three_times(case: Case, swap_folder: Path) -> None:
    with paired(Looped(), case, swap_folder) as pair:
        pair.train(square(inputs()))


@everywhere
def test_tied_embedding_read_by_its_parent(case: Case, swap_folder: Path) -> None:
    with paired(Tied(), case, swap_folder) as pair:
        pair.train(lambda model: model(IDS))


@everywhere
@pytest.mark.parametrize("span", [1, 2])
@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
def test_activation_checkpointing(case: Case, swap_folder: Path, reentrant: bool, span: int) -> None:
    with paired(Stack(run=checkpointed(reentrant, span)), case, swap_folder) as pair:
        pair.train(square(inputs(grad=True)))


@swapped
@pytest.mark.parametrize("early", [False, True])
def test_checkpoint_early_stop(case: Case, swap_folder: Path, early: bool) -> None:
    with paired(Stack(run=checkpointed(False, 2)), case, swap_folder) as pair, set_checkpoint_early_stop(early):
        pair.train(square(inputs(grad=True)))


@swapped
@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
def test_nested_checkpoints(case: Case, swap_folder: Path, reentrant: bool) -> None:
    with paired(Stack(run=nested(reentrant)), case, swap_folder) as pair:
        pair.train(square(inputs(grad=True)))


class Inner(nn.Module):
    """A block that checkpoints a part of itself."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.mlp, self.norm, self.reentrant = Block(), nn.LayerNorm(WIDTH), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(checkpoint(self.mlp, x, use_reentrant=self.reentrant))


@swapped
@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
def test_checkpoint_inside_a_unit(case: Case, swap_folder: Path, reentrant: bool) -> None:
    with paired(Stack(block=lambda: Inner(reentrant)), case, swap_folder) as pair:
        pair.train(square(inputs(grad=True)))


@swapped
def test_checkpoint_inside_a_unit_reached_from_its_middle(case: Case, swap_folder: Path) -> None:
    """The gradient enters within the unit, so that nothing has leased it when the recompute begins."""

    def run(model: Stack) -> Tensor:
        caught: list[Tensor] = []
        handles = [b.mlp.register_forward_hook(lambda _m, _a, out: caught.append(out)) for b in model.blocks]
        model(inputs(grad=True))
        for handle in handles:
            handle.remove()
        return sum((t.square().sum() for t in caught), torch.zeros(()))

    with paired(Stack(block=lambda: Inner(False)), case, swap_folder) as pair:
        pair.train(run)


@everywhere
def test_two_backwards_through_one_graph(case: Case, swap_folder: Path) -> None:
    with paired(Stack(), case, swap_folder) as pair:
        for _ in range(2):
            ours, theirs = (model(inputs()).square().sum() for model in (pair.offloaded, pair.plain))
            pair.engine.backward(ours, retain_graph=True)
            theirs.backward(retain_graph=True)
            pair.gradients_equal()
            pair.nothing_resident()
            pair.engine.backward(ours)
            theirs.backward()
            pair.step()


@everywhere
def test_loss_on_a_captured_activation(case: Case, swap_folder: Path) -> None:
    def run(model: Stack) -> Tensor:
        caught: list[Tensor] = []
        handle = model.blocks[1].up.register_forward_hook(lambda _m, _a, out: caught.append(out))
        out = model(inputs())
        handle.remove()
        return caught[0].pow(3).mean() + 0 * out.sum()

    def only_inner(model: Stack) -> Tensor:
        caught: list[Tensor] = []
        handle = model.blocks[2].up.register_forward_hook(lambda _m, _a, out: caught.append(out))
        model(inputs())
        handle.remove()
        return caught[0].pow(3).mean()

    with paired(Stack(), case, swap_folder) as pair:
        pair.train(run)
        pair.train(only_inner)


@everywhere
def test_several_losses_and_backwards_before_a_step(case: Case, swap_folder: Path) -> None:
    with paired(Stack(), case, swap_folder) as pair:
        for step in range(2):
            for model in (pair.offloaded, pair.plain):
                for part in range(3):
                    model(inputs(seed=part + step)).square().mean().backward()
                    pair.reference.collect()
                out = model(inputs(seed=9))
                first, second = out[:, 0].sum(), out[:, 1:].square().sum()
                first.backward(retain_graph=True)
                pair.reference.collect()
                second.backward()
                pair.reference.collect()
            pair.step()


@everywhere
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_then_training(case: Case, swap_folder: Path, mode: type) -> None:
    with paired(Stack(), case, swap_folder) as pair:
        for _ in range(2):
            pair.engine.eval()
            with mode():
                pair.both(lambda model: model(inputs()))
                assert_equal_through_engine(pair.engine, pair.plain)
            pair.nothing_resident()
            pair.engine.train()
            pair.train(square(inputs()), steps=1)


def assert_equal_through_engine(engine: nn.Module, plain: nn.Module) -> None:
    assert torch.equal(engine(inputs(seed=8)), plain(inputs(seed=8)))


@everywhere
def test_greedy_generation(case: Case, swap_folder: Path) -> None:
    ids = token_batches(1, time=4)[0]
    with paired(decoder(), case, swap_folder) as pair:
        pair.both(lambda model: model.generate(ids, 4))
        pair.train(lambda model: model(ids, labels=ids).loss, steps=1)
        pair.both(lambda model: model.generate(ids, 4))


class Failing(Exception):
    pass


class Fuse(nn.Module):
    """A block that fails when it is armed, in forward or in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.armed = Block(), ""
        self.error: BaseException = Failing("fuse")

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        if self.armed == "forward":
            raise self.error
        if self.armed == "backward":
            x = x * 1.0
            x.register_hook(self._fail)
        return x

    def _fail(self, _gradient: Tensor) -> None:
        raise self.error


@swapped
@pytest.mark.parametrize("through", ["engine", "module"])
@pytest.mark.parametrize("error", [Failing, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_training_goes_on_after_an_exception(
    case: Case, swap_folder: Path, where: str, error: type[BaseException], through: str
) -> None:
    with paired(Stack(block=Fuse), case, swap_folder) as pair:
        pair.train(square(inputs()), steps=1)
        fuse = pair.offloaded.blocks[1]
        fuse.armed, fuse.error = where, error("fuse")
        with pytest.raises(error):
            if through == "engine":
                pair.engine.backward(pair.engine(inputs()).square().sum())
            else:
                pair.offloaded(inputs()).square().sum().backward()
        fuse.armed, fuse.error = "", Failing("fuse")
        pair.engine.zero_grad()
        pair.nothing_resident()
        pair.train(square(inputs()))
        fuse.armed, fuse.error = where, error("fuse")
        with contextlib.suppress(error):
            pair.offloaded(inputs()).square().sum().backward()
        fuse.armed, fuse.error = "", Failing("fuse")
        with torch.no_grad():  # the next forward, not the step, clears up
            pair.both(lambda model: model(inputs()))
        pair.nothing_resident()


@swapped
def test_interrupted_forward_leaves_the_users_hooks_in_force(case: Case, swap_folder: Path) -> None:
    """The pairs of saved-tensor hooks are a stack: clearing up must not take one that is not ours."""
    packed: list[int] = []

    def pack(t: Tensor) -> Tensor:
        packed.append(1)
        return t

    with paired(Stack(block=Fuse), case, swap_folder) as pair, saved_tensors_hooks(pack, lambda t: t):
        fuse = pair.offloaded.blocks[1]
        fuse.armed, fuse.error = "forward", KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            pair.offloaded(inputs())
        fuse.armed, fuse.error = "", Failing("fuse")
        with torch.no_grad():
            pair.offloaded(inputs())
        packed.clear()
        x = inputs(grad=True)
        x.square()
        assert packed == [1]
        pair.nothing_resident()


@everywhere
def test_experts_without_tokens(case: Case, swap_folder: Path) -> None:
    with paired(Experts(), case, swap_folder) as pair:
        for seed in range(3):
            pair.train(square(inputs(6, WIDTH, seed=seed, grad=True)), steps=1)
        assert pair.engine.get_full("experts.3.up.weight", "grad") is None


@swapped
def test_gradient_penalty(case: Case, swap_folder: Path) -> None:
    def run(model: nn.Module) -> Tensor:
        x = inputs(grad=True)
        out = model(x).square().sum()
        (gradient,) = torch.autograd.grad(out, x, create_graph=True)
        return out + (gradient.norm(dim=1) - 1).square().mean()

    with paired(Stack(), case, swap_folder) as pair:
        with pytest.warns(UserWarning, match="create_graph"):
            pair.backward(run)
        pair.step()
        pair.train(run)


@everywhere
def test_gradient_of_the_inputs_in_evaluation(case: Case, swap_folder: Path) -> None:
    def saliency(model: nn.Module) -> Tensor:
        x = inputs(grad=True)
        return torch.autograd.grad(model(x).square().sum(), x)[0]

    with paired(Stack(), case, swap_folder) as pair:
        pair.engine.eval()
        pair.both(saliency)
        pair.nothing_resident()
        assert all(pair.engine.get_full(n, "grad") is None for n, _ in pair.offloaded.named_parameters())
        pair.engine.train()
        pair.train(square(inputs()), steps=1)


@swapped
def test_gradient_of_weights_by_autograd_grad(case: Case, swap_folder: Path) -> None:
    def gradients(model: Stack) -> list[Tensor]:
        wanted = [model.blocks[0].up.weight, model.head.bias]
        return list(torch.autograd.grad(model(inputs()).square().sum(), wanted))

    with paired(Stack(), case, swap_folder) as pair:
        pair.both(gradients)
        assert pair.engine.get_full("head.bias", "grad") is None
        pair.nothing_resident()


@swapped
def test_backward_limited_to_some_inputs(case: Case, swap_folder: Path) -> None:
    with paired(Stack(), case, swap_folder) as pair:
        for model in (pair.offloaded, pair.plain):
            model(inputs()).square().sum().backward(inputs=[model.blocks[1].up.weight])
        pair.step()


class Energy(nn.Module):
    """Differentiates inside its own forward, also where the caller has switched gradients off."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Force() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Force(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.block(y).square().sum(), y)
        return x - 0.1 * force


@everywhere
def test_gradients_inside_a_forward_without_gradients(case: Case, swap_folder: Path) -> None:
    with paired(Energy(), case, swap_folder) as pair, torch.no_grad():
        pair.both(lambda model: model(inputs()))
        pair.nothing_resident()


@everywhere
def test_graph_made_inside_no_grad_and_used_later(case: Case, swap_folder: Path) -> None:
    class Escaping(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                return super().forward(x)

    with paired(Stack(block=Escaping), case, swap_folder) as pair:
        with torch.no_grad():
            ours, theirs = (plainly(m, inputs(grad=True)) for m in (pair.offloaded, pair.plain))
        ours.sum().backward()
        theirs.sum().backward()
        pair.step()


@everywhere
def test_no_grad_in_the_middle_of_a_forward(case: Case, swap_folder: Path) -> None:
    class Partly(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.up(x)
            return self.down(x)

    with paired(Stack(block=Partly), case, swap_folder) as pair:
        pair.train(square(inputs()))


@swapped
@pytest.mark.parametrize("outer", ["pass", "cpu"])
def test_users_saved_tensor_hooks_outside(case: Case, swap_folder: Path, outer: str) -> None:
    count = [0]

    def pack(t: Tensor) -> Tensor:
        count[0] += 1
        assert not isinstance(t, nn.Parameter)
        return t.clone()

    with paired(Stack(), case, swap_folder) as pair:
        for _ in range(2):
            with save_on_cpu() if outer == "cpu" else saved_tensors_hooks(pack, lambda t: t):
                ours = pair.offloaded(inputs()).square().sum()
            ours.backward()
            pair.plain(inputs()).square().sum().backward()
            pair.step()
        assert outer == "cpu" or count[0] > 0


@swapped
def test_users_module_hooks(case: Case, swap_folder: Path) -> None:
    def edit(model: Stack) -> None:
        model.blocks[1].up.register_forward_pre_hook(lambda _m, a: (a[0] * 2,))
        model.blocks[1].register_forward_hook(lambda _m, _a, out: out + 1)
        model.blocks[2].register_full_backward_hook(lambda _m, gi, _go: (gi[0] * 0.5,))
        model.blocks[2].register_full_backward_pre_hook(lambda _m, go: (go[0] * 3,))
        model.blocks[0].register_forward_pre_hook(lambda _m, a, k: (a, k), with_kwargs=True, prepend=True)
        model.head.register_forward_hook(lambda m, _a, out: out * m.weight.sum())

    with paired(Stack(), case, swap_folder) as pair:
        edit(pair.offloaded)
        edit(pair.plain)
        pair.train(square(inputs()))


@everywhere
def test_tensor_hooks_edit_gradients(case: Case, swap_folder: Path) -> None:
    with paired(Stack(), case, swap_folder) as pair:
        for model in (pair.offloaded, pair.plain):
            model.blocks[1].down.weight.register_hook(lambda g: g.clamp(-0.1, 0.1))

        def run(model: Stack) -> Tensor:
            x = model.blocks[0](inputs(grad=True))
            x.register_hook(lambda g: g * 2)
            return model.head(model.blocks[1](x)).square().sum()

        pair.train(run)


@swapped
def test_saved_activation_modified_in_place(case: Case, swap_folder: Path) -> None:
    class Careless(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.sigmoid(self.up(x))
            out = self.down(y)
            y.add_(1)
            return out

    with paired(Stack(block=Careless), case, swap_folder) as pair:
        loss = pair.offloaded(inputs()).square().sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        pair.engine.zero_grad()
        pair.nothing_resident()


@everywhere
@pytest.mark.parametrize("change", ["step", "gathered", "set_full", "in place"])
def test_weights_changed_between_forward_and_backward(case: Case, swap_folder: Path, change: str) -> None:
    with paired(Stack(), case, swap_folder) as pair:
        pair.backward(square(inputs()))
        stale = pair.offloaded(inputs()).square().sum()
        weight = pair.offloaded.blocks[2].up.weight
        if change == "step":
            pair.engine.step()
        elif change == "gathered":
            with pair.engine.gathered(weight, modify=True), torch.no_grad():
                weight.add_(1)
        elif change == "set_full":
            pair.engine.set_full("blocks.2.up.weight", "parameter", torch.ones(weight.shape))
        else:
            with torch.no_grad():
                weight.add_(1)
        with pytest.raises(StaleWeightsError, match="run the forward again"):
            stale.backward()
        pair.engine.zero_grad()
        pair.nothing_resident()


@swapped
def test_unchanged_units_are_not_stale(case: Case, swap_folder: Path) -> None:
    with paired(Stack(), case, swap_folder) as pair:
        loss = pair.offloaded(inputs()).square().sum()
        with pair.engine.gathered(modify=False):
            pass
        loss.backward()
        pair.plain(inputs()).square().sum().backward()
        pair.step()


@swapped
def test_submodules_called_outside_their_block(case: Case, swap_folder: Path) -> None:
    with paired(Stack(), case, swap_folder) as pair:
        pair.train(lambda m: m.head(m.blocks[2].down(m.blocks[1].up(inputs(grad=True)))).square().sum())
        with torch.no_grad():
            pair.both(lambda m: m.blocks[0].up(inputs()))
        pair.nothing_resident()
        pair.train(lambda m: m.blocks[1](inputs(grad=True)).square().sum())


@everywhere
def test_weights_read_outside_any_forward(case: Case, swap_folder: Path) -> None:
    with paired(Stack(), case, swap_folder) as pair:
        captured = {id(m): list(m.parameters()) for m in (pair.offloaded, pair.plain)}

        def run(model: Stack) -> Tensor:
            penalty = sum((w.square().sum() for w in captured[id(model)]), torch.zeros(()))
            return model(inputs()).square().sum() + 0.1 * penalty

        pair.train(run)


@swapped
def test_penalty_in_gathered(case: Case, swap_folder: Path) -> None:
    with paired(Stack(), case, swap_folder) as pair:
        for _ in range(2):
            with pair.engine.gathered():
                ours = sum((w.pow(3).sum() for w in pair.offloaded.parameters()), torch.zeros(()))
            ours.backward()
            sum((w.pow(3).sum() for w in pair.plain.parameters()), torch.zeros(())).backward()
            pair.step()


@everywhere
def test_two_engines_alternate_and_meet_in_one_loss(case: Case, swap_folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with paired(Stack(2), case, swap_folder) as one, paired(Stack(3), case, other) as two:
        one.train(square(inputs()), steps=1)
        two.train(square(inputs()), steps=1)

        def through(a: Stack, b: Stack) -> Tensor:
            return b.head(plainly(b, plainly(a, inputs()))).square().sum() + a.head(inputs()).sum()

        for _ in range(2):
            ours, theirs = through(one.offloaded, two.offloaded), through(one.plain, two.plain)
            assert torch.equal(ours, theirs)
            ours.backward()
            theirs.backward()
            one.step()
            two.step()


@swapped
def test_backward_on_another_thread(case: Case, swap_folder: Path) -> None:
    with paired(Stack(), case, swap_folder) as pair:
        for _ in range(2):
            loss = pair.engine(inputs()).square().sum()
            failures: list[BaseException] = []

            def work(loss: Tensor = loss, failures: list[BaseException] = failures) -> None:
                try:
                    pair.engine.backward(loss)
                except BaseException as error:
                    failures.append(error)

            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            assert not failures
            pair.plain(inputs()).square().sum().backward()
            pair.step()


@swapped
def test_forwards_on_two_threads(case: Case, swap_folder: Path) -> None:
    with paired(Stack(6), case, swap_folder) as pair:
        results: dict[int, Tensor] = {}
        barrier = threading.Barrier(2)

        def work(seed: int) -> None:
            barrier.wait()
            for _ in range(3):
                with torch.no_grad():
                    results[seed] = pair.engine(inputs(seed=seed))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for seed in range(2):
            assert torch.equal(results[seed], pair.plain(inputs(seed=seed)))
        pair.nothing_resident()


@swapped
def test_threads_that_train_one_engine_lose_no_gradient(case: Case, swap_folder: Path) -> None:
    """Backwards that run at the same time add up (all contributions are equal, so that no order shows)."""
    rounds, workers = 6, 3
    interval = sys.getswitchinterval()
    with paired(Stack(3), case, swap_folder) as pair:
        failures: list[BaseException] = []

        def work() -> None:
            try:
                for _ in range(rounds):
                    pair.offloaded(inputs()).square().sum().backward()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(workers)]
        sys.setswitchinterval(1e-5)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
        assert not failures
        for _ in range(rounds * workers):
            pair.plain(inputs()).square().sum().backward()
            pair.reference.collect()
        pair.step()


def test_closed_engine_says_so(swap_folder: Path) -> None:
    with paired(Stack(), NVME[0], swap_folder) as pair:
        loss = pair.offloaded(inputs()).square().sum()
        pair.engine.close()
        with pytest.raises(OffloadError, match="closed"):
            loss.backward()
        with pytest.raises(OffloadError, match="closed"):
            pair.offloaded.head.weight.sum()
