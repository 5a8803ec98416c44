"""AdamW on the CPU for state that lives outside the device: kernels, their plain-torch reference, and state formats."""

from optimizer_cpu.adamw import CPUAdamW
from optimizer_cpu.formats import PlaneSpec, StateFormat, format_names, get_format
from optimizer_cpu.reference import BLOCK, AdamWHyper

__all__ = ["BLOCK", "AdamWHyper", "CPUAdamW", "PlaneSpec", "StateFormat", "format_names", "get_format"]
