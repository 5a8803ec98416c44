"""Configuration: files, overrides, sizes, and one clear line for everything that is wrong."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import tomli
import tomli_w

from offload.config import DEFAULT_FILE, Config, ConfigError, MemoryConfig, load_config


def problems(source: Any, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    assert all("\n" not in line for line in caught.value.problems)
    return caught.value.problems


def only_problem(source: Any, *overrides: str) -> str:
    found = problems(source, *overrides)
    assert len(found) == 1, found
    return found[0]


def test_defaults_need_no_source() -> None:
    config = load_config()
    assert config == Config()
    assert config.memory.host == "auto" and config.placement.parameters == "auto"
    assert config.optimizer.max_grad_norm is None and config.optimizer.check_finite


def test_the_embedded_default_is_valid_and_out_of_core() -> None:
    config = load_config(DEFAULT_FILE)
    placement = config.placement
    assert placement.parameters == placement.optimizer == placement.gradients == "nvme"
    assert config.train.steps >= 100 and config.optimizer.max_grad_norm == 1.0
    # About 20M parameters of 12 bytes of state at the very least.
    assert isinstance(config.memory.host, int) and config.memory.host < 20_000_000 * 12


@pytest.mark.parametrize(
    ("written", "expected"),
    [("8GiB", 8 << 30), ("500MB", 500_000_000), (4096, 4096), ("64KiB", 64 << 10), ("auto", "auto")],
)
def test_sizes_are_bytes(written: Any, expected: Any) -> None:
    assert load_config({"memory": {"host": written}}).memory.host == expected


@pytest.mark.parametrize("written", ["12 parsecs", "8", "GiB", "", -1, "-1GiB", 1.5, True, None, ["8GiB"]])
def test_sizes_without_meaning_are_refused(written: Any) -> None:
    line = only_problem({"memory": {"host": written}})
    assert line.startswith(f"memory.host = {written!r}: ")
    assert "'8GiB'" in line and "'auto'" in line


def test_zero_is_a_budget_but_not_a_buffer() -> None:
    assert load_config({"memory": {"host": 0}}).memory.host == 0
    assert "greater than 0" in only_problem({"swap": {"staging": 0}})


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ({"memroy": {"host": 1}}, "memroy: unknown key; did you mean 'memory'?"),
        ({"memory": {"hots": 1}}, "memory.hots: unknown key; did you mean 'memory.host'?"),
        ({"lr": 1.0}, "lr: unknown key; did you mean 'optimizer.lr'?"),
        ({"swap": {"nvme_path": []}}, "swap.nvme_path: unknown key; did you mean 'memory.nvme_paths'?"),
    ],
)
def test_unknown_keys_get_a_suggestion(source: Any, line: str) -> None:
    assert only_problem(source) == line


def test_an_unknown_key_like_no_other_lists_the_section() -> None:
    line = only_problem({"memory": {"zzzz": 1}})
    assert "nvme_paths" in line and "memory.zzzz" in line


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ({"optimizer": {"lr": "fast"}}, "optimizer.lr = 'fast': must be a number"),
        ({"optimizer": {"lr": True}}, "optimizer.lr = True: must be a number"),
        ({"optimizer": {"lr": float("nan")}}, "optimizer.lr = nan: must be a finite number"),
        ({"optimizer": {"eps": -1}}, "optimizer.eps = -1: must be greater than 0"),
        ({"optimizer": {"check_finite": 1}}, "optimizer.check_finite = 1: must be true or false"),
        ({"train": {"steps": 2.5}}, "train.steps = 2.5: must be a whole number"),
        ({"train": {"steps": "2"}}, "train.steps = '2': must be a whole number"),
        ({"train": 3}, "train = 3: must be a section with keys of its own, like [train]"),
        ({"device": "gpu"}, "device = 'gpu': must be one of 'auto', 'cuda', 'cpu' or 'sim'"),
        ({"log": {"sinks": ["wandb"]}}, "log.sinks[0] = 'wandb': must be 'jsonl'"),
        ({"units": {"wrap": []}}, "units.wrap = []: must not be empty: a list of class names, or 'auto'"),
        ({"memory": {"nvme_paths": [1]}}, "memory.nvme_paths = [1]: must be a list of non-empty strings"),
    ],
)
def test_wrong_values_say_what_is_legal(source: Any, line: str) -> None:
    assert only_problem(source) == line


def test_a_misspelt_value_gets_a_suggestion() -> None:
    assert only_problem({"placement": {"optimizer": "nvem"}}).endswith("did you mean 'nvme'?")


@pytest.mark.parametrize("betas", [[0.9], [0.9, 1.0], [-0.1, 0.9], "0.9", [0.9, "x"], 0.9])
def test_betas_are_two_numbers_below_one(betas: Any) -> None:
    assert "two numbers" in only_problem({"optimizer": {"betas": betas}})


def test_all_problems_come_together() -> None:
    found = problems({"memory": {"host": "much", "hots": 1}, "seed": "x", "train": {"steps": 0}}, "nonsense")
    assert len(found) == 5
    for key in ("memory.host", "memory.hots", "seed", "train.steps", "'nonsense'"):
        assert any(line.removeprefix("command line: ").startswith(key) for line in found), (key, found)


@pytest.mark.parametrize(
    "source",
    [
        {"optimizer": {"scheduler": "cosine", "warmup_steps": 11, "total_steps": 10}},
        {"optimizer": {"warmup_steps": 5}},
        {"precision": {"initial_loss_scale": 1.0, "min_loss_scale": 2.0}},
        {"model": {"factory": "no_colon"}},
        {"model": {"factory": "package:build", "layers": 2}},
    ],
)
def test_values_that_contradict_each_other(source: Any) -> None:
    assert only_problem(source).startswith(next(iter(source)))


def test_overrides_win_and_keep_their_types() -> None:
    config = load_config(
        {"memory": {"host": "1GiB"}, "optimizer": {"max_grad_norm": 1.0}},
        [
            "memory.host=2GiB",
            "optimizer.lr=3e-4",
            "optimizer.max_grad_norm=none",
            "optimizer.betas=[0.8, 0.9]",
            "data.files=a.txt",
            "memory.nvme_paths=['x', 'y']",
            "train.steps=7",
            "run_dir=2024",
            "model.tie_embeddings=true",
        ],
    )
    assert config.memory.host == 2 << 30
    assert config.optimizer.lr == 3e-4 and config.optimizer.betas == (0.8, 0.9)
    assert config.optimizer.max_grad_norm is None
    assert config.data.files == ("a.txt",) and config.memory.nvme_paths == ("x", "y")
    assert config.train.steps == 7 and config.run_dir == "2024" and config.model.tie_embeddings is True


@pytest.mark.parametrize("override", ["train.steps", "=3", "train.=3", ".steps=3"])
def test_malformed_overrides(override: str) -> None:
    assert "section.key=value" in only_problem(None, override)


def test_an_override_below_a_value() -> None:
    assert "not a section" in only_problem({"seed": 1}, "seed.x=2")


def test_problems_name_the_file_or_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("seed = 'x'\n[optimizer]\nwarmup_steps = 5\nscheduler = 'cosine'\n[model]\npreset = '20m'\n")
    assert only_problem(path) == f"{path}: seed = 'x': must be a whole number"
    found = problems(path, "train.steps=0", "model.factory=pkg:f", "optimizer.scheduler=none", "stray")
    labels = {line.partition(": ")[2].split()[0].rstrip(":"): line.partition(": ")[0] for line in found}
    line = "command line"
    assert labels == {"seed": str(path), "train.steps": line, "model": line, "optimizer": line, "'stray'": line}
    # One that mends the file leaves no problem of the file's.
    assert only_problem(path, "seed=1", "train.steps=0") == "command line: train.steps = 0: must be at least 1"


def test_a_factory_takes_the_place_of_the_default_preset(tmp_path: Path) -> None:
    for overrides in (["model.factory=pkg:f"], ["model.preset=none", "model.factory=pkg:f"]):
        model = load_config(DEFAULT_FILE, overrides).model
        assert model.factory == "pkg:f" and model.preset is None
    assert load_config(DEFAULT_FILE, ["model.factory=none"]).model.preset == "20m"
    both = only_problem(DEFAULT_FILE, "model.preset=1b", "model.factory=pkg:f")
    assert both == "command line: model: factory builds the whole model: remove preset"
    path = tmp_path / "run.toml"
    path.write_text("[model]\npreset = '20m'\n")
    assert "remove preset" in only_problem(path, "model.factory=pkg:f")


def test_overrides_do_not_change_their_source() -> None:
    source = {"memory": {"host": "1GiB"}}
    load_config(source, ["memory.host=2GiB", "optimizer.lr=0.1"])
    assert source == {"memory": {"host": "1GiB"}}
    config = Config(memory={"host": 5})
    assert load_config(config, ["memory.host=6"]).memory.host == 6
    assert config.memory.host == 5


def test_sections_may_be_models() -> None:
    assert load_config({"memory": MemoryConfig(host=5)}, ["memory.nvme=7"]).memory == MemoryConfig(host=5, nvme=7)


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_files_round_trip(tmp_path: Path, suffix: str) -> None:
    config = load_config(DEFAULT_FILE, ["memory.device=1GiB", "swap.direct=false", "units.wrap=['Block']"])
    path = tmp_path / f"run{suffix}"
    path.write_text(tomli_w.dumps(config.to_dict()) if suffix == ".toml" else json.dumps(config.to_dict()))
    assert load_config(path) == config
    assert load_config(str(path)) == config


def test_problems_in_a_file_name_it(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[memory]\nhost = 'much'\n")
    assert only_problem(path).startswith(f"{path}: memory.host = 'much': ")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("bad.toml", "[memory\n", "not valid TOML"),
        ("bad.json", "{", "not valid JSON"),
        ("list.json", "[]", "object of sections"),
        ("run.yaml", "", ".toml or .json"),
    ],
)
def test_unreadable_files(tmp_path: Path, name: str, text: str, said: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    line = only_problem(path)
    assert str(path) in line and said in line


def test_a_missing_file_and_a_directory(tmp_path: Path) -> None:
    assert only_problem(tmp_path / "none.toml") == f"{tmp_path / 'none.toml'}: no such configuration file"
    assert str(tmp_path) in only_problem(tmp_path)


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in only_problem(path)


@pytest.mark.parametrize("source", [3, ["memory"], {1: 2}])
def test_sources_that_are_no_configuration(source: Any) -> None:
    assert only_problem(source)


def test_a_config_cannot_be_changed_and_can_be_copied() -> None:
    config = Config(memory={"host": "1GiB"})
    with pytest.raises(ValueError, match="frozen"):
        config.memory.host = 3  # type: ignore[misc]
    assert copy.deepcopy(config) == config and pickle.loads(pickle.dumps(config)) == config


def test_the_constructor_raises_the_same_error() -> None:
    with pytest.raises(ConfigError, match=r"^memory\.host = 'much'"):
        Config(memory={"host": "much"})


def test_errors_survive_pickling() -> None:
    error = ConfigError(["a", "b"])
    again = pickle.loads(pickle.dumps(error))
    assert again.problems == ("a", "b") and str(again) == "a\nb" and isinstance(again, ValueError)


def test_the_written_form_is_plain_toml() -> None:
    text = tomli_w.dumps(load_config(DEFAULT_FILE).to_dict())
    assert load_config(tomli.loads(text)) == load_config(DEFAULT_FILE)
