"""`offload bench optimizer` on a small case: what it prints, not how fast it is."""

import json

import pytest
import torch
from click.testing import CliRunner

from offload.bench import optimizer, quality
from offload.cli import main
from optimizer_cpu import kernels
from optimizer_cpu.formats import format_names

KEYS = {
    "name",
    "state_format",
    "grad_dtype",
    "threads",
    "parameters_per_s",
    "bytes_per_parameter",
    "fraction_of_stream",
}


def test_json_has_every_case():
    before = torch.get_num_threads()
    result = CliRunner().invoke(
        main, ["bench", "optimizer", "--json", "--elements", "8192", "--rounds", "2", "--threads", "2"]
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["stream_bytes_per_s"] > 0 and report["isa"] == kernels.active_isa()
    rows = report["results"]
    assert all(row.keys() >= KEYS and row["parameters_per_s"] > 0 and row["fraction_of_stream"] > 0 for row in rows)
    ours = {(r["state_format"], r["grad_dtype"], r["threads"]) for r in rows if r["name"] == "offload"}
    assert ours >= {(f, "bfloat16", n) for f in format_names() for n in (1, 2)}
    assert ours >= {(f, d, 2) for f in format_names() for d in ("float32", "float16")}
    by_format = {r["state_format"]: r["bytes_per_parameter"] for r in rows if r["grad_dtype"] == "bfloat16"}
    assert by_format["fp32"] == 28 and by_format["split"] == 26 and by_format["compact"] == 12.25
    assert any(r["name"] == "torch fused + copies" and r["bytes_per_parameter"] == 40 for r in rows)
    assert torch.get_num_threads() == before


def test_table_and_peers_that_are_absent(monkeypatch):
    def absent(parameter):
        raise ModuleNotFoundError("No module named 'deepspeed'")

    monkeypatch.setattr(optimizer, "_deepspeed", absent)
    text = optimizer.run(False, elements=4096, rounds=1, threads=1, quick=True)
    assert "streaming read+write:" in text and "% stream" in text
    assert "DeepSpeedCPUAdam + copies: not measured (ModuleNotFoundError: No module named 'deepspeed')" in text


def test_bad_arguments():
    with pytest.raises(ValueError, match="elements=5 must be at least 4096"):
        optimizer.run(True, elements=5)
    result = CliRunner().invoke(main, ["bench", "optimizer", "--elements", "5"])
    assert result.exit_code == 2 and "elements" in result.output


def test_a_short_quality_comparison(tmp_path, capsys):
    curves = tmp_path / "curves.json"
    quality.main(["--out", str(tmp_path), "--steps", "4", "--seeds", "0", "--formats", "fp32", "--curves", str(curves)])
    arguments = ["--out", str(tmp_path), "--steps", "4", "--seeds", "0", "1", "--formats", "fp32", "split"]
    quality.main([*arguments, "--merge", str(curves)])
    text = (tmp_path / "state_format_quality.md").read_text()
    assert "| `split` |" in text and "equals `fp32`'s: yes" in text and text.strip() in capsys.readouterr().out
    picture = (tmp_path / "state_format_quality.svg").read_text()
    assert picture.startswith("<svg") and picture.count("<polyline") == 4
