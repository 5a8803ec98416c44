"""The reference Llama: sizes, numbers against an independent implementation, initialisation, settings."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from offload.models import Llama, LlamaBlock, LlamaConfig, LlamaOutput, build_model, parameter_count, presets

SMALL = LlamaConfig(vocab_size=97, hidden_size=24, layers=3, heads=4, kv_heads=2, max_positions=32)


def tokens(batch: int = 2, time: int = 9, vocab: int = 97) -> torch.Tensor:
    return torch.randint(0, vocab, (batch, time), generator=torch.Generator().manual_seed(5))


def make(config: LlamaConfig = SMALL, seed: int = 0) -> Llama:
    torch.manual_seed(seed)
    return Llama(config)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vocab_size": 0}, "vocab_size"),
        ({"layers": 2.5}, "layers"),
        ({"heads": 5}, "hidden_size = 24 must be a multiple of heads = 5"),
        ({"heads": 8}, "heads = 8 leaves 3"),
        ({"kv_heads": 3}, "kv_heads = 3 must divide heads = 4"),
        ({"intermediate_size": 0}, "intermediate_size"),
        ({"norm_eps": 0.0}, "norm_eps"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"dropout": 1.0}, "dropout"),
        ({"max_positions": True}, "max_positions"),
    ],
)
def test_config_errors_name_the_field(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        dataclasses.replace(SMALL, **changes)


def test_defaults_follow_the_sizes_they_derive_from() -> None:
    config = LlamaConfig(vocab_size=8, hidden_size=512, layers=1, heads=8)
    assert (config.mlp_width, config.kv_head_count, config.head_width) == (1408, 8, 64)
    assert dataclasses.replace(config, hidden_size=1536, heads=12).mlp_width == 4096


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True}, {"kv_heads": 4, "intermediate_size": 40}])
def test_parameter_count_is_what_the_model_has(changes: dict[str, Any]) -> None:
    config = dataclasses.replace(SMALL, **changes)
    assert parameter_count(config) == sum(parameter.numel() for parameter in Llama(config).parameters())


@pytest.mark.parametrize(
    ("name", "millions"), [("20m", 19.5), ("110m", 109.5), ("438m", 438.1), ("1b", 1100.0), ("10b", 9938.8)]
)
def test_presets_have_their_size(name: str, millions: float) -> None:
    assert parameter_count(presets[name]) / 1e6 == pytest.approx(millions, abs=0.06)
    with torch.device("meta"):
        model = Llama(presets[name])
    assert sum(parameter.numel() for parameter in model.parameters()) == parameter_count(presets[name])


@pytest.mark.parametrize("tied", [False, True])
def test_equals_an_independent_implementation(tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    ours = make(dataclasses.replace(SMALL, tie_embeddings=tied, dropout=0.0))
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=97,
            hidden_size=24,
            intermediate_size=SMALL.mlp_width,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            rms_norm_eps=1e-5,
            tie_word_embeddings=tied,
        )
    )
    renamed = {
        name if name.startswith("lm_head") else f"model.{name}": value for name, value in ours.state_dict().items()
    }
    assert not theirs.load_state_dict(renamed).missing_keys
    ids = tokens()
    mine, reference = ours(ids, labels=ids), theirs(input_ids=ids, labels=ids)
    torch.testing.assert_close(mine.logits, reference.logits, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mine.loss, reference.loss, rtol=1e-6, atol=0)
    mine.loss.backward()
    reference.loss.backward()
    torch.testing.assert_close(
        ours.layers[1].self_attn.k_proj.weight.grad,
        theirs.model.layers[1].self_attn.k_proj.weight.grad,
        rtol=1e-4,
        atol=1e-7,
    )


def test_loss_is_shifted_fp32_and_leaves_out_ignored_targets() -> None:
    model, ids = make().bfloat16(), tokens()
    labels = ids.clone()
    labels[0, 4:] = -100
    output = model(ids, labels)
    assert output.logits.dtype == torch.bfloat16 and output.loss.dtype == torch.float32
    picked = [
        F.cross_entropy(output.logits[row, t].float(), labels[row, t + 1])
        for row in range(2)
        for t in range(8)
        if labels[row, t + 1] != -100
    ]
    assert len(picked) == 3 + 8
    torch.testing.assert_close(output.loss, torch.stack(picked).mean())
    assert model(ids).loss is None


def test_later_tokens_do_not_change_earlier_logits() -> None:
    model, ids = make(), tokens()
    changed = ids.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % 97
    before, after = model(ids).logits, model(changed).logits
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


def test_bad_inputs_are_refused() -> None:
    model = make()
    with pytest.raises(ValueError, match=r"max_positions = 32 tokens, got shape \(1, 33\)"):
        model(tokens(1, 33))
    with pytest.raises(ValueError, match=r"labels must have the shape .*\(2, 9\), got \(2, 8\)"):
        model(tokens(), tokens(time=8))
    with pytest.raises(ValueError, match="max_new_tokens"):
        model.generate(tokens(), -1)


def test_output_is_a_pytree_with_the_loss_first() -> None:
    output = make()(tokens(), tokens())
    assert isinstance(output, LlamaOutput)
    assert dataclasses.fields(output)[0].name == "loss"
    leaves = tree_leaves(output)
    assert leaves[0] is output.loss and leaves[1] is output.logits


def test_every_owner_of_parameters_initialises_all_of_them() -> None:
    model = make(dataclasses.replace(SMALL, tie_embeddings=True))
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if not own:
            assert not hasattr(module, "reset_parameters"), name
            continue
        for parameter in own:
            nn.init.constant_(parameter, float("nan"))
        module.reset_parameters()
        assert all(torch.isfinite(parameter).all() for parameter in own), name


def test_no_parent_changes_what_its_children_initialised() -> None:
    with torch.device("meta"):
        model = Llama(dataclasses.replace(SMALL, tie_embeddings=True))
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            # One in-place operation of its own reset_parameters, and for the tied head none besides.
            assert parameter._version == 1, name


def test_initial_spread() -> None:
    model = make(LlamaConfig(vocab_size=256, hidden_size=128, layers=8, heads=4))
    assert model.embed_tokens.weight.std().item() == pytest.approx(0.02, rel=0.05)
    block = model.layers[0]
    assert isinstance(block, LlamaBlock)
    assert block.self_attn.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for scaled in (block.self_attn.o_proj, block.mlp.down_proj):
        assert scaled.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert torch.equal(block.input_layernorm.weight, torch.ones(128))


def test_rotary_tables_survive_casts_meta_and_the_state_dict() -> None:
    exact = make().rotary
    with torch.device("meta"):
        on_meta = Llama(SMALL)
    assert on_meta.rotary.cos.device.type == "cpu" and on_meta.embed_tokens.weight.is_meta
    for changed in (make().bfloat16(), make().half().float(), on_meta.to_empty(device="cpu")):
        assert changed.rotary.cos.dtype == torch.float32
        assert torch.equal(changed.rotary.cos, exact.cos) and torch.equal(changed.rotary.sin, exact.sin)
    assert not any("rotary" in name for name in make().state_dict())
    torch.testing.assert_close(exact.cos[5, 1].item(), torch.tensor(5 * 10000 ** (-2 / 6)).cos().item())


def test_tied_head_is_one_parameter() -> None:
    model = make(dataclasses.replace(SMALL, tie_embeddings=True))
    assert model.lm_head.weight is model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())


def test_dropout_works_in_training_only() -> None:
    model, ids = make(dataclasses.replace(SMALL, dropout=0.5)), tokens()
    model.train()
    torch.manual_seed(1)
    first = model(ids).logits
    torch.manual_seed(1)
    assert torch.equal(first, model(ids).logits)
    assert not torch.equal(first, model(ids).logits)
    model.eval()
    assert torch.equal(model(ids).logits, make()(ids).logits)


def test_generate_is_greedy_and_slides_past_max_positions() -> None:
    model, ids = make().eval(), tokens(2, 30)
    result = model.generate(ids, 5)
    assert result.shape == (2, 35) and torch.equal(result[:, :30], ids)
    for end in range(30, 35):
        expected = model(result[:, max(0, end - 32) : end]).logits[:, -1].argmax(-1)
        assert torch.equal(result[:, end], expected)
    assert torch.equal(model.generate(ids, 0), ids)


def test_it_learns() -> None:
    model, ids = make(), tokens(4, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        loss = model(ids, ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(4.57, abs=0.1)  # ln 97
    assert losses[-1] < 0.5 * losses[0]


def settings(preset: str | None = None, factory: str | None = None, **overrides: Any) -> Any:
    return SimpleNamespace(preset=preset, factory=factory, overrides=lambda: overrides)


def test_build_model_applies_overrides_to_the_preset() -> None:
    model = build_model(settings(None, layers=2, hidden_size=64, heads=2), context=2000)
    assert isinstance(model, Llama)
    assert (model.config.layers, model.config.mlp_width, model.config.vocab_size) == (2, 192, 256)
    assert model.config.max_positions == 2000
    with torch.device("meta"):
        assert build_model(settings("438m"), context=128).config.max_positions == 4096


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (settings("3m"), "model.preset = '3m': must be one of 20m, 110m, 438m, 1b, 10b"),
        (settings("20m", heads=7), "model.hidden_size = 512 must be a multiple of heads = 7"),
        (settings("20m", vocab_size=97), "model.vocab_size = 97"),
        (settings("20m", max_positions=64), "model.max_positions = 64 is less than data.context = 128"),
        (settings(factory="no.such.package:make"), "model.factory = 'no.such.package:make': No module named"),
        (settings(factory="torch.nn:Absent"), "model.factory = 'torch.nn:Absent': .*Absent"),
        (settings(factory="builtins:dict"), "must return a torch.nn.Module, got dict"),
    ],
)
def test_build_model_errors_name_the_key(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(given, context=128)


def test_build_model_calls_a_factory() -> None:
    assert isinstance(build_model(settings(factory="torch.nn:Identity"), context=8), nn.Identity)
