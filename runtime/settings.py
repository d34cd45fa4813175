"""Base class of all settings: typed, frozen, finite numbers; unknown keys are errors. A string literal under a field is
its description (`model_fields[name].description`)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from runtime.startup import expand_home

Share = Annotated[float, Field(ge=0, le=1)]  # a fraction or a probability
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # the range that every random generator here accepts
PathName = Annotated[str, AfterValidator(expand_home)]  # a path, or a model name that may be one; `~` is expanded


class Settings(BaseModel):
    """Base of all settings: unknown keys and values of another type are errors, and fields cannot be assigned."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _reject_bool_as_number(cls, value: object, info: ValidationInfo) -> object:
        """Reject true and false for a number; pydantic would read them as 1 and 0."""
        if isinstance(value, bool) and info.field_name is not None:
            kinds = _types_in(cls.model_fields[info.field_name].annotation)
            if kinds & {int, float} and bool not in kinds:
                raise ValueError(f"expected a number, received {str(value).lower()}")
        return value


def _types_in(annotation: Any) -> set[Any]:
    inside = get_args(annotation)
    return set().union(*map(_types_in, inside)) if inside else {annotation}


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return a suffix for an unknown-name error: the closest known name, else the list of known names."""
    known = list(known)
    if close := difflib.get_close_matches(str(name), known, n=1):
        return f"; did you mean {close[0]!r}?"
    return f"; known here: {', '.join(known)}" if known else ""
