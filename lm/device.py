"""Resolution of device and dtype settings, and asynchronous copies to a device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from configs.load import ConfigError


def device_of(name: str) -> str:
    """Resolve a `device` setting to `cpu` or `cuda:N`. `auto` and `cuda` are this process's GPU, `auto` else the CPU.

    Raises: ConfigError, if the machine lacks the device."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and not gpus):
        return "cpu"
    number = name.partition(":")[2]
    index = int(number) if number else torch.cuda.current_device() if gpus else 0
    if index >= gpus:
        there = "has no CUDA device"
        if gpus:
            there = "has 1 CUDA device, cuda:0" if gpus == 1 else f"has {gpus} CUDA devices, cuda:0 to cuda:{gpus - 1}"
        raise ConfigError(f"device={name}: this machine {there}; set device=auto or device=cpu")
    return f"cuda:{index}"


def dtype_of(name: str, device: str = "cuda") -> torch.dtype:
    """Resolve a `dtype` setting. `auto` is bfloat16 on a GPU that supports it, float32 elsewhere."""
    if name != "auto":
        return getattr(torch, name)
    if device == "cpu" or (torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False)):
        return torch.float32
    return torch.bfloat16


def describe_placement(**models: Any) -> dict[str, dict[str, str]]:
    """Return device and dtype of the models in this process by role, for a run's record."""
    held = {role: model.backbone for role, model in models.items() if hasattr(model, "backbone")}
    return {
        role: {"device": str(backbone.device), "dtype": str(backbone.model.dtype).removeprefix("torch.")}
        for role, backbone in held.items()
    }


def to_device(host: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to a device. Copies to a GPU go through pinned memory, so that the host does not wait."""
    device = torch.device(device)
    if device.type == "cuda" and host.device.type == "cpu":
        return host.contiguous().pin_memory().to(device, non_blocking=True)
    return host.to(device)
