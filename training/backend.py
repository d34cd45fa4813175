"""Backends: how the processes of a run share an optimiser step.

    replicated   every process has everything; gradients are summed. Exact, needs no padding: the default
    fsdp         FSDP2 (`fully_shard`): compiler and executor in slices, gathered layer by layer
    zero2        DeepSpeed ZeRO-2: whole weights, gradients and moments in slices
    zero3        DeepSpeed ZeRO-3: everything in slices

A process's loss is its part of the global loss (weighted by global counts), so gradients are summed over processes,
not averaged. Checkpoints are unsliced and named by parameter: they load in any backend, with any number of processes.
Vision towers are never sliced: only processes with pictures run them, and gathering slices needs all processes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from compiler.checkpoint import PROJECTOR, trained_parameters
from compiler.hf import MemoryCompiler
from configs.training import Optimizer
from lm.device import to_device
from lm.vision import vision_modules
from training import distributed
from training.checkpoint import TrainingTensors

R = TypeVar("R")
T = TypeVar("T")


class Joint(nn.Module):
    """Compiler and executor in one module whose forward runs a function, so that wrappers see the whole step."""

    def __init__(self, compiler: MemoryCompiler, executor: nn.Module | None) -> None:
        super().__init__()
        self.compiler, self.executor = compiler, executor

    def forward(self, function: Callable[[], R]) -> R:
        return function()


class Replicated:
    """The default backend, and base of the others."""

    # Weights are in slices: the model cannot generate. Before slicing, other ranks than 0 may have meta tensors.
    is_sharded: ClassVar[bool] = False
    in_lockstep: ClassVar[bool] = False  # all processes must run equally many forward and backward passes

    def __init__(
        self, compiler: MemoryCompiler, executor: nn.Module | None, settings: Optimizer, with_projector: bool
    ) -> None:
        if self.in_lockstep and distributed.world_size() == 1:
            raise ValueError(
                "this backend shares a model between processes: start with `torchrun --nproc_per_node N` (N > 1), or "
                "set backend=replicated"
            )
        self.compiler, self.settings, self.with_projector = compiler, settings, with_projector
        self.optimizer = self._wrap(Joint(compiler, executor))
        self.base_rates = [group["lr"] for group in self.optimizer.param_groups]

    def _wrap(self, joint: Joint) -> torch.optim.AdamW:
        """Set `self.joint`, and create AdamW (paper Table 7) over LoRA and, if a loss reaches it, the projector, each
        with its own rate and eps."""
        self.joint: Callable[..., Any] = joint
        settings, projector = self.settings, list(self.compiler.projector.parameters())
        lora = [p for n, p in self.compiler.named_parameters() if p.requires_grad and not n.startswith(PROJECTOR)]
        groups: list[dict[str, Any]] = [{"params": lora, "lr": settings.lr}]
        if self.with_projector:
            eps = settings.projector_eps or settings.eps
            groups.append({"params": projector, "lr": settings.projector_lr or settings.lr, "eps": eps})
        for parameter in projector:
            parameter.requires_grad_(self.with_projector)
        return torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay)

    # -- a step -------------------------------------------------------------------------------------------------------

    def micro_batches(self, mine: Sequence[T], size: int) -> Iterator[Sequence[T]]:
        """Yield this process's rows, `size` at a time; in lockstep, then empty ones until all processes are done."""
        rounds = math.ceil(len(mine) / size)
        if self.in_lockstep:
            rounds = max(1, *distributed.gather(rounds))
        for i in range(rounds):
            yield mine[i * size : (i + 1) * size]

    def forward(self, function: Callable[[], R]) -> R:
        """Run a function that calls compiler and executor, or layers of them; return its tensors."""
        return self.joint(function)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> float:
        """Sum and clip gradients, update the weights, and clear gradients. Returns the norm before clipping. Raises:
        RuntimeError, if it is not finite."""
        parameters = [p for p in self.compiler.parameters() if p.requires_grad]
        self._sum_gradients(parameters)
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.settings.grad_clip)
        value = _finite(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return value

    def scale_rates(self, factor: float) -> float:
        """Set every group's learning rate to `factor` of its own; returns the first."""
        for group, rate in zip(self.optimizer.param_groups, self.base_rates, strict=True):
            group["lr"] = rate * factor
        return self.base_rates[0] * factor

    def _sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        if dist.is_initialized():
            for parameter in parameters:
                if parameter.grad is None:  # no rows on this process
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)

    # -- state by parameter name, unsliced; every process must call these ----------------------------------------------

    def state(self) -> TrainingTensors:
        """Gather a checkpoint's weights and moments."""
        return TrainingTensors(self.weights(), self._moments())

    def load(self, tensors: TrainingTensors) -> None:
        """Load a checkpoint's weights and moments."""
        self.load_weights(tensors.weights)
        self._load_moments(tensors.moments)

    def weights(self) -> dict[str, Tensor]:
        """Copy LoRA and projector to the CPU."""
        return {name: self.whole(p) for name, p in trained_parameters(self.compiler).items()}

    @torch.no_grad()
    def load_weights(self, weights: dict[str, Tensor]) -> None:
        for name, parameter in trained_parameters(self.compiler).items():
            parameter.copy_(self._like(weights[name], parameter))

    def whole(self, parameter: Tensor) -> Tensor:
        """Copy a parameter to the CPU, unsliced."""
        return parameter.detach().cpu().clone()

    def fingerprint(self, module: nn.Module) -> str:
        """Hash (SHA-256) this process's part of a module's parameters."""
        digest = hashlib.sha256()
        for name, parameter in sorted(module.named_parameters()):
            digest.update(name.encode())
            held = self._held(parameter).detach().cpu().contiguous()
            digest.update(held.view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _held(self, parameter: Tensor) -> Tensor:
        return parameter

    def _like(self, value: Tensor, parameter: Tensor) -> Tensor:
        """Slice a whole tensor as the parameter is."""
        return to_device(value, parameter.device).to(parameter.dtype)

    def _moments(self) -> dict[str, Tensor]:
        names = {id(p): name for name, p in trained_parameters(self.compiler).items()}
        return {
            f"{names[id(p)]}:{key}": self.whole(torch.as_tensor(value))
            for p, values in self.optimizer.state.items()
            for key, value in values.items()
        }

    def _load_moments(self, moments: dict[str, Tensor]) -> None:
        parameters = trained_parameters(self.compiler)
        for name, value in moments.items():
            of, key = name.rsplit(":", 1)
            target = parameters[of]
            self.optimizer.state[target][key] = value.clone() if key == "step" else self._like(value, target)


class Fsdp(Replicated):
    """FSDP2. Frozen and trained parameters are sliced alike; only LoRA and projector have gradients."""

    is_sharded = in_lockstep = True

    def _wrap(self, joint: Joint) -> torch.optim.AdamW:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        device = self.compiler.backbone.device
        mesh = init_device_mesh(device.type, (distributed.world_size(),))
        # Rank 0 holds its weights until all ranks have their slices.
        whole = dict(joint.state_dict()) if distributed.rank() == 0 else {}
        towers = [part for model in _models(joint) for part in vision_modules(model).values()]
        for model in _models(joint):
            for layer in _layers(model, towers):
                fully_shard(layer, mesh=mesh)
        # Reshard the root (embeddings, heads, projector) after forward, too: between steps all parameters are slices.
        ignored = {parameter for tower in towers for parameter in tower.parameters()}
        fully_shard(joint, mesh=mesh, reshard_after_forward=True, ignored_params=ignored)
        if any(distributed.gather(any(parameter.is_meta for parameter in joint.parameters()))):
            _load_from_first_rank(joint, whole, towers, device)
        return super()._wrap(joint)  # after slicing, which replaces parameters

    def backward(self, loss: Tensor) -> None:
        (loss * distributed.world_size()).backward()  # FSDP averages

    def _sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        pass  # scattered during backward

    def whole(self, parameter: Tensor) -> Tensor:
        return super().whole(parameter.full_tensor() if isinstance(parameter, DTensor) else parameter)

    def _held(self, parameter: Tensor) -> Tensor:
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter

    def _like(self, value: Tensor, parameter: Tensor) -> Tensor:
        assert isinstance(parameter, DTensor)
        value = value.to(parameter.device, parameter.dtype)
        return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _load_from_first_rank(
    joint: Joint, whole: dict[str, Any], towers: Sequence[nn.Module], device: torch.device
) -> None:
    """Distribute rank 0's tensors, one after another: slices, and whole vision towers."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    if distributed.rank() == 0:
        for tower in towers:  # FSDP moves only what it slices
            tower.to(device)
    set_model_state_dict(joint, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    for model in _models(joint):  # replacing meta parameters has untied them
        model.tie_weights()


class Zero2(Replicated):
    """DeepSpeed ZeRO-2. One engine has the joint module, because a second engine for the executor does not work."""

    in_lockstep = True
    stage: ClassVar[int] = 2
    persistent: ClassVar[int] = 100_000  # ZeRO-3 leaves parameters below this size whole

    def _wrap(self, joint: Joint) -> torch.optim.AdamW:
        import deepspeed

        if self.compiler.backbone.device.type == "cpu":
            # Shared-memory collectives take two minutes to compile; gloo does not need them.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        settings = {
            "train_micro_batch_size_per_gpu": 1,  # only for DeepSpeed's statistics
            "managed_gradient_accumulation": False,  # a step ends when we call step()
            "gradient_clipping": self.settings.grad_clip,
            "zero_optimization": {
                "stage": self.stage,
                "overlap_comm": False,
                "stage3_param_persistence_threshold": self.persistent,
            },
            "zero_allow_untested_optimizer": True,
        }
        self._distribute(joint, settings)
        optimizer = super()._wrap(joint)
        with self._prepared(joint):
            self.engine: Any = deepspeed.initialize(model=joint, optimizer=optimizer, config=settings)[0]
        self.joint = self.engine
        return optimizer

    def _distribute(self, joint: Joint, settings: dict[str, Any]) -> None:
        """Distribute weights that only rank 0 has."""

    def _prepared(self, joint: Joint) -> AbstractContextManager[None]:
        """Hide modules that DeepSpeed must not see."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss * distributed.world_size())  # DeepSpeed averages

    def step(self) -> float:
        self.engine.step()
        return _finite(float(self.engine.get_global_grad_norm()))

    @torch.no_grad()
    def load_weights(self, weights: dict[str, Tensor]) -> None:
        for name, parameter in trained_parameters(self.compiler).items():
            value = weights[name].to(parameter.device)
            self._put(parameter, value)
            if parameter.requires_grad:
                self._put_master(parameter, value, None)

    def _put(self, parameter: nn.Parameter, value: Tensor) -> None:
        parameter.copy_(value)

    def _put_master(self, parameter: Any, value: Tensor, key: str | None) -> None:
        """Set this process's slice of the fp32 weights (key None) or of a moment."""
        parameter.set_full_hp_param(value.float(), key)

    def _flat(self) -> list[Tensor]:
        """Return the fp32 slices that AdamW updates."""
        return list(self.engine.optimizer.single_partition_of_fp32_groups)

    def _moments(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_optimizer_state

        flat = self._flat()
        if not self.optimizer.state.get(flat[0]):
            return {}
        self._link_moments()
        step = self.optimizer.state[flat[0]]["step"].detach().cpu()
        moments: dict[str, Tensor] = {}
        for name, parameter in trained_parameters(self.compiler).items():
            if parameter.requires_grad:
                moments[f"{name}:step"] = step.clone()
                for key in ("exp_avg", "exp_avg_sq"):
                    whole: Any = safe_get_full_optimizer_state(parameter, key)
                    moments[f"{name}:{key}"] = whole.detach().cpu().clone()
        return moments

    def _load_moments(self, moments: dict[str, Tensor]) -> None:
        steps = [value for name, value in moments.items() if name.endswith(":step")]
        if not steps:
            return
        for flat in self._flat():  # AdamW creates its state in the first step only
            zeros = {key: torch.zeros_like(flat) for key in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[flat].update({"step": steps[0].clone(), **zeros})
        self._link_moments()
        parameters = trained_parameters(self.compiler)
        for name, value in moments.items():
            parameter, key = name.rsplit(":", 1)
            if key != "step":
                self._put_master(parameters[parameter], value.to(parameters[parameter].device), key)

    def _link_moments(self) -> None:
        """Link parameters to their moments; DeepSpeed does so in the first step, before all groups have moments."""
        self.engine.optimizer._hp_optimizer_states_linked = False
        self.engine.optimizer._lazy_init_hp_params_optimizer_state()


class Zero3(Zero2):
    """DeepSpeed ZeRO-3: parameters in slices, too."""

    is_sharded = True
    stage = 3

    def _distribute(self, joint: Joint, settings: dict[str, Any]) -> None:
        """Distribute rank 0's weights, one module after another: slices, and whole vision towers."""
        from deepspeed import zero

        if not any(distributed.gather(any(parameter.is_meta for parameter in joint.parameters()))):
            return
        device, replaced = self.compiler.backbone.device, dict[nn.Parameter, nn.Parameter]()
        parts = [part for model in _models(joint) for part in vision_modules(model).values()]
        towers = {module for part in parts for module in part.modules()}
        for module in joint.modules():
            fresh = nn.ParameterList()
            for name, parameter in module.named_parameters(recurse=False):
                if parameter not in replaced:  # tied parameters stay tied
                    real = torch.empty_like(parameter, device=device) if parameter.is_meta else parameter.to(device)
                    replaced[parameter] = nn.Parameter(real.detach(), requires_grad=parameter.requires_grad)
                    fresh.append(replaced[parameter])
                module._parameters[name] = replaced[parameter]
            whole = [*fresh] if module in towers else []
            for tensor in (*whole, *module.buffers(recurse=False)):
                dist.broadcast(tensor.data, 0)
            if not whole:
                zero.Init(module=fresh, config_dict_or_path=settings)  # broadcasts and slices

    @contextmanager
    def _prepared(self, joint: Joint) -> Iterator[None]:
        compiler = self.compiler
        for model in _models(joint):  # permanently: DeepSpeed slices all registered modules
            body: Any = getattr(model, model.base_model_prefix)
            for name in vision_modules(model):
                body.__dict__[name] = body._modules.pop(name)
        # DeepSpeed's hooks cannot handle the projector's output; only its linear map has parameters.
        joint.linear = compiler.projector.linear
        compiler.__dict__["projector"] = compiler._modules.pop("projector")
        try:
            yield
        finally:
            compiler._modules["projector"] = compiler.__dict__.pop("projector")

    def whole(self, parameter: Tensor) -> Tensor:
        import deepspeed

        if not hasattr(parameter, "ds_id"):
            return super().whole(parameter)
        with deepspeed.zero.GatheredParameters([parameter]):
            return super().whole(parameter)

    def _held(self, parameter: Tensor) -> Tensor:
        return getattr(parameter, "ds_tensor", parameter)

    def _put(self, parameter: nn.Parameter, value: Tensor) -> None:
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if distributed.rank() == 0:
                parameter.copy_(value)

    def _put_master(self, parameter: Any, value: Tensor, key: str | None) -> None:
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        size = parameter.ds_tensor.numel()  # the last slice is padded
        padded = torch.nn.functional.pad(value.float().flatten(), (0, size * distributed.world_size() - value.numel()))
        mine = padded[distributed.rank() * size :][:size]
        if key is None:
            safe_set_local_fp32_param(parameter, mine)
        else:
            safe_set_local_optimizer_state(parameter, mine, key)

    def _flat(self) -> list[Tensor]:
        return list(self.engine.optimizer.fp32_partitioned_groups_flat)

    def _link_moments(self) -> None:
        pass  # needed by ZeRO-2 only


BACKENDS: dict[str, type[Replicated]] = {"replicated": Replicated, "fsdp": Fsdp, "zero2": Zero2, "zero3": Zero3}


def _finite(norm: float) -> float:
    if not math.isfinite(norm):
        raise RuntimeError(f"the gradient norm is {norm}: lower the learning rate, or use float32")
    return norm


def _models(joint: Joint) -> list[Any]:
    """Return the Hugging Face models of compiler and executor."""
    return [joint.compiler.backbone.model, *([] if joint.executor is None else [joint.executor])]


def _layers(model: nn.Module, towers: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the blocks that are gathered one at a time, without those of vision towers."""
    skipped = {module for tower in towers for module in tower.modules()}
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [m for m in model.modules() if type(m).__name__ in names and m not in skipped]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} does not declare its layers (_no_split_modules): use backend=replicated or zero2"
        )
    return layers
