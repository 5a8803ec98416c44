"""What a parameter is when its engine takes it over, and when it lets go of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from offload.held import RECORD, make_stub
from offload.parameters import OffloadedParameter, ParameterRecord

if TYPE_CHECKING:
    from offload.residency import ResidentFlat, Unit


def adopt(unit: Unit, device: torch.device) -> None:
    """Gives every parameter of a unit its record, its data (a stub, or its place in a fixed plane) and its class.

    The memory that the parameters had is free afterwards, unless the user holds it.
    """
    for flat in unit.flats:
        adopt_flat(flat, device)


def adopt_flat(flat: ResidentFlat, device: torch.device) -> None:
    """`adopt` for the parameters of one flat, which nobody leases."""
    with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False), torch.no_grad():
        for record in flat.records:
            slot, parameter = record.slot, record.parameter
            setattr(parameter, RECORD, record)
            record.version = parameter._version
            if flat.fixed:
                assert flat.plane.tensor is not None
                parameter.data = flat.plane.tensor[slot.offset : slot.end].view(slot.shape)
            else:
                record.stub = make_stub(slot.shape, flat.flat.dtype, device)
                parameter.data = record.stub
            parameter.__class__ = OffloadedParameter


def abandon(record: ParameterRecord, value: Tensor) -> None:
    """Makes an offloaded parameter an ordinary one again, with `value` (its shape and dtype, on its device)."""
    parameter = record.parameter
    with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False), torch.no_grad():
        parameter.data = value
        parameter.__dict__.pop(RECORD, None)
        parameter.__class__ = nn.Parameter


def orphan(units: Iterable[Unit], device: torch.device) -> None:
    """Makes the units' parameters stubs that say that their engine is closed."""
    with torch.inference_mode(False), torch.no_grad():
        for unit in units:
            for flat in unit.flats:
                for record in flat.records:
                    parameter = record.parameter
                    parameter.__class__ = nn.Parameter
                    parameter.data = make_stub(record.slot.shape, flat.flat.dtype, device)
                    parameter.__dict__.pop(RECORD, None)
                    parameter.__class__ = OffloadedParameter
