"""The base class of all sections, and number types with their ranges."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

TokenId = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
# Up to eleven days; system calls accept no much longer timeout.
Seconds = Annotated[float, Field(gt=0, le=1e6)]
Unit = Annotated[float, Field(gt=0, le=1)]


class Section(BaseModel):
    """Base of every section: frozen, strictly typed, closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
