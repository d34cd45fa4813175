"""The base class of all settings: typed, frozen, unknown keys are errors."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from runtime.startup import expand_home

# A path, or a name that may be one (of a model): `~` is expanded.
PathName = Annotated[str, AfterValidator(expand_home)]


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
