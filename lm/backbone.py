"""A Hugging Face model as compiler and executor load and use it, text-only or vision-language (`lm.vision`).

Positions are always computed here and passed explicitly, so that prefill, decoding with a cache and re-scoring agree to
the last bit of position.
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
from lm.prompt import Picture, Prompt, PromptEncoder
from lm.vision import TYPES, asked, check_sees, joined, vision_parts


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded sequences. tokens, mask: (B, T); positions: (B, T), or (3, B, T) for multimodal rotary embeddings; vision:
    what the model's forward pass takes for the batch's pictures, by name; padded: whether the mask hides anything,
    where that is known."""

    tokens: Tensor
    mask: Tensor
    positions: Tensor
    vision: Mapping[str, Tensor] = field(default_factory=dict)
    padded: bool | None = None

    @property
    def next_positions(self) -> Tensor:
        """(B, 1) or (3, B, 1), the position after each row's last real token (in text all axes agree)."""
        last = self.positions.masked_fill(self.mask == 0, -1).amax(-1, keepdim=True)
        return (last if last.dim() == 2 else last.amax(0, keepdim=True).expand_as(last)) + 1


class Backbone(PromptEncoder):
    """A causal LM or VLM and the encoder of its prompts. Raises: ValueError, for a VLM whose pictures do not take the
    places of tokens (`lm.vision.check_sees`), or of other tokens than its processor's."""

    _recomputed: Sequence[Any] = ()  # layers under gradient checkpointing
    _home: torch.device | None = None  # where the weights are going to be, where they are not there yet

    def __init__(
        self,
        model: Any,
        processor: Any,
        memory_token: str = "auto",
        arguments: Mapping[str, Any] | None = None,
        home: torch.device | None = None,
    ) -> None:
        super().__init__(processor, memory_token, arguments)
        self.model = model  # the HF model; PEFT wraps layers in place, so this stays the handle
        self._home = home
        if self.is_vlm:
            check_sees(type(model))
            vision_parts(model)
            if self.image_id != (theirs := getattr(model.config, "image_token_id", None)):
                raise ValueError(
                    f"{type(model).__name__} has pictures in the places of token {theirs}, its processor in those "
                    f"of {self.image_id}"
                )

    @property
    def device(self) -> torch.device:
        """Where batches go: where a model that is spread over devices has its input embeddings."""
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
        """Tokens that the model was made for; None where its config does not say."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    @functools.cached_property
    def attends_fully(self) -> bool:
        """Tell whether every layer attends to all earlier tokens, by mask and position alone, so that a tree's mask
        means what it says: not with linear attention, state spaces, convolutions or sliding windows, not where tokens
        of a picture see those that follow, and not with kernels of attention that take no mask."""
        config = self.model.config.get_text_config()
        if any(kernel in str(config._attn_implementation) for kernel in ("flash", "flex")):
            return False
        windows = ["sliding_attention"] if getattr(config, "sliding_window", None) else []
        full = set(getattr(config, "layer_types", None) or windows) <= {"full_attention"}
        takes_positions = "position_ids" in asked(self.body.forward) and not self._told_types
        return full and takes_positions and not getattr(self.model, "_is_stateful", False)

    @functools.cached_property
    def _told_types(self) -> list[str]:
        """Name the arguments that tell the model's attention which tokens are a picture's: its types, where they are
        not for finding positions."""
        for_attention = self.is_vlm and not hasattr(self.body, "get_rope_index")
        return [name for name in TYPES if for_attention and name in asked(self.body.forward)]

    @property
    def body(self) -> Any:
        """The model without its output head."""
        return getattr(self.model, self.model.base_model_prefix)

    @property
    def embedding_table(self) -> Tensor:
        """(V, d), as `embeddings` gives them: some models (Gemma) scale what they store."""
        layer = self.model.get_input_embeddings()
        scale = getattr(layer, "embed_scale", None)
        return layer.weight if scale is None else layer.weight * scale.to(layer.weight.dtype)

    def pad(self, rows: Sequence[Prompt], side: Literal["left", "right"]) -> Batch:
        """Pad on the left to generate, on the right to score. Raises: ValueError, where a row has places for images but
        no pixels, or pixels but no places."""
        width = max(len(row.ids) for row in rows)
        tokens = torch.full((len(rows), width), self.pad_id, dtype=torch.long)
        mask = torch.zeros((len(rows), width), dtype=torch.long)
        for i, row in enumerate(rows):
            if row.ids.count(self.image_id) != sum(picture.tokens for picture in row.pictures):
                raise ValueError(
                    "a prompt's places for a picture and its picture do not go together: encode the request again"
                )
            where = slice(width - len(row.ids), width) if side == "left" else slice(0, len(row.ids))
            tokens[i, where] = torch.tensor(row.ids)
            mask[i, where] = 1
        pixels = joined([picture for row in rows for picture in row.pictures], torch.device("cpu"))
        kinds = (tokens == self.image_id).int() * mask.int() if self.is_vlm else mask
        types = dict.fromkeys(self._told_types, kinds.long())
        # Positions are found on the host: on a GPU, `get_rope_index` waits for it several times a row.
        positions = self._positions(tokens, mask, kinds, pixels)
        move = functools.partial(to_device, device=self.device)
        vision = {name: move(tensor) for name, tensor in {**pixels, **types}.items()}
        padded = any(len(row.ids) < width for row in rows)
        return Batch(move(tokens), move(mask), move(positions), vision, padded)

    def common(self, rows: Sequence[Prompt]) -> tuple[int, int]:
        """Count the tokens that several rows begin with, and the pictures among them, that may be read once for all of
        them; something is left of each row. Nothing for a single row."""
        if len(rows) < 2 or not self.attends_fully:  # read once, they leave gaps of hidden columns in a cache
            return 0, 0
        first, last = min(row.ids for row in rows), max(row.ids for row in rows)  # all others lie between these two
        n = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
        n = min(n, *(len(row.ids) - 1 for row in rows))
        shared = 0
        for pictures in zip(*map(self._pictures, rows), strict=False):
            start, end, picture = pictures[0]
            if end > n or not all(picture.looks_like(other) for *_, other in pictures[1:]):
                return min(n, start), shared
            shared += 1
        return n, shared

    def _pictures(self, row: Prompt) -> list[tuple[int, int, Picture]]:
        """List a row's pictures: the first token of each, the one behind its last, itself."""
        at = [i for i, id in enumerate(row.ids) if row.pictures and id == self.image_id]
        ends = accumulate(picture.tokens for picture in row.pictures)
        return [(at[end - p.tokens], at[end - 1] + 1, p) for end, p in zip(ends, row.pictures, strict=True)]

    def embeddings(self, tokens: Tensor) -> Tensor:
        """Embed tokens: (B, T, d)."""
        return self.model.get_input_embeddings()(tokens)

    def picture_embeddings(self, prompts: Sequence[Prompt]) -> list[Tensor]:
        """Embed the pictures of prompts that have some, as the model itself reads them: (tokens, d) of each. Raises:
        ValueError, where it makes of them more or fewer than its processor has places for."""
        pictures = [picture for prompt in prompts for picture in prompt.pictures]
        found = self.body.get_image_features(**joined(pictures, self.device)).pooler_output
        states = torch.cat([part.flatten(0, -2) for part in found])
        places = [sum(picture.tokens for picture in prompt.pictures) for prompt in prompts]
        if sum(places) != len(states):
            raise ValueError(f"{type(self.model).__name__} makes {len(states)} states of {sum(places)} image tokens")
        return list(states.split(places))

    def hidden(
        self, batch: Batch, cache: Any = None, embeddings: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Compute final hidden states (B, T, d), after the final norm. With a cache, it is filled.

        Args:
            embeddings: (B, T, d), read in the place of the batch's tokens.
            mask: another mask than the batch's, such as a tree's (B, 1, T, T), added to attention logits.
        """
        read = {"input_ids": batch.tokens} if embeddings is None else {"inputs_embeds": embeddings}
        with self._checkpointing(cache is None), self.reading(batch):
            return self.body(
                **read,
                attention_mask=batch.mask if mask is None else mask,
                position_ids=batch.positions,
                past_key_values=cache,
                use_cache=cache is not None,
                **batch.vision,
            ).last_hidden_state.to(self.device)

    def reading(self, batch: Batch) -> AbstractContextManager[None]:
        """Have passes over a batch on a GPU take from the batch whether it is padded, instead of waiting to read it."""
        return padding(batch.padded if self.device.type == "cuda" else None)

    def recompute_layers(self) -> None:
        """Have passes that a gradient comes back through keep of every layer only what it read, and compute the rest
        again when it does (gradient checkpointing): also those of a frozen model, which is in evaluation mode, where
        transformers would not do it and not say so. Raises: ValueError, where the model's layers cannot."""
        self._recomputed = [module for module in self.model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not self._recomputed:
            raise ValueError(f"{type(self.model).__name__} has no gradient checkpointing: gradient_checkpointing=false")

    @contextmanager
    def _checkpointing(self, possible: bool) -> Iterator[None]:
        """Have transformers take the layers for such as train and checkpoint; inside of one, its mode is its own."""
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
        # As rows: of a slice of positions, torch on a CPU copies the head in bfloat16 to multiply (12 times as long).
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
        positions, _ = find(tokens, **{name: known[name] for name in asked(find) & known.keys()})
        return positions


def _checkpointed(layer: nn.Module, mode: bool, function: Callable[..., Any], *args: Any) -> Any:
    """Run a layer's forward pass, now and once more when its gradient is asked for, in the mode that it is in now."""

    def as_it_is(*args: Any) -> Any:
        before, layer.training = layer.training, mode
        try:
            return function(*args)
        finally:
            layer.training = before

    # To its end the second time, too: slices of weights (FSDP2, ZeRO-3) are given back by hooks behind a layer.
    return checkpoint(as_it_is, *args, use_reentrant=False, early_stop=False)


# -- loading ----------------------------------------------------------------------------------------------------------


def load_processor(name: str | Path, revision: str | None = None) -> Any:
    """Load the processor of a vision-language model, the tokenizer of a text model."""
    kind: Any = AutoProcessor if _is_vlm(name, revision) else AutoTokenizer
    return kind.from_pretrained(name, revision=revision)


def load_encoder(
    name: str | Path,
    memory_token: str = "auto",
    revision: str | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> PromptEncoder:
    """Load what encodes prompts exactly as the model's backbone does, without weights."""
    return PromptEncoder(load_processor(name, revision), memory_token, arguments)


# Where a process has a model's weights: on its device; or, where processes are going to share them out, in the host's
# memory (the one that reads them) or nowhere (meta tensors, for the others).
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
    **placing: Any,
) -> Backbone:
    """Load the model with its prompts; a vision-language model if its config has a vision part.

    Args:
        device: that holds all of it, unless there is a `device_map`.
        device_map: accelerate spreads a model that is too large for one device over all of them and the host's memory:
            `auto`, or the place of each part. For frozen models.
        revision: of a model on the hub.
        attention: its implementation; auto leaves the choice to transformers.
        arguments: further ones of the chat template.
        weights: where they are to be.
        quantize: its linear layers, by bitsandbytes. For frozen models.
        placing: what accelerate takes besides: max_memory, offload_folder.

    Raises:
        ValueError: a revision of a folder, a vision-language model of a class that cannot be used, no bitsandbytes.
    """
    quantized = quantization(quantize, dtype, device) if quantize else {}
    sees = _is_vlm(name, revision)
    kind: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    if sees:  # before its weights are read
        config: Any = AutoConfig.from_pretrained(name, revision=revision)
        classes: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        check_sees(classes[type(config)])
    how = {"dtype": dtype, "revision": revision, **({} if attention == "auto" else {"attn_implementation": attention})}
    if device_map is None and weights == "device" and (quantized or device != "cpu"):
        device_map = {"": device}  # read where it stays: no copy in the host's memory
    if weights == "nowhere":
        model = _without_weights(kind, name, how)
    elif device_map is None:
        model = kind.from_pretrained(name, **how)
    else:
        model = kind.from_pretrained(name, **how, **quantized, device_map=device_map, **placing)
    if device == "cpu" and device_map is None:
        share_heads(model)
    home = None if weights == "device" else torch.device(device)
    return Backbone(model, load_processor(name, revision), memory_token, arguments, home)


def quantization(quantize: Quantize, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Say to `from_pretrained` how linear layers are to be quantised; they compute in `dtype`. Raises: ValueError,
    where bitsandbytes is not installed, or does not run on what there is here."""
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
        raise ValueError("quantize=4bit packs weights anew when a CPU first reads them: they would not be frozen. 8bit")
    if quantize == "8bit":
        return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    four = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
    return {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, **four)}


def _without_weights(kind: Any, name: str | Path, how: Mapping[str, Any]) -> Any:
    """Make a model as `from_pretrained` does, but that its parameters are meta tensors. Buffers are computed."""
    from accelerate import init_empty_weights

    how = dict(how)
    config = AutoConfig.from_pretrained(name, revision=how.pop("revision"))
    with init_empty_weights():
        model = kind.from_config(config, **how)
    model.tie_weights()  # each parameter was made meta by itself
    return model.eval()


def backbone_of(config: ModelSettings, folder: Path | None = None, weights: Weights = "device") -> Backbone:
    """Load the model that settings name, or the one in a folder, as they say."""
    device = device_of(config.device)
    return load_backbone(
        folder or model_path(config.model),
        dtype_of(config.dtype, device),
        device,
        config.memory_token,
        getattr(config, "device_map", None),
        None if folder else config.revision,
        config.attention,
        config.chat_template,
        weights,
        getattr(config, "quantize", None),
    )


def input_embeddings(name: str | Path, revision: str | None = None) -> Tensor:
    """Read (V, d) from the model's files, for an engine elsewhere has the model (only the file with them is fetched).
    Raises: ValueError, where none of them holds it."""
    for path in _weight_files(name, revision):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a dict
                if key.endswith("embed_tokens.weight"):
                    return file.get_tensor(key)
    raise ValueError(f"no input embeddings (embed_tokens.weight) in the safetensors files of {name}")


def _weight_files(name: str | Path, revision: str | None) -> list[Path]:
    """List the model's safetensors files here; of a hub model, the one with the input embeddings is fetched."""
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
        raise ValueError(f"{name} is a folder: a revision is of a model on the hub")
    return hasattr(AutoConfig.from_pretrained(name, revision=revision), "vision_config")
