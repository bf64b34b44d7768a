"""What every section of the schema is built from: its base class, and the ranges that its numbers have."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

TokenId = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
# Up to eleven days; system calls take no wait that is much longer.
Seconds = Annotated[float, Field(gt=0, le=1e6)]
Unit = Annotated[float, Field(gt=0, le=1)]


class Section(BaseModel):
    """Base of every section: frozen, strict about types, closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
