"""`CPUAdamW`: AdamW on the CPU as a `torch.optim.Optimizer`.

Per parameter the optimizer keeps the planes of a state format (`optimizer_cpu.formats`) and steps them with the
kernels. Low-precision parameters get fp32 masters; fp64 parameters are stepped in fp64 by plain torch. Parameters on an
accelerator are mirrored in pinned host memory (`optimizer_cpu.staging`).

[Note: foreign writes] A master that is not the parameter itself can fall out of step with it when someone else writes
the parameter (loading weights, swapping in an average). Each step remembers the parameter's version; where it has
changed since, or after state was loaded, every element whose parameter is not the rounding of its master takes the
parameter's value. Writes through `.data` leave no trace and are not seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from optimizer_cpu import kernels, staging
from optimizer_cpu.formats import StateFormat, get_format
from optimizer_cpu.reference import AdamWHyper, adamw_double_

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_REFUSED = ("amsgrad", "maximize", "capturable", "differentiable")
_VERSION = "weight_version"
_LOADED = "loaded"


class CPUAdamW(torch.optim.Optimizer):
    """AdamW with decoupled weight decay, computed by the one-pass CPU kernels.

    `params`: tensors, named tensors or groups, as for torch. `lr`: float or one-element tensor. `state_format`: `fp32`
    (any float parameters), `split` (bf16 parameters, the same results with 2 bytes less each) or `compact` (bf16
    parameters, 5.125 bytes each); a group may set its own. `amsgrad` is refused.

    `state_dict()` holds fp32 `exp_avg` and `exp_avg_sq` in the parameter's shape, plus `master` for bf16 and fp16
    parameters, whatever the format, so it can be loaded by `torch.optim.AdamW` and the other way round; loading keeps
    this optimizer's formats.

    Raises ValueError for hyperparameters outside their domain and for parameters that are not dense, contiguous floats
    or that the state format cannot hold.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state_format: str = "fp32",
        amsgrad: bool = False,
    ) -> None:
        get_format(state_format)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": False,
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "fused": None,
            "decoupled_weight_decay": True,
            "state_format": state_format,
        }
        _check_options(defaults)
        self._mirrors: dict[Tensor, staging.HostMirror] = {}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does; ValueError leaves the optimizer as it was."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_options(group)
            fmt = get_format(group["state_format"])
            for index, parameter in enumerate(group["params"]):
                if parameter.requires_grad:
                    _check_parameter(_name(group, index), parameter, fmt)
        except ValueError:
            self.param_groups.pop()
            raise
        for parameter in group["params"]:
            self._mirror(parameter)

    def _mirror(self, parameter: Tensor) -> staging.HostMirror | None:
        """Staging of a parameter that is not in host memory."""
        if not staging.needs_mirror(parameter):
            return None
        if parameter not in self._mirrors:
            self._mirrors[parameter] = staging.HostMirror(parameter)
        return self._mirrors[parameter]

    def close(self) -> None:
        """Release pinned memory and gradient hooks; the optimizer may be used again and will make them anew."""
        for mirror in self._mirrors.values():
            mirror.close()
        self._mirrors.clear()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        kept = {p: {k: v for k, v in s.items() if k != _VERSION} for p, s in self.state.items()}
        return {**state, "state": kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not hasattr(self, "_mirrors"):
            self._mirrors = {}

    # ---- step --------------------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One optimizer step over all parameters that have a gradient; returns the closure's value."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            _check_options(group)
            fmt = get_format(group["state_format"])
            for index, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    self._step_parameter(group, index, parameter, fmt)
        for mirror in self._mirrors.values():
            mirror.finish()
        return loss

    def _step_parameter(self, group: dict[str, Any], index: int, parameter: Tensor, fmt: StateFormat) -> None:
        name = _name(group, index)
        grad = parameter.grad
        assert grad is not None
        _check_parameter(name, parameter, fmt)
        _check_gradient(name, grad, parameter)
        state = self.state[parameter]
        mirror = self._mirror(parameter)
        weight = parameter.detach() if mirror is None else mirror.weight(refresh=_foreign_write(state, parameter))
        flat_grad = (grad if mirror is None else mirror.gradient(grad)).view(-1)
        _prepare(name, state, weight, parameter, fmt)
        state["step"] += 1
        hyper = AdamWHyper(
            lr=float(group["lr"]),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            step=int(state["step"].item()),
            decoupled=bool(group.get("decoupled_weight_decay", True)),
        )
        planes = _planes(state, weight, fmt)
        if weight.dtype == torch.float64:
            adamw_double_(
                master=planes["weight"],
                exp_avg=planes["exp_avg"],
                exp_avg_sq=planes["exp_avg_sq"],
                grad=flat_grad,
                hyper=hyper,
            )
        else:
            kernels.step_(fmt.name, planes, grad=flat_grad, hyper=hyper)
        if mirror is not None:
            mirror.send()
        # Kernels write through addresses: autograd must still see that a saved parameter is no longer what it was. An
        # in-place operation on an empty view moves the version counter that the view shares.
        parameter.view(-1)[:0].zero_()
        state[_VERSION] = parameter._version

    # ---- state_dict --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As torch's; every format is decoded to fp32 `exp_avg`, `exp_avg_sq` and, for bf16 and fp16, `master`."""
        packed = super().state_dict()
        entries = dict(packed["state"])
        for index, (group, parameter) in enumerate(self._parameters()):
            if index in entries:
                entries[index] = _decoded(entries[index], parameter, get_format(group["state_format"]))
        return {**packed, "state": entries}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of this class or of `torch.optim.AdamW`.

        ValueError for a dictionary that does not fit the groups, a state whose shape is not its parameter's, or options
        that this optimizer refuses.
        """
        for number, saved in enumerate(state_dict["param_groups"]):
            for option in _REFUSED:
                if saved.get(option):
                    raise ValueError(f"param_groups[{number}] was saved with {option}=True, which CPUAdamW refuses")
        formats = [group["state_format"] for group in self.param_groups]
        fresh: dict[Tensor, dict[str, Any]] = {}
        parameters = list(self._parameters())
        indices = [i for saved in state_dict["param_groups"] for i in saved["params"]]
        if len(indices) == len(parameters):  # otherwise torch's own check below raises
            for saved_index, (_, parameter) in zip(indices, parameters, strict=True):
                entry = state_dict["state"].get(saved_index)
                if entry:
                    fresh[parameter] = _encoded_later(saved_index, entry, parameter)
        # torch casts states to the parameter's dtype, which would lose fp32 moments: it only gets the groups.
        super().load_state_dict({**state_dict, "state": {}})
        for group, state_format in zip(self.param_groups, formats, strict=True):
            group["state_format"] = state_format
        self.state.update(fresh)

    def _parameters(self) -> Iterable[tuple[dict[str, Any], Tensor]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                yield group, parameter


# ---- checks ---------------------------------------------------------------------------------------------------------


def _check_options(group: dict[str, Any]) -> None:
    for option in _REFUSED:
        if group.get(option):
            raise ValueError(f"{option}=True is not supported by CPUAdamW; use torch.optim.AdamW or leave it off")
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr as a tensor must have one element, got shape {tuple(lr.shape)}")
    betas = group["betas"]
    if len(betas) != 2:
        raise ValueError(f"betas={betas!r} must be two numbers")
    AdamWHyper(
        lr=float(lr),
        beta1=float(betas[0]),
        beta2=float(betas[1]),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        step=1,
    )


def _name(group: dict[str, Any], index: int) -> str:
    names = group.get("param_names")
    if names is not None:
        return f"parameter {names[index]!r}"
    return f"parameter {index} of its group (shape {tuple(group['params'][index].shape)})"


def _check_parameter(name: str, parameter: Tensor, fmt: StateFormat) -> None:
    if parameter.dtype not in _FLOATS or parameter.layout != torch.strided:
        raise ValueError(f"{name} is {parameter.dtype}, {parameter.layout}; CPUAdamW steps dense float tensors")
    if not parameter.is_contiguous():
        raise ValueError(
            f"{name} is not contiguous (strides {parameter.stride()}); kernels never copy silently: "
            "make it contiguous before the optimizer is built"
        )
    if parameter.dtype == torch.float64 and fmt.name == "fp32":
        return
    try:
        fmt.planes(parameter.dtype)
    except ValueError as error:
        raise ValueError(f"{name}: {error}, or give such parameters a group with state_format='fp32'") from None


def _check_gradient(name: str, grad: Tensor, parameter: Tensor) -> None:
    if grad.layout != torch.strided:
        raise ValueError(f"{name} has a gradient of layout {grad.layout}; CPUAdamW needs dense gradients")
    if not grad.is_contiguous():
        raise ValueError(f"the gradient of {name} is not contiguous (strides {grad.stride()}); assign a contiguous one")
    if grad.shape != parameter.shape:
        raise ValueError(f"{name} has shape {tuple(parameter.shape)}, its gradient {tuple(grad.shape)}")


# ---- state ----------------------------------------------------------------------------------------------------------


def _foreign_write(state: dict[str, Any], parameter: Tensor) -> bool:
    return state.get(_VERSION) != parameter._version


def _format_planes(fmt: StateFormat, dtype: torch.dtype) -> list[tuple[str, torch.dtype, int]]:
    """(name, dtype, group) of the state planes; fp64 parameters keep fp64 moments."""
    if dtype == torch.float64:
        return [("exp_avg", dtype, 1), ("exp_avg_sq", dtype, 1)]
    return [(plane.name, plane.dtype, plane.group) for plane in fmt.state_planes(dtype)]


def _planes(state: dict[str, Any], weight: Tensor, fmt: StateFormat) -> dict[str, Tensor]:
    names = [name for name, _, _ in _format_planes(fmt, weight.dtype)]
    return {"weight": weight.view(-1), **{name: state[name].view(-1) for name in names}}


def _prepare(name: str, state: dict[str, Any], weight: Tensor, parameter: Tensor, fmt: StateFormat) -> None:
    """Create, decode or mend the state of a parameter before its step; `weight` is its value in host memory."""
    if not state or _LOADED in state:
        loaded = state.pop(_LOADED, {})
        if loaded and loaded["exp_avg"].shape != parameter.shape:
            raise ValueError(_shape_message(name, parameter, loaded["exp_avg"].shape))
        state.setdefault("step", torch.tensor(0.0))
        for plane, dtype, group in _format_planes(fmt, weight.dtype):
            shape = parameter.shape if group == 1 else (-(-parameter.numel() // group),)
            state[plane] = torch.zeros(shape, dtype=dtype)
        _encode(state, weight, fmt, loaded)
        return
    if state["exp_avg"].shape != parameter.shape:
        raise ValueError(_shape_message(name, parameter, state["exp_avg"].shape))
    if "master" in state and _foreign_write(state, parameter):
        _reconcile(state["master"].view(-1), weight.view(-1))


def _shape_message(name: str, parameter: Tensor, found: torch.Size) -> str:
    return (
        f"{name} now has shape {tuple(parameter.shape)}, its optimizer state {tuple(found)}; "
        "remove it from optimizer.state or build a new optimizer"
    )


def _encode(state: dict[str, Any], weight: Tensor, fmt: StateFormat, loaded: dict[str, Tensor]) -> None:
    planes = _planes(state, weight, fmt)
    if weight.dtype in (torch.float64, torch.float32):
        for name, value in loaded.items():
            if name in ("exp_avg", "exp_avg_sq"):
                planes[name].copy_(value.view(-1))
        return
    master = weight.view(-1).to(torch.float32)
    if "master" in loaded:
        stored = loaded["master"].reshape(-1).to(torch.float32, copy=True)
        _reconcile(stored, weight.view(-1))
        master = stored
    moments = {
        name: loaded[name].reshape(-1).to(torch.float32).contiguous() for name in ("exp_avg", "exp_avg_sq") if loaded
    }
    # The weights written here are the ones that are there: each is the rounding of its master.
    kernels.load_(fmt.name, planes, master=master, **moments)


def _reconcile(master: Tensor, weight: Tensor) -> None:
    """Where `weight` is not the rounding of `master`, the weight was written by someone else and wins."""
    rounded = torch.empty_like(weight)
    kernels.round_weight_(master, rounded)
    master.copy_(torch.where(rounded == weight, master, weight.to(torch.float32)))


def _decoded(state: dict[str, Any], parameter: Tensor, fmt: StateFormat) -> dict[str, Any]:
    """The entry of `state_dict` for one parameter."""
    if _LOADED in state:
        return {"step": state["step"], **state[_LOADED]}
    if parameter.dtype in (torch.float64, torch.float32):
        return {name: state[name] for name in ("step", "exp_avg", "exp_avg_sq")}
    weight = parameter.detach().to("cpu")
    value = kernels.read(fmt.name, _planes(state, weight, fmt))
    decoded = {"exp_avg": value.exp_avg, "exp_avg_sq": value.exp_avg_sq, "master": value.master}
    return {"step": state["step"], **{name: tensor.view(parameter.shape) for name, tensor in decoded.items()}}


def _encoded_later(index: int, entry: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
    """State that waits for the next step, when the parameter's own value is certain to have been loaded too."""
    missing = [name for name in ("exp_avg", "exp_avg_sq", "step") if name not in entry]
    if missing:
        raise ValueError(f"state {index} lacks {', '.join(missing)}: it is not the state of an AdamW")
    dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    loaded = {}
    for name in ("exp_avg", "exp_avg_sq", "master"):
        if name not in entry:
            continue
        value = entry[name]
        if value.shape != parameter.shape:
            raise ValueError(
                f"state {index}: {name} has shape {tuple(value.shape)}, its parameter {tuple(parameter.shape)}"
            )
        loaded[name] = value.detach().to(device="cpu", dtype=dtype, copy=True).contiguous()
    step = float(entry["step"])
    if not (step >= 0 and math.isfinite(step)):
        raise ValueError(f"state {index}: step={step} must be finite and at least 0")
    return {"step": torch.tensor(step), _LOADED: loaded}
