"""Weights from `transformers` into an engine and back: names, ties, shards, dtypes; and files that lie."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import nn

import offload
from offload.cli import main
from tests.engine.common import Case, config_of, decoder, running, states_of, token_batches

transformers = pytest.importorskip("transformers")


def tiny(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_layer=2,
            n_head=2,
            n_embd=32,
            vocab_size=97,
            n_positions=32,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        hidden_size=32,
        intermediate_size=64,
        vocab_size=97,
        max_position_embeddings=32,
        **changes,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_transformers_round_trip(tmp_path: Path, kind: str) -> None:
    saved, out = tmp_path / "saved", tmp_path / "out"
    tiny(kind).save_pretrained(saved, max_shard_size="20KB")
    assert len(list(saved.glob("*.safetensors"))) > 1
    (saved / "tokenizer.json").write_text("{}")
    ids = token_batches(1)[0]
    with offload.empty_init():
        model = tiny(kind)
    config = config_of(Case(parameters="nvme", optimizer="nvme"), tmp_path)
    with offload.initialize(model, config, weights=saved) as engine:
        original = transformers.AutoModelForCausalLM.from_pretrained(saved)
        for name, parameter in original.named_parameters():
            assert torch.equal(engine.get_full(name), parameter.detach()), name
        for _ in range(3):
            engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
            engine.step()
        exported = engine.export_safetensors(out, max_shard_size="30KB", carry=saved)
        assert len(exported.files) > 1 and (out / "tokenizer.json").exists()
        engine.eval()
        with torch.no_grad():
            expected = engine(input_ids=ids, use_cache=False).logits
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids, use_cache=False).logits, expected)
    assert not torch.equal(expected, original.eval()(input_ids=ids, use_cache=False).logits)


def test_configurations_of_an_export(tmp_path: Path) -> None:
    model, saved, out = tiny("llama"), tmp_path / "saved", tmp_path / "out"
    model.generation_config.max_length = 77
    model.save_pretrained(saved)
    (saved / "tokenizer.json").write_text("{}")
    with offload.initialize(model, config_of(Case(), tmp_path)) as engine:
        engine.export_safetensors(out)
    assert transformers.GenerationConfig.from_pretrained(out).max_length == 77
    command = ["convert", str(out), str(tmp_path / "half"), "--dtype", "bf16", "--carry", str(saved)]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (tmp_path / "half" / name).exists()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert json.loads((saved / "config.json").read_text())["dtype"] == "float32"  # what is carried stays as it is


@pytest.mark.parametrize("state_format", ["fp32", "split", "compact"])
def test_dtypes_of_an_export(tmp_path: Path, state_format: str) -> None:
    case = Case(dtype="bf16", staging=4 << 20)
    with running(decoder(wide=True), case, tmp_path, optimizer={"state_format": state_format}) as engine:
        for ids in token_batches(2):
            engine.backward(engine(ids, labels=ids).loss)
            engine.step()
        states = states_of(engine)
        for dtype, kind in ((None, "weight"), ("fp32", "parameter"), ("fp16", "weight")):
            engine.export_safetensors(tmp_path / str(dtype), dtype)
            found = load_file(tmp_path / str(dtype) / "model.safetensors")
            assert set(found) == set(states)
            for name, tensor in found.items():
                expected = states[name][kind] if dtype != "fp16" else states[name]["weight"].half()
                assert torch.equal(tensor, expected), (name, dtype)


def save_model(model: nn.Module, path: Path, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    tensors = {name: p.detach().to(dtype or p.dtype).clone() for name, p in model.named_parameters()}
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    return tensors


def test_conversion_on_the_way_in(tmp_path: Path) -> None:
    tensors = save_model(decoder(seed=5), tmp_path / "w", torch.bfloat16)
    for dtype in ("fp32", "bf16"):
        with offload.empty_init():
            model = decoder()
        with offload.initialize(model, config_of(Case(dtype=dtype), tmp_path), weights=tmp_path / "w") as engine:
            for name, entry in states_of(engine).items():
                assert torch.equal(entry["weight"].float(), tensors[name].float()), name
                assert torch.equal(entry["parameter"], tensors[name].float()), name


def test_what_does_not_fit_is_listed(tmp_path: Path) -> None:
    tensors = save_model(decoder(), tmp_path / "w")
    changed = {k: v for k, v in tensors.items() if k != "norm.weight"} | {"stray": torch.zeros(3)}
    changed["embed_tokens.weight"] = torch.zeros(5, 5)
    save_file(changed, tmp_path / "w" / "model.safetensors")
    config = config_of(Case(), tmp_path)
    with pytest.raises(ValueError) as caught:
        offload.initialize(decoder(), config, weights=tmp_path / "w")
    text = str(caught.value)
    assert "1 missing (missing='init' accepts it): norm.weight" in text and "stray" in text
    assert "embed_tokens.weight (file [5, 5]" in text
    changed["embed_tokens.weight"] = tensors["embed_tokens.weight"]
    save_file(changed, tmp_path / "w" / "model.safetensors")
    weights = offload.Weights(path=tmp_path / "w", missing="init", extra="ignore")
    with offload.initialize(decoder(seed=7), config, weights=weights) as engine:
        assert torch.equal(engine.get_full("norm.weight"), torch.ones(24))
    with pytest.raises(ValueError, match="no such file"):
        offload.initialize(decoder(), config, weights=tmp_path / "none")


def broken(tmp_path: Path, header: bytes, data: bytes = b"") -> Path:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


BAD: dict[str, tuple[bytes, bytes]] = {
    "gap": (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', b"12345678"),
    "overlap": (
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        b"1234",
    ),
    "short": (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', b"1234"),
    "shape": (b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,4]}}', b"1234"),
    "huge": (b'{"a":{"dtype":"F32","shape":[9999999999,9999999999],"data_offsets":[0,4]}}', b"1234"),
    "negative": (b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,-4]}}', b""),
    "dtype": (b'{"a":{"dtype":"F31","shape":[1],"data_offsets":[0,4]}}', b"1234"),
    "twice": (
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        b"1234",
    ),
    "json": (b'{"a":', b""),
    "deep": (b"[" * 100_000, b""),
    "list": (b"[]", b""),
}


@pytest.mark.parametrize("name", BAD)
def test_hostile_headers(tmp_path: Path, name: str) -> None:
    from offload.checkpoint.weights import TensorFiles

    with pytest.raises(offload.CheckpointError, match=r"bad\.safetensors"):
        TensorFiles(broken(tmp_path, *BAD[name]))


def test_files_of_many_gigabytes(tmp_path: Path) -> None:
    """Sparse, so that only offsets are large."""
    from offload.checkpoint.weights import TensorFiles

    size = 5 << 30
    header = json.dumps(
        {
            "a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]},
            "b": {"dtype": "U8", "shape": [16], "data_offsets": [size, size + 16]},
        }
    ).encode()
    path = broken(tmp_path, header)
    with open(path, "r+b") as file:
        file.truncate(8 + len(header) + size)
        file.seek(0, 2)
        file.write(bytes(range(16)))
    with TensorFiles(path) as files:
        assert files.read("b", 0, 16).tolist() == list(range(16))


def test_hostile_directories(tmp_path: Path) -> None:
    from offload.checkpoint.weights import TensorFiles

    (tmp_path / "huge.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    with pytest.raises(offload.CheckpointError, match="header of"):
        TensorFiles(tmp_path / "huge.safetensors")
    for number, name in enumerate(("../outside.safetensors", "/etc/passwd", "..")):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(offload.CheckpointError, match="not the name of a file"):
            TensorFiles(folder)
