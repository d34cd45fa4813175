"""Loading and forward passes of Hugging Face models, text-only or vision-language (`lm.vision`).

Positions are computed here and passed explicitly, so that prefill, decoding with a cache and re-scoring agree.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import file_exists, hf_hub_download
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from configs.models import ModelSettings, model_path
from lm.attention import padding, share_heads
from lm.device import device_of, dtype_of, to_device
from lm.graph_cache import GraphCache
from lm.prompt import Picture, Prompt, PromptEncoder
from lm.vision import TOKEN_TYPE_INPUTS, check_vision_model, concatenate_pictures, parameter_names, vision_modules


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded sequences.

    Attributes:
        tokens, mask: (B, T).
        positions: (B, T), or (3, B, T) for multimodal rotary embeddings.
        vision: the forward pass's arguments for pictures, by name.
        padded: whether the mask hides anything; None if unknown.
    """

    tokens: Tensor
    mask: Tensor
    positions: Tensor
    vision: Mapping[str, Tensor] = field(default_factory=dict)
    padded: bool | None = None

    @property
    def next_positions(self) -> Tensor:
        """Return the position after each row's last token, (B, 1) or (3, B, 1); all axes agree in text."""
        last = self.positions.masked_fill(self.mask == 0, -1).amax(-1, keepdim=True)
        return (last if last.dim() == 2 else last.amax(0, keepdim=True).expand_as(last)) + 1


class Backbone(PromptEncoder):
    """A causal LM or VLM with the encoder of its prompts.

    Raises: ValueError, for an unsupported VLM (`lm.vision.check_vision_model`), or if model and processor use different
    image tokens."""

    _recomputed: Sequence[Any] = ()  # layers with gradient checkpointing
    _home: torch.device | None = None  # later device of weights that are still elsewhere

    def __init__(
        self,
        model: Any,
        processor: Any,
        memory_token: str = "auto",
        arguments: Mapping[str, Any] | None = None,
        home: torch.device | None = None,
    ) -> None:
        super().__init__(processor, memory_token, arguments)
        self.model = model  # PEFT wraps layers in place, so this remains the model
        self._home = home
        if self.is_vlm:
            check_vision_model(type(model))
            vision_modules(model)
            if self.image_id != (expected := getattr(model.config, "image_token_id", None)):
                raise ValueError(
                    f"{type(model).__name__} uses image token {expected}, but its processor {self.image_id}: use "
                    "the model's own processor"
                )

    @property
    def device(self) -> torch.device:
        """The device of batches: that of the input embeddings if the model is spread over several devices."""
        if self._home is not None:
            return self._home
        hook = getattr(self.model.get_input_embeddings(), "_hf_hook", None)
        placed = getattr(hook, "execution_device", None)
        return self.model.device if placed is None else torch.device(placed)

    @property
    def hidden_size(self) -> int:
        return self.model.config.get_text_config().hidden_size

    @property
    def context(self) -> int | None:
        """The model's context length in tokens; None if its config has none."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    @functools.cached_property
    def attends_fully(self) -> bool:
        """Whether every layer attends to all earlier tokens by mask and position alone, so that tree masks work.

        False for linear attention, state spaces, convolutions and sliding windows, for bidirectional attention within
        pictures, and for attention kernels without masks."""
        config = self.model.config.get_text_config()
        if any(kernel in str(config._attn_implementation) for kernel in ("flash", "flex")):
            return False
        windows = ["sliding_attention"] if getattr(config, "sliding_window", None) else []
        full = set(getattr(config, "layer_types", None) or windows) <= {"full_attention"}
        takes_positions = "position_ids" in parameter_names(self.body.forward) and not self._token_type_arguments
        return full and takes_positions and not getattr(self.model, "_is_stateful", False)

    @functools.cached_property
    def _token_type_arguments(self) -> list[str]:
        """Return the token-type arguments that the model's attention needs, as opposed to its rotary positions."""
        for_attention = self.is_vlm and not hasattr(self.body, "get_rope_index")
        return [name for name in TOKEN_TYPE_INPUTS if for_attention and name in parameter_names(self.body.forward)]

    @property
    def body(self) -> Any:
        """The model without its output head."""
        return getattr(self.model, self.model.base_model_prefix)

    @property
    def embedding_table(self) -> Tensor:
        """Return (V, d) as in `embeddings`: some models (Gemma) scale the stored weights."""
        layer = self.model.get_input_embeddings()
        scale = getattr(layer, "embed_scale", None)
        return layer.weight if scale is None else layer.weight * scale.to(layer.weight.dtype)

    def pad(self, rows: Sequence[Prompt], side: Literal["left", "right"]) -> Batch:
        """Pad prompts to a batch: on the left to generate, on the right to score.

        Raises: ValueError, if a row's image tokens and pictures do not match."""
        width = max(len(row.ids) for row in rows)
        tokens = torch.full((len(rows), width), self.pad_id, dtype=torch.long)
        mask = torch.zeros((len(rows), width), dtype=torch.long)
        for i, row in enumerate(rows):
            if row.ids.count(self.image_id) != sum(picture.tokens for picture in row.pictures):
                raise ValueError("a prompt's image tokens do not match its pictures: encode the request again")
            where = slice(width - len(row.ids), width) if side == "left" else slice(0, len(row.ids))
            tokens[i, where] = torch.tensor(row.ids)
            mask[i, where] = 1
        pixels = concatenate_pictures([picture for row in rows for picture in row.pictures], torch.device("cpu"))
        kinds = (tokens == self.image_id).int() * mask.int() if self.is_vlm else mask
        types = dict.fromkeys(self._token_type_arguments, kinds.long())
        # Compute positions on the host: on a GPU, `get_rope_index` synchronises several times per row.
        positions = self._positions(tokens, mask, kinds, pixels)
        move = functools.partial(to_device, device=self.device)
        vision = {name: move(tensor) for name, tensor in {**pixels, **types}.items()}
        padded = any(len(row.ids) < width for row in rows)
        return Batch(move(tokens), move(mask), positions=move(positions), vision=vision, padded=padded)

    def common_prefix(self, rows: Sequence[Prompt]) -> tuple[int, int]:
        """Return the numbers of tokens and pictures of a common prefix that can be prefilled once for all rows.

        At least one token of each row remains. (0, 0) for a single row."""
        if len(rows) < 2 or not self.attends_fully:  # a shared prefix leaves hidden columns in the cache
            return 0, 0
        return self.shared_prefix(rows, min(len(row.ids) for row in rows) - 1)

    def shared_prefix(self, rows: Sequence[Prompt], most: int) -> tuple[int, int]:
        """Return the numbers of tokens, at most `most`, and of pictures that all rows begin with: the same ids, soft
        tokens and whole pictures."""
        first, last = min(row.ids for row in rows), max(row.ids for row in rows)  # all others are between these two
        n = len(first)
        if first != last[:n]:
            n = next(i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
        n, shared = self._equal_soft(rows, min(n, most)), 0
        for pictures in zip(*map(self._pictures, rows), strict=False):
            start, end, picture = pictures[0]
            if end > n or not all(picture.looks_like(other) for *_, other in pictures[1:]):
                return min(n, start), shared
            shared += 1
        return n, shared

    def _equal_soft(self, rows: Sequence[Prompt], n: int) -> int:
        """Return how many of the first `n` tokens, which all rows share, come before a soft token that they do not."""
        if all(row.soft is None for row in rows):
            return n
        at = [i for i, id in enumerate(rows[0].ids[:n]) if id == self.memory_id]
        given = [row.soft[: len(at)] for row in rows if row.soft is not None]
        if not at or len(given) < len(rows):
            return at[0] if at else n
        same = torch.stack([(soft == given[0]).all(1) for soft in given[1:]]).all(0).tolist()
        return next((i for i, equal in zip(at, same, strict=True) if not equal), n)

    def _pictures(self, row: Prompt) -> list[tuple[int, int, Picture]]:
        """Return (first token, end, picture) of each picture in a row."""
        at = [i for i, id in enumerate(row.ids) if row.pictures and id == self.image_id]
        ends = accumulate(picture.tokens for picture in row.pictures)
        return [(at[end - p.tokens], at[end - 1] + 1, p) for end, p in zip(ends, row.pictures, strict=True)]

    def embeddings(self, tokens: Tensor) -> Tensor:
        """Embed tokens: (B, T, d)."""
        return self.model.get_input_embeddings()(tokens)

    def picture_embeddings(self, prompts: Sequence[Prompt]) -> list[Tensor]:
        """Compute the picture states of each prompt, (tokens, d), for prompts with pictures.

        Raises: ValueError, if the model computes another number of states than its processor has image tokens."""
        pictures = [picture for prompt in prompts for picture in prompt.pictures]
        found = self.body.get_image_features(**concatenate_pictures(pictures, self.device)).pooler_output
        states = torch.cat([part.flatten(0, -2) for part in found])
        places = [sum(picture.tokens for picture in prompt.pictures) for prompt in prompts]
        if sum(places) != len(states):
            raise ValueError(
                f"{type(self.model).__name__} computes {len(states)} states for {sum(places)} image tokens"
            )
        return list(states.split(places))

    def hidden(
        self, batch: Batch, cache: Any = None, embeddings: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Compute final hidden states (B, T, d), after the final norm.

        Args:
            cache: filled if given, or read (`GraphCache`).
            embeddings: (B, T, d), used instead of the batch's tokens.
            mask: used instead of the batch's, such as a tree's (B, 1, T, T), added to attention logits.
        """
        read = {"input_ids": batch.tokens} if embeddings is None else {"inputs_embeds": embeddings}
        grows = cache is not None and not isinstance(cache, GraphCache)
        with self._checkpointing(not grows), self.reading(batch):
            return self.body(
                **read,
                attention_mask=batch.mask if mask is None else mask,
                position_ids=batch.positions,
                past_key_values=cache,
                use_cache=grows,
                **batch.vision,
            ).last_hidden_state.to(self.device)

    def reading(self, batch: Batch) -> AbstractContextManager[None]:
        """Let forward passes on a GPU use `batch.padded` instead of synchronising to read the mask."""
        return padding(batch.padded if self.device.type == "cuda" else None)

    def enable_gradient_checkpointing(self) -> None:
        """Enable gradient checkpointing, also in evaluation mode, where transformers silently ignores it.

        Raises: ValueError, if the model's layers do not support it."""
        self._recomputed = [module for module in self.model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not self._recomputed:
            raise ValueError(f"{type(self.model).__name__} has no gradient checkpointing: gradient_checkpointing=false")
        for module in self._recomputed:
            module._can_checkpoint_with_cache = True  # a `GraphCache`; no other one is given to layers that checkpoint

    @contextmanager
    def _checkpointing(self, possible: bool) -> Iterator[None]:
        """Set layers to training mode, which checkpointing requires; `_checkpointed` restores the mode inside each."""
        layers = [(layer, layer.training) for layer in self._recomputed if possible and torch.is_grad_enabled()]
        for layer, mode in layers:
            layer._gradient_checkpointing_func = partial(_checkpointed, layer, mode)
            layer.gradient_checkpointing = layer.training = True
        try:
            yield
        finally:
            for layer, mode in layers:
                layer.gradient_checkpointing, layer.training = False, mode

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits (..., V) of hidden states (..., d)."""
        # Flatten to rows: for a slice of positions torch on a CPU copies the bfloat16 head (12 times as slow).
        rows = self.model.get_output_embeddings()(hidden.flatten(0, -2))
        return rows.unflatten(0, hidden.shape[:-1]).to(self.device)

    def _positions(self, tokens: Tensor, mask: Tensor, kinds: Tensor, pixels: Mapping[str, Tensor]) -> Tensor:
        plain = (mask.cumsum(-1) - 1).clamp(min=0)
        if not self.is_vlm or not hasattr(self.body, "get_rope_index"):
            return plain
        if not pixels:
            return plain.unsqueeze(0).expand(3, -1, -1)
        find = self.body.get_rope_index
        known = {"mm_token_type_ids": kinds, "attention_mask": mask, **pixels}
        positions, _ = find(tokens, **{name: known[name] for name in parameter_names(find) & known.keys()})
        return positions


def _checkpointed(layer: nn.Module, mode: bool, function: Callable[..., Any], *args: Any) -> Any:
    """Run a layer with gradient checkpointing in its current mode."""

    def in_mode(*args: Any) -> Any:
        before, layer.training = layer.training, mode
        try:
            return function(*args)
        finally:
            layer.training = before

    # No early stop: hooks at the end of a layer free its gathered weights (FSDP2, ZeRO-3).
    return checkpoint(in_mode, *args, use_reentrant=False, early_stop=False)


# -- loading ----------------------------------------------------------------------------------------------------------


def load_processor(name: str | Path, revision: str | None = None) -> Any:
    """Load the processor of a vision-language model, or the tokenizer of a text model."""
    kind: Any = AutoProcessor if _is_vlm(name, revision) else AutoTokenizer
    return kind.from_pretrained(name, revision=revision)


def load_encoder(
    name: str | Path,
    memory_token: str = "auto",
    revision: str | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> PromptEncoder:
    """Load a model's prompt encoder without its weights."""
    return PromptEncoder(load_processor(name, revision), memory_token, arguments)


# Placement of weights: the device or, before sharding, host memory (rank 0) or nowhere (meta tensors, other ranks).
Weights = Literal["device", "host", "nowhere"]
Quantize = Literal["8bit", "4bit"]


def load_backbone(
    name: str | Path,
    dtype: torch.dtype,
    device: str,
    memory_token: str = "auto",
    device_map: str | Mapping[str, str] | None = None,
    revision: str | None = None,
    attention: str = "auto",
    arguments: Mapping[str, Any] | None = None,
    weights: Weights = "device",
    quantize: Quantize | None = None,
) -> Backbone:
    """Load a model with its prompt encoder; as a vision-language model if its config has a vision part.

    Args:
        device: of the whole model, without `device_map`.
        device_map: spreads a frozen model over devices and host memory by accelerate: `auto`, or a device per module.
        revision: of a model on the Hub.
        attention: implementation; `auto` is transformers' choice.
        arguments: extra arguments of the chat template.
        weights: placement of the weights.
        quantize: the linear layers of a frozen model, by bitsandbytes.

    Raises:
        ValueError: a revision of a folder, an unsupported vision-language model, or no bitsandbytes.
    """
    quantized = quantization(quantize, dtype, device) if quantize else {}
    sees = _is_vlm(name, revision)
    kind: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    if sees:  # before reading weights
        config: Any = AutoConfig.from_pretrained(name, revision=revision)
        classes: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        check_vision_model(classes[type(config)])
    how = {"dtype": dtype, "revision": revision, **({} if attention == "auto" else {"attn_implementation": attention})}
    if device_map is None and weights == "device" and (quantized or device != "cpu"):
        device_map = {"": device}  # no copy in host memory
    if weights == "nowhere":
        model = _without_weights(kind, name, how)
    elif device_map is None:
        model = kind.from_pretrained(name, **how)
    else:
        model = kind.from_pretrained(name, **how, **quantized, device_map=device_map)
    if device == "cpu" and device_map is None:
        share_heads(model)
    home = None if weights == "device" else torch.device(device)
    return Backbone(model, load_processor(name, revision), memory_token=memory_token, arguments=arguments, home=home)


def quantization(quantize: Quantize, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that quantise linear layers; they compute in `dtype`.

    Raises: ValueError, if bitsandbytes is missing or does not support the device."""
    from transformers import BitsAndBytesConfig
    from transformers.integrations.bitsandbytes import validate_bnb_backend_availability
    from transformers.utils.import_utils import is_bitsandbytes_available

    if not is_bitsandbytes_available():
        raise ValueError(
            f"quantize={quantize} needs bitsandbytes, in a version that runs on this machine's GPU or CPU: pip install "
            "bitsandbytes. Without it: executor.quantize=null"
        )
    try:
        validate_bnb_backend_availability(raise_exception=True)
    except (RuntimeError, ImportError) as error:
        raise ValueError(f"quantize={quantize}: bitsandbytes does not run here: {error}") from error
    if quantize == "4bit" and device == "cpu":
        raise ValueError(
            "quantize=4bit repacks weights at their first use on a CPU, so they would not be frozen: use 8bit"
        )
    if quantize == "8bit":
        return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    four = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
    return {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, **four)}


def _without_weights(kind: Any, name: str | Path, how: Mapping[str, Any]) -> Any:
    """Create a model whose parameters are meta tensors, with real buffers."""
    from accelerate import init_empty_weights

    how = dict(how)
    config = AutoConfig.from_pretrained(name, revision=how.pop("revision"))
    with init_empty_weights():
        model = kind.from_config(config, **how)
    model.tie_weights()  # `init_empty_weights` untied them
    return model.eval()


def load_configured_backbone(
    config: ModelSettings, folder: Path | None = None, weights: Weights = "device"
) -> Backbone:
    """Load the model of the settings, or the one in `folder` with these settings."""
    device = device_of(config.device)
    return load_backbone(
        folder or model_path(config.model),
        dtype_of(config.dtype, device),
        device,
        memory_token=config.memory_token,
        device_map=getattr(config, "device_map", None),
        revision=None if folder else config.revision,
        attention=config.attention,
        arguments=config.chat_template,
        weights=weights,
        quantize=getattr(config, "quantize", None),
    )


def input_embeddings(name: str | Path, revision: str | None = None) -> Tensor:
    """Read the input embeddings (V, d) from a model's files without loading the model.

    Of a Hub model, only the file that contains them is downloaded. Raises: ValueError, if no file contains them."""
    for path in _weight_files(name, revision):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a dict
                if key.endswith("embed_tokens.weight"):
                    return file.get_tensor(key)
    raise ValueError(f"no input embeddings (embed_tokens.weight) in the safetensors files of {name}")


def _weight_files(name: str | Path, revision: str | None) -> list[Path]:
    """Return a local model's safetensors files, or download a Hub model's file with the input embeddings."""
    if Path(name).is_dir():
        return sorted(Path(name).glob("*.safetensors"))
    name, index = str(name), "model.safetensors.index.json"
    fetch = lambda file: Path(hf_hub_download(name, file, revision=revision))
    if not file_exists(name, index, revision=revision):
        return [fetch("model.safetensors")]
    where = json.loads(fetch(index).read_text())["weight_map"]
    files = {file for weight, file in where.items() if weight.endswith("embed_tokens.weight")}
    return [fetch(file) for file in sorted(files)]


def _is_vlm(name: str | Path, revision: str | None = None) -> bool:
    if revision is not None and Path(name).is_dir():
        raise ValueError(f"{name} is a folder: a revision needs a model on the Hub")
    return hasattr(AutoConfig.from_pretrained(name, revision=revision), "vision_config")
