"""Every key of the configuration, its type, its default and its meaning.

The models are frozen and refuse unknown keys. ``"auto"`` stays ``"auto"`` here: the planner resolves it later against
the model and the machine. Sizes are bytes once parsed.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from offload.config.checks import across, of_model
from offload.config.describe import problems_of
from offload.config.errors import ConfigError
from offload.config.values import (
    Betas,
    Count,
    CountOrAuto,
    FlagOrAuto,
    FlagOrCount,
    Fraction,
    LossScale,
    Names,
    NamesOrAuto,
    NotNegative,
    OrNone,
    Positive,
    PositiveSizeOrAuto,
    Sinks,
    Size,
    SizeOrAuto,
    Steps,
    StepsOrAuto,
)
from swap.geometry import PAGE

Tier = Literal["auto", "device", "host", "nvme"]


def _written(value: object) -> str:
    """A value as in a TOML file."""
    return str(value).lower() if isinstance(value, bool) else repr(value)


class Section(BaseModel):
    """Base of all sections: frozen, strict types, no unknown keys, no infinities."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class MemoryConfig(Section):
    """Byte budgets of the three tiers, and where swap files are made."""

    device: SizeOrAuto = "auto"
    """Bytes of device memory the engine may use."""
    host: SizeOrAuto = "auto"
    """Bytes of host memory the engine may use. On the ``cpu`` device the device is host memory too."""
    nvme: SizeOrAuto = "auto"
    """Bytes of all swap files together."""
    nvme_paths: Names = ()
    """Directories for swap files, striped over all of them."""


class PlacementConfig(Section):
    """The tier each kind of plane rests on."""

    parameters: Tier = "auto"
    optimizer: Tier = "auto"
    gradients: Tier = "auto"
    activations: Literal["auto", "keep", "device", "host", "nvme", "recompute"] = "auto"


class UnitsConfig(Section):
    """How the model is cut into units."""

    wrap: NamesOrAuto = "auto"
    """Class names of the repeated blocks; ``auto`` finds them."""
    persistent_below: Size = 0
    """Parameters smaller than this many bytes stay on the device."""


class OptimizerConfig(Section):
    """AdamW, clipping, and the learning-rate schedule that the command line builds."""

    name: Literal["adamw"] = "adamw"
    lr: NotNegative = 1e-3
    betas: Betas = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.01
    state_format: Literal["fp32", "split", "compact"] = "fp32"
    max_grad_norm: OrNone[Positive] = None
    """Largest global gradient norm; no clipping when unset."""
    check_finite: bool = True
    """Skip a step whose gradients hold an Inf or NaN."""
    no_decay: Names = ()
    """Parameters without weight decay: name patterns, or the words ``norms``, ``biases``, ``1d``."""
    scheduler: Literal["none", "constant", "linear", "cosine"] = "none"
    warmup_steps: Steps = 0
    total_steps: StepsOrAuto = "auto"
    """Step at which the schedule reaches its minimum; ``auto`` is ``train.steps``."""
    min_lr_ratio: Fraction = 0.0
    """The lowest learning rate as a part of ``lr``."""

    @model_validator(mode="after")
    def _schedule_fits(self) -> OptimizerConfig:
        if self.scheduler == "none" and self.warmup_steps:
            raise ValueError(
                f"warmup_steps = {self.warmup_steps} has no effect with scheduler = 'none': use 'constant' for a "
                "warm-up alone"
            )
        if self.total_steps != "auto" and self.warmup_steps > self.total_steps:
            raise ValueError(
                f"warmup_steps = {self.warmup_steps} is more than total_steps = {self.total_steps}: "
                "shorten the warm-up or lengthen the schedule"
            )
        return self


class PrecisionConfig(Section):
    """Dtypes of compute, accumulation and reduction, and the fp16 loss scale."""

    compute_dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Parameters in fp32 are cast to this; ``auto`` keeps every parameter's dtype."""
    keep: Names = ()
    """Name patterns of parameters that are not cast."""
    reduce_dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    accumulate_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    loss_scale: LossScale = "dynamic"
    """Used under fp16 only: a number, or ``dynamic``."""
    initial_loss_scale: Positive = 65536.0
    loss_scale_window: Count = 1000
    """Good steps before the dynamic scale is doubled."""
    min_loss_scale: Positive = 1.0
    hysteresis: Count = 2
    """Overflows before the dynamic scale is halved."""

    @model_validator(mode="after")
    def _scale_above_minimum(self) -> PrecisionConfig:
        if self.initial_loss_scale < self.min_loss_scale:
            raise ValueError(
                f"initial_loss_scale = {self.initial_loss_scale:g} is below min_loss_scale = {self.min_loss_scale:g}"
            )
        return self


class ScheduleConfig(Section):
    """When optimizer work runs, in which order micro-batches run, how far ahead units are fetched."""

    optimizer_step: Literal["auto", "barrier", "deferred", "eager"] = "auto"
    micro_batch_order: Literal["auto", "layer_major", "batch_major"] = "auto"
    prefetch_units: StepsOrAuto = "auto"
    loss_chunk: OrNone[Count] = None


class SwapConfig(Section):
    """The I/O engine and its buffers."""

    engine: Literal["auto", "threads", "aiofiles", "io_uring"] = "auto"
    staging: PositiveSizeOrAuto = "auto"
    """Bytes of the buffers between swap files and their users."""
    chunk: PositiveSizeOrAuto = "auto"
    """Bytes of one fp32 plane chunk in the optimizer step."""
    block: PositiveSizeOrAuto = "auto"
    """Bytes of one I/O request."""
    queue_depth: CountOrAuto = "auto"
    burst: SizeOrAuto = "auto"
    """Bytes read, or written, before the other direction has its turn; 0 for none. ``auto``: 64 MiB where the probe of
    a drive finds reads and writes at once slower than one after the other, else 0."""
    direct: FlagOrAuto = "auto"
    """O_DIRECT; ``auto`` probes each path."""
    checksum: bool = False
    """Keep the CRC32C of every page and compare it at every read."""
    timeout: NotNegative = 15.0
    """Seconds without an answer after which an I/O request is an error; 0 waits for ever."""
    endurance_tbw: OrNone[Positive] = None
    """Terabytes (10^12 bytes) that each drive may be written in its life, as its data sheet says."""

    @model_validator(mode="after")
    def _whole_pages(self) -> SwapConfig:
        if self.block != "auto" and self.block % PAGE:
            raise ConfigError([f"swap.block = {self.block}: must be a multiple of {PAGE} bytes, a page, or 'auto'"])
        return self


def _no_flag(value: Any) -> Any:
    if isinstance(value, bool):  # 1 and 0 to Python
        raise ValueError("must be a number from 0 to 3, or FSDP's name of a stage")
    return value


Stage = Annotated[
    Literal[0, 1, 2, 3, "NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"],
    BeforeValidator(_no_flag),
]


class ParallelConfig(Section):
    """How state is divided over ranks."""

    stage: Stage = 0
    """ZeRO's stage: 0 nothing is divided, 1 optimizer states, 2 gradients too, 3 parameters too. FSDP's names stand for
    0, 2 and 3; the hybrid ones for 3 and 2 within a machine, with replicas across machines."""
    shard_size: CountOrAuto = "auto"
    """Neighbouring ranks that divide state among them; all ranks, or those of a machine for hybrid names."""
    replicate_size: CountOrAuto = "auto"
    """Groups of such ranks, each with a whole copy."""
    verify_every: Steps = 100
    """Steps between comparisons of the weights that several ranks keep; 0 for none but that of first values."""
    accumulate: Literal["auto", "local", "reduced"] = "auto"
    """Whether micro-batches of a batch-major step are summed on each rank and reduced once (`local`; `auto` in stages 0
    to 2), or each reduced (`reduced`; `auto` in stage 3), which keeps no gradients of whole units."""
    reshard_after_forward: FlagOrCount = True
    """Stage 3: what is kept of a unit's weights between its forward and its backward. `true`: this rank's shard alone;
    `false`: all of them, so that the backward gathers nothing; a number m (a divisor of the ranks that divide state):
    a shard of 1/m, and the backward gathers among m neighbours. As FSDP2's argument, and ZeRO++'s hpZ."""
    limit_gathers: PositiveSizeOrAuto = "auto"
    """Stage 3: bytes of weights that may be on their way from other ranks at a time; `auto`: what the plan has room
    for."""
    timeout: Positive = 600.0
    """Seconds after which a rank that does not come to a collective is given up."""
    place_ranks: bool = True
    """Under ``torchrun``, which sets one thread for each rank: give a rank its share of the machine's cores, and a NUMA
    node where ranks can be spread over several equally; until the engine is closed."""

    @model_validator(mode="after")
    def _kept_weights_are_divided(self) -> ParallelConfig:
        for key, value in (
            ("reshard_after_forward", self.reshard_after_forward),
            ("limit_gathers", self.limit_gathers),
        ):
            if self.number < 3 and value is not True and value != "auto":
                raise ValueError(
                    f"{key} = {_written(value)} has no effect with stage = {_written(self.stage)}, where weights are "
                    "whole on every rank: use stage = 3, or remove it"
                )
        return self

    @property
    def number(self) -> int:
        """The stage as a number."""
        named = {"NO_SHARD": 0, "SHARD_GRAD_OP": 2, "FULL_SHARD": 3, "HYBRID_SHARD": 3, "_HYBRID_SHARD_ZERO2": 2}
        return named[self.stage] if isinstance(self.stage, str) else self.stage

    @property
    def within_machine(self) -> bool:
        """Whether state is divided among the ranks of one machine unless a size says otherwise."""
        return isinstance(self.stage, str) and "HYBRID" in self.stage


class CheckpointConfig(Section):
    """Where and how often the command line writes checkpoints."""

    directory: OrNone[str] = None
    """By default ``checkpoints`` in the run's directory."""
    interval: OrNone[Count] = None
    """Steps between two checkpoints; without one a checkpoint is written only when a signal ends the run."""
    keep: OrNone[Count] = None
    """Complete checkpoints to keep, the newest; all when unset."""
    keep_every: OrNone[Count] = None
    """Besides those, the checkpoints whose step is a multiple of this are kept."""
    dry_run: bool = False
    """Write and verify a checkpoint before the first step: what cannot be saved shows now."""
    on_signal: bool = True
    """Save when SIGTERM or SIGUSR1 ends the run."""
    background: bool = False
    """Save beside training instead of between two steps."""
    bandwidth_share: Positive = 0.5
    """The part of the time that a save beside training may keep the disk busy."""

    @model_validator(mode="after")
    def _kept_checkpoints_exist(self) -> CheckpointConfig:
        if self.keep_every is not None and self.keep is None:
            raise ValueError(f"keep_every = {self.keep_every} has no effect without keep, since all are kept then")
        if self.bandwidth_share > 1:
            raise ValueError(f"bandwidth_share = {self.bandwidth_share:g} is a part of the time: at most 1")
        return self


class LogConfig(Section):
    """What a run records."""

    sinks: Sinks = ("jsonl",)
    interval: Count = 1
    """Steps between two records."""
    predict: bool = True
    """Plan a run of five steps or more before it begins, and compare what it measures with the plan."""
    trace: bool = False
    """Record what every resource does when, and write it to ``trace.json`` in the run directory (for Perfetto)."""


class ModelConfig(Section):
    """The model of the command line: a preset of the small Llama, fields that override it, or a factory of your own."""

    preset: OrNone[str] = None
    weights: OrNone[str] = None
    """Safetensors files to start from: a file, or a directory as ``save_pretrained`` writes it."""
    factory: OrNone[str] = None
    """``package.module:callable`` that returns a module called with ``input_ids`` and ``labels``."""
    vocab_size: OrNone[Count] = None
    hidden_size: OrNone[Count] = None
    intermediate_size: OrNone[Count] = None
    layers: OrNone[Count] = None
    heads: OrNone[Count] = None
    kv_heads: OrNone[Count] = None
    max_positions: OrNone[Count] = None
    tie_embeddings: OrNone[bool] = None
    rope_theta: OrNone[Positive] = None
    norm_eps: OrNone[Positive] = None
    dropout: OrNone[Fraction] = None

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if self.factory is None:
            return self
        module, colon, name = self.factory.partition(":")
        if not (colon and name.isidentifier() and all(part.isidentifier() for part in module.split("."))):
            raise ValueError(f"factory = {self.factory!r}: must be 'package.module:callable'")
        others = sorted(key for key, value in self if key not in ("factory", "weights") and value is not None)
        if others:
            raise ValueError(f"factory builds the whole model: remove {', '.join(others)}")
        return self

    @model_validator(mode="after")
    def _sizes_fit(self) -> ModelConfig:
        if problems := of_model(self):
            raise ConfigError(problems)
        return self

    def overrides(self) -> dict[str, Any]:
        """The fields that override the preset."""
        return {key: value for key, value in self if key not in ("preset", "factory", "weights") and value is not None}


class DataConfig(Section):
    """Text files of the command line; by default the English text that ships with Python."""

    files: Names = ()
    """Paths or globs."""
    context: Annotated[int, Field(ge=2)] = 256
    """Tokens (bytes) of one sample: one to read, one to predict."""
    eval_fraction: Fraction = 0.05
    """The end of the text that is held out."""


class TrainConfig(Section):
    """The training loop of the command line."""

    steps: Count = 100
    batch_size: Count = 4
    """Samples of one micro-batch."""
    micro_batches: Count = 1
    """Micro-batches accumulated into one optimizer step."""
    eval_interval: Steps = 0
    """Steps between two evaluations; 0 evaluates before the first step and after the last only."""
    eval_batches: Steps = 8
    """Batches of one evaluation; 0 switches evaluation off."""
    threads: CountOrAuto = "auto"
    """torch's threads for compute."""


class Config(Section):
    """The whole configuration. A plain ``Config(...)`` raises `ConfigError` like `load_config` does."""

    device: Literal["auto", "cuda", "cpu", "sim"] = "auto"
    seed: Steps = 0
    run_dir: OrNone[str] = None
    memory: MemoryConfig = MemoryConfig()
    placement: PlacementConfig = PlacementConfig()
    units: UnitsConfig = UnitsConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    precision: PrecisionConfig = PrecisionConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    swap: SwapConfig = SwapConfig()
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()

    @model_validator(mode="after")
    def _sections_fit(self) -> Config:
        if problems := across(self):
            raise ConfigError(problems)
        return self

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(problems_of(error, type(self))) from None

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dict without unset values: what a TOML file of this configuration holds."""
        dumped = self.model_dump(mode="python", exclude_none=True)
        return {
            section: {key: list(value) if isinstance(value, tuple) else value for key, value in content.items()}
            if isinstance(content, dict)
            else content
            for section, content in dumped.items()
        }
