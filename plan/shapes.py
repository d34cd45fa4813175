"""Tensors with shapes but no values, and a ledger of the memory that they would take.

The code of a training step or a decoder runs on them, forward and backward, in seconds for a 7 B model, and the ledger
records the memory at every moment. Token ids, masks and positions stay tensors with values, because that code branches
on them.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakTensorKeyDictionary

aten = torch.ops.aten
META = torch.device("meta")
FLASH = 1  # torch's attention kernel without a (T, T) matrix; with a mask, represents the memory-efficient one


class Ledger:
    """Bytes of all shapes by kind, now (`live`) and at the fullest moment (`peak`), and FLOPs of matrix products.

    Attributes:
        vocabulary: Sizes of vocabularies; a tensor whose last dimension is one counts as `logits`.
        trained: Shapes of trained parameters; another tensor with such a shape counts as `gradients`.
        gpu: Model GPU kernels if they save other tensors than CPU kernels.
    """

    def __init__(self, gpu: bool = True) -> None:
        self.gpu, self.kind, self.vocabulary, self.trained = gpu, "", set[int](), set[tuple[int, ...]]()
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.flops = 0
        self._known: set[int] = set()
        self._masks: Any = WeakTensorKeyDictionary()

    def add(self, elem: Tensor) -> None:
        """Count a tensor's storage once, until it is freed."""
        storage = elem.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        kind = self.kind or self._kind_of(tuple(elem.shape))
        self.live[kind] += size
        weakref.finalize(storage, self._drop, key, kind, size)
        if self.live.total() > self.peak.total():
            self.peak = self.live.copy()

    def _kind_of(self, shape: tuple[int, ...]) -> str:
        if shape in self.trained:
            return "gradients"
        return "logits" if shape and shape[-1] in self.vocabulary else "activations"

    def _drop(self, key: int, kind: str, size: int) -> None:
        self._known.discard(key)
        self.live[kind] -= size

    def shaped(self, tensor: Tensor) -> Shape:
        """Convert a tensor to a shape."""
        return tensor if isinstance(tensor, Shape) else Shape(tensor.detach().to(META), self)

    def mask(self, tensor: Tensor) -> Shape:
        """Convert a mask to a shape that all layers share, for the mask's lifetime."""
        if tensor not in self._masks:
            self._masks[tensor] = self.shaped(tensor)
        return self._masks[tensor]

    def adopt(self, module: nn.Module, kind: str) -> None:
        """Convert a module's parameters and floating-point buffers to shapes of this kind; tied ones stay tied."""
        shapes: dict[int, Any] = {}
        with self.named(kind):
            for part in module.modules():
                for name, held in part._parameters.items():
                    if held is not None and not isinstance(held, Shape):
                        if id(held) not in shapes:
                            shapes[id(held)] = nn.Parameter(self.shaped(held), requires_grad=held.requires_grad)
                        part._parameters[name] = shapes[id(held)]
                for name, held in part._buffers.items():
                    if held is not None and not isinstance(held, Shape):
                        real = torch.zeros(held.shape, dtype=held.dtype)
                        part._buffers[name] = self.shaped(real) if held.is_floating_point() else real

    def restart(self) -> None:
        """Reset the peak and the FLOPs."""
        self.peak, self.flops = self.live.copy(), 0

    @contextmanager
    def named(self, kind: str) -> Iterator[None]:
        """Count all tensors created inside the block as this kind."""
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before


class Shape(Tensor):
    """A tensor without values: a meta tensor that reports the CPU as its device. Reading its value returns 1. Autograd
    works as usual."""

    elem: Tensor
    ledger: Ledger

    @staticmethod
    def __new__(cls, elem: Tensor, ledger: Ledger) -> Shape:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            elem.size(),
            strides=elem.stride(),
            storage_offset=elem.storage_offset(),
            dtype=elem.dtype,
            device=torch.device("cpu"),
            requires_grad=False,
        )

    def __init__(self, elem: Tensor, ledger: Ledger) -> None:
        self.elem, self.ledger = elem, ledger
        ledger.add(elem)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Shape({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention and kwargs.get("attn_mask") is not None:
            kwargs = {**kwargs, "attn_mask": args[0].ledger.mask(kwargs["attn_mask"])}
        if func is nn.functional.dropout and args[0].ledger.gpu:  # saves a mask of bytes, not of floats
            return torch.native_dropout(args[0], kwargs["p"], kwargs["training"])[0]
        if func is Tensor.backward:  # so that recomputed layers are dispatched here, too
            run, ones = torch.autograd.graph._engine_run_backward, torch.ones_like(args[0])
            return run((args[0],), (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True)
        with torch._C.DisableTorchFunctionSubclass():  # results with values stay ordinary tensors
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        ledgers: list[Ledger] = []

        def inner(held: Any) -> Any:
            if isinstance(held, Shape):
                ledgers.append(held.ledger)
                return held.elem
            return held.to(META) if isinstance(held, Tensor) else META if isinstance(held, torch.device) else held

        inner_args, inner_kwargs = _mapped(inner, args), _mapped(inner, kwargs)
        ledger = ledgers[0]
        if func is aten._fused_sdp_choice.default:
            return FLASH
        if func is aten._local_scalar_dense.default:
            return 1.0 if args[0].dtype.is_floating_point else 1
        if func is aten.masked_scatter_backward.default:  # on meta it would need the number of selected values
            return Shape(args[0].elem.new_empty(args[2]), ledger)
        out = func(*inner_args, **inner_kwargs)
        if func._overloadpacket in flop_registry:
            ledger.flops += flop_registry[func._overloadpacket](*inner_args, **inner_kwargs, out_val=out)
        wrapped = _mapped(lambda held: Shape(held, ledger) if isinstance(held, Tensor) else held, out)
        return return_and_correct_aliasing(func, args, kwargs, wrapped)


def _mapped(of: Callable[[Any], Any], tree: Any) -> Any:
    """Map an operator's arguments or results: lists, tuples, dictionaries. (torch's pytree is slower.)"""
    if isinstance(tree, list | tuple):
        return type(tree)([_mapped(of, part) for part in tree])
    return {name: _mapped(of, part) for name, part in tree.items()} if isinstance(tree, dict) else of(tree)
