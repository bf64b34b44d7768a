"""Sections of batching: the actor's, and those that other roles inherit or override."""

from dataclasses import fields
from typing import Annotated, Any

from pydantic import BeforeValidator, TypeAdapter

from rlpack.config.sections.section import Count, Section
from rlpack.packing.batching import Algorithm as Packer
from rlpack.packing.batching import Balance, Batching, Mode, Overlong


def _as_batching(value: Any) -> Any:
    """Return a `Batching` for a mapping, which pydantic's strict mode would refuse.

    The dataclass checks types without conversion. pydantic, which would convert true to 1, only reports unknown keys.
    """
    if not isinstance(value, dict):
        return value
    known = {field.name for field in fields(Batching)}
    return Batching(**value) if known.issuperset(value) else TypeAdapter(Batching).validate_python(value)


ActorBatching = Annotated[Batching, BeforeValidator(_as_batching)]


class RoleBatching(Section):
    """A role's own batching; null inherits the key from `batching`."""

    mode: Mode | None = None
    max_tokens: Count | None = None
    micro_batch_size: Count | None = None
    algorithm: Packer | None = None
    pad_to_multiple: Count | None = None
    length_multiple: Count | None = None
    min_microbatches: Count | None = None
    divisible_by: Count | None = None
    overlong: Overlong | None = None
    balance: Balance | None = None
    equal_rows: bool | None = None
    share_prompts: bool | None = None


class ForwardBatching(Section):
    """Batching of a trained role's passes without gradients; null inherits the key from the role's batching.

    The mode and the handling of overlong sequences are always the role's: its model is built for one mode, and
    log-probs and values have to cover the tokens of the update.
    """

    max_tokens: Count | None = None
    micro_batch_size: Count | None = None
    algorithm: Packer | None = None
    pad_to_multiple: Count | None = None
    length_multiple: Count | None = None
    min_microbatches: Count | None = None
    divisible_by: Count | None = None
    balance: Balance | None = None
    equal_rows: bool | None = None
    share_prompts: bool | None = None
