"""A Hugging Face model as compiler and executor load and use it, text-only or vision-language (Qwen2.5-VL-like).

Positions are always computed here and passed explicitly, so that prefill, decoding with a cache and re-scoring agree to
the last bit of position.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import file_exists, hf_hub_download
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer
from transformers.modeling_layers import GradientCheckpointingLayer

from configs.models import ModelSettings
from lm.prompt import Prompt, PromptEncoder


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded sequences. tokens, mask: (B, T); positions: (B, T), or (3, B, T) for multimodal rotary embeddings."""

    tokens: Tensor
    mask: Tensor
    positions: Tensor
    pixels: Tensor | None = None
    grid: Tensor | None = None

    @property
    def next_positions(self) -> Tensor:
        """(B, 1) or (3, B, 1), the position after each row's last real token (in text all axes agree)."""
        last = self.positions.masked_fill(self.mask == 0, -1).amax(-1, keepdim=True)
        return (last if last.dim() == 2 else last.amax(0, keepdim=True).expand_as(last)) + 1

    @property
    def vision(self) -> dict[str, Tensor]:
        """What the model's forward pass takes for the batch's images."""
        if self.pixels is None or self.grid is None:
            return {}
        return {"pixel_values": self.pixels, "image_grid_thw": self.grid}


class Backbone(PromptEncoder):
    """A causal LM or VLM and the encoder of its prompts."""

    _recomputed: Sequence[Any] = ()  # layers under gradient checkpointing

    def __init__(
        self, model: Any, processor: Any, memory_token: str = "auto", arguments: Mapping[str, Any] | None = None
    ) -> None:  # fmt: skip
        super().__init__(processor, memory_token, arguments)
        self.model = model  # the HF model; PEFT wraps layers in place, so this stays the handle

    @property
    def device(self) -> torch.device:
        """Where batches go: where a model that is spread over devices has its input embeddings."""
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
        means what it says: not with linear attention, state spaces, convolutions or sliding windows, and not with
        kernels of attention that take no mask."""
        config = self.model.config.get_text_config()
        if any(kernel in str(config._attn_implementation) for kernel in ("flash", "flex")):
            return False
        windows = ["sliding_attention"] if getattr(config, "sliding_window", None) else []
        full = set(getattr(config, "layer_types", None) or windows) <= {"full_attention"}
        takes_positions = "position_ids" in inspect.signature(self.body.forward).parameters
        return full and takes_positions and not getattr(self.model, "_is_stateful", False)

    @property
    def body(self) -> Any:
        """The model without its output head."""
        return getattr(self.model, self.model.base_model_prefix)

    @property
    def embedding_table(self) -> Tensor:
        """(V, d)."""
        return self.model.get_input_embeddings().weight

    def pad(self, rows: Sequence[Prompt], side: Literal["left", "right"]) -> Batch:
        """Pad on the left to generate, on the right to score. Raises: ValueError, where a row has places for images but
        no pixels, or pixels but no places."""
        width, device = max(len(row.ids) for row in rows), self.device
        tokens = torch.full((len(rows), width), self.pad_id, dtype=torch.long)
        mask = torch.zeros((len(rows), width), dtype=torch.long)
        for i, row in enumerate(rows):
            if self.is_vlm and (self.image_id in row.ids) != (row.pixels is not None):
                raise ValueError(
                    "a prompt's places for a picture and its picture do not go together: encode the request again"
                )
            where = slice(width - len(row.ids), width) if side == "left" else slice(0, len(row.ids))
            tokens[i, where] = torch.tensor(row.ids)
            mask[i, where] = 1
        tokens, mask = tokens.to(device), mask.to(device)
        pictures = [row.pixels for row in rows if row.pixels is not None]
        grids = [row.grid for row in rows if row.grid is not None]
        pixels = torch.cat(pictures).to(device) if pictures else None
        grid = torch.cat(grids).to(device) if grids else None
        return Batch(tokens, mask, self._positions(tokens, mask, grid), pixels, grid)

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
            start, end, pixels = pictures[0]
            if end > n or not all(torch.equal(pixels, other) for *_, other in pictures[1:]):
                return min(n, start), shared
            shared += 1
        return n, shared

    def _pictures(self, row: Prompt) -> list[tuple[int, int, Tensor]]:
        """List a row's pictures: the first token of each, the one behind its last, its patches."""
        if row.pixels is None or row.grid is None:
            return []
        at = [i for i, id in enumerate(row.ids) if id == self.image_id]
        places, patches = self.places(row.grid), row.pixels.split(row.grid.prod(-1).tolist())
        ends = list(accumulate(places))
        return [(at[end - n], at[end - 1] + 1, pixels) for n, end, pixels in zip(places, ends, patches, strict=True)]

    def embeddings(self, tokens: Tensor) -> Tensor:
        """Embed tokens: (B, T, d)."""
        return self.model.get_input_embeddings()(tokens)

    def picture_embeddings(self, prompts: Sequence[Prompt]) -> list[Tensor]:
        """Embed the pictures of prompts that have some, as the model itself reads them: (patches, d) of each."""
        pixels = torch.cat([prompt.pixels for prompt in prompts if prompt.pixels is not None])
        grids = [prompt.grid for prompt in prompts if prompt.grid is not None]
        found = self.body.get_image_features(pixels.to(self.device), torch.cat(grids).to(self.device)).pooler_output
        images = iter(found)
        return [torch.cat([next(images) for _ in grid]) for grid in grids]

    def hidden(
        self, batch: Batch, cache: Any = None, embeddings: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Compute final hidden states (B, T, d), after the final norm. With a cache, it is filled.

        Args:
            embeddings: (B, T, d), read in the place of the batch's tokens.
            mask: another mask than the batch's, such as a tree's (B, 1, T, T), added to attention logits.
        """
        read = {"input_ids": batch.tokens} if embeddings is None else {"inputs_embeds": embeddings}
        with self._checkpointing(cache is None):
            return self.body(
                **read, attention_mask=batch.mask if mask is None else mask, position_ids=batch.positions,
                past_key_values=cache, use_cache=cache is not None, **batch.vision,
            ).last_hidden_state.to(self.device)  # fmt: skip

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
        return self.model.get_output_embeddings()(hidden).to(self.device)

    def _positions(self, tokens: Tensor, mask: Tensor, grid: Tensor | None) -> Tensor:
        plain = (mask.cumsum(-1) - 1).clamp(min=0)
        if not self.is_vlm:
            return plain
        if grid is None:
            return plain.unsqueeze(0).expand(3, -1, -1)
        kinds = (tokens == self.image_id).int() * mask.int()
        positions, _ = self.body.get_rope_index(
            tokens, mm_token_type_ids=kinds, image_grid_thw=grid, attention_mask=mask
        )
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


def model_path(name: str) -> str:
    """Find a shipped model's folder for `zoo/...` from anywhere; any other name or path stays as it is."""
    shipped = Path(__file__).resolve().parents[1] / name
    return str(shipped) if name.startswith("zoo/") and not Path(name).exists() else name


def dtype_of(name: str) -> torch.dtype:
    return getattr(torch, name)


def device_of(name: str) -> str:
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def quiet() -> None:
    """Silence the libraries' progress bars: one is enough, ours."""
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()


def load_processor(name: str | Path, revision: str | None = None) -> Any:
    """Load the processor of a vision-language model, the tokenizer of a text model."""
    kind: Any = AutoProcessor if _is_vlm(name, revision) else AutoTokenizer
    return kind.from_pretrained(name, revision=revision)


def load_encoder(
    name: str | Path, memory_token: str = "auto", revision: str | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> PromptEncoder:  # fmt: skip
    """Load what encodes prompts exactly as the model's backbone does, without weights."""
    return PromptEncoder(load_processor(name, revision), memory_token, arguments)


def load_backbone(
    name: str | Path, dtype: torch.dtype, device: str, memory_token: str = "auto",
    device_map: str | Mapping[str, str] | None = None, revision: str | None = None, attention: str = "auto",
    arguments: Mapping[str, Any] | None = None, **placing: Any,
) -> Backbone:  # fmt: skip
    """Load the model with its prompts; a vision-language model if its config has a vision part.

    Args:
        device: that holds all of it, unless there is a `device_map`.
        device_map: accelerate spreads a model that is too large for one device over all of them and the host's memory:
            `auto`, or the place of each part. For frozen models.
        revision: of a model on the hub.
        attention: its implementation; auto leaves the choice to transformers.
        arguments: further ones of the chat template.
        placing: what accelerate takes besides: max_memory, offload_folder.

    Raises:
        ValueError: a revision of a folder.
    """
    kind: Any = AutoModelForImageTextToText if _is_vlm(name, revision) else AutoModelForCausalLM
    how = {"dtype": dtype, "revision": revision, **({} if attention == "auto" else {"attn_implementation": attention})}
    if device_map is None:
        model = kind.from_pretrained(name, **how).to(device)
    else:
        model = kind.from_pretrained(name, **how, device_map=device_map, **placing)
    return Backbone(model, load_processor(name, revision), memory_token, arguments)


def backbone_of(config: ModelSettings, folder: Path | None = None) -> Backbone:
    """Load the model that settings name, or the one in a folder, as they say."""
    return load_backbone(
        folder or model_path(config.model), dtype_of(config.dtype), device_of(config.device), config.memory_token,
        getattr(config, "device_map", None), None if folder else config.revision, config.attention,
        config.chat_template,
    )  # fmt: skip


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
