"""The base class of all settings: typed, frozen, unknown keys are errors, numbers are finite."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from runtime.startup import expand_home

Share = Annotated[float, Field(ge=0, le=1)]  # a fraction or a probability
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # what every generator of random numbers takes
# A path, or a name that may be one (of a model): `~` is expanded.
PathName = Annotated[str, AfterValidator(expand_home)]


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_value_as_number(cls, value: object, info: ValidationInfo) -> object:
        """Refuse true and false for a number, which pydantic would read as 1 and 0."""
        if isinstance(value, bool) and info.field_name is not None:
            kinds = _types_in(cls.model_fields[info.field_name].annotation)
            if kinds & {int, float} and bool not in kinds:
                raise ValueError(f"expected a number, received {str(value).lower()}")
        return value


def _types_in(annotation: Any) -> set[Any]:
    inside = get_args(annotation)
    return set().union(*map(_types_in, inside)) if inside else {annotation}


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Say behind an unknown name which known one is like it, or which there are; nothing where there are none."""
    known = list(known)
    if close := difflib.get_close_matches(str(name), known, n=1):
        return f"; did you mean {close[0]!r}?"
    return f"; known here: {', '.join(known)}" if known else ""
