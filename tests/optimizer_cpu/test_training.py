"""CPUAdamW in whole training loops: the example, and inside transformers.Trainer."""

import re
from pathlib import Path

import pytest
import torch

from optimizer_cpu import CPUAdamW
from tests import programs

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_trains():
    result = programs.run(str(ROOT / "examples" / "cpu_adamw.py"), "--steps", "30", "--hidden", "64")
    assert result.returncode == 0, result.stderr
    before, after = (float(x) for x in re.findall(r"loss (?:before|after 30 steps): ([0-9.]+)", result.stdout))
    assert after < before - 1.5
    assert float(re.search(r"([0-9.]+) bytes per parameter", result.stdout).group(1)) == pytest.approx(5.13, abs=0.02)


@pytest.mark.parametrize("state_format", ["fp32", "compact"])
def test_inside_the_transformers_trainer(tmp_path, state_format):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="the Trainer needs it")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    rows = [{"input_ids": (torch.arange(16) + i) % 64, "labels": (torch.arange(16) + i) % 64} for i in range(64)]
    optimizer = CPUAdamW(model.parameters(), lr=5e-3, state_format=state_format)

    def arguments(steps):
        return transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=steps,
            per_device_train_batch_size=8,
            logging_steps=5,
            save_steps=10,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            save_strategy="steps",
            dataloader_pin_memory=False,
        )

    trainer = transformers.Trainer(model=model, args=arguments(20), train_dataset=rows, optimizers=(optimizer, None))
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < 0.7 * losses[0]
    resumed = transformers.Trainer(
        model=model,
        args=arguments(25),
        train_dataset=rows,
        optimizers=(CPUAdamW(model.parameters(), lr=5e-3, state_format=state_format), None),
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-20"))
    assert resumed.state.global_step == 25
    inner = getattr(resumed.optimizer, "optimizer", resumed.optimizer)  # accelerate wraps it
    assert isinstance(inner, CPUAdamW) and {int(s["step"]) for s in inner.state.values()} == {25}
