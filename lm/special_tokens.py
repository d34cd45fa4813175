"""Escaping of special tokens in data: texts that spell one are encoded as characters.

A tokenizer cannot distinguish the `<|im_end|>` of a chat template from one in an observation. So special tokens in
texts are hidden before the template is rendered, and the rendered chat is encoded by a copy of the tokenizer whose
special tokens have other names: the template's are renamed, those of the texts are restored as spelled. Names contain a
random key, which no text can guess. Texts without special tokens take the ordinary path.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

_RESERVED = re.compile(r"[<\[].*[>\]]", re.DOTALL)  # structural added tokens that are not flagged as special


class SpecialTokens:
    """Escapes one tokenizer's special tokens in texts."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self._key = tokenizer, f"#{secrets.token_hex(8)}"
        self._texts: dict[int, str] = {
            id: token.content
            for id, token in tokenizer.added_tokens_decoder.items()
            if token.special or _RESERVED.fullmatch(token.content)
        }
        known = tokenizer.added_tokens_decoder
        # Special tokens that take no spaces from the text beside them, which is encoded the same without them.
        self.inert = {id for id in self._texts if not (known[id].lstrip or known[id].rstrip)}
        self._ids = {text: id for id, text in self._texts.items()}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._hidden = re.compile(rf"{self._key}(\d+)\.")

    def hide(self, text: str) -> str:
        """Replace special tokens by unknown names, and lone surrogates, which no tokenizer accepts, by U+FFFD."""
        if not text.isascii():
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return self._spelled.sub(lambda found: f"{self._key}{self._ids[found[0]]}.", text)

    def has_hidden(self, text: str) -> bool:
        return self._key in text

    def are_spelled(self, ids: Sequence[int]) -> bool:
        """Whether `ids` spell a special token by ordinary tokens, so that encoding their text gives other ids."""
        text = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return len(self._spelled.findall(text)) != sum(id in self._texts for id in ids)

    def encode(self, text: str) -> list[int]:
        """Encode a rendered chat, with hidden special tokens as text. Raises: ValueError, if the tokenizer cannot."""
        if not self.has_hidden(text):
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        text = self._spelled.sub(lambda found: self._name(self._ids[found[0]]), text)
        text = self._hidden.sub(lambda found: self._texts[int(found[1])], text)
        tokenizer, ids_of = self._renamed
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        if spelled := set(ids) & self._texts.keys() - ids_of.keys():
            names = ", ".join(self._texts[id] for id in spelled)
            raise ValueError(f"the model's tokenizer cannot encode {names} as text: remove it from the text")
        return [ids_of.get(id, id) for id in ids]

    def _name(self, id: int) -> str:
        return f"{self._key}{id}:"

    @cached_property
    def _renamed(self) -> tuple[Any, dict[int, int]]:
        """Return a copy of the tokenizer with renamed special tokens, and the original ids by the copy's ids."""
        from tokenizers import Tokenizer

        if (backend := getattr(self.tokenizer, "backend_tokenizer", None)) is None:
            kind = type(self.tokenizer).__name__
            raise ValueError(f"a text spells a special token, which {kind} (no fast tokenizer) cannot encode as text")
        state = json.loads(backend.to_str()) | {"truncation": None, "padding": None}
        for token in state["added_tokens"]:
            if token["content"] in self._ids:
                token["content"] = self._name(token["id"])
        copied: Any = Tokenizer.from_str(json.dumps(state))
        return copied, {copied.token_to_id(token["content"]): token["id"] for token in state["added_tokens"]}


special_tokens_of = lru_cache(maxsize=4)(SpecialTokens)


class TextTokenizer:
    """A tokenizer for processors that encodes hidden special tokens in rendered chats as text."""

    def __init__(self, marks: SpecialTokens) -> None:
        self._marks = marks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._marks.tokenizer, name)

    def __call__(self, text: str | list[str], **_: Any) -> Any:
        from transformers import BatchEncoding

        texts = [text] if isinstance(text, str) else text
        rows = [self._marks.encode(one) for one in texts]
        encoding = BatchEncoding({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]})
        encoding.char_to_token = lambda row, at: len(self._marks.encode(texts[row][: at + 1])) - 1  # type: ignore[method-assign]
        return encoding
