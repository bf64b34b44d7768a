"""Recording the masks that transformers builds leaves nothing behind."""

import gc
import weakref

import pytest
import torch
from torch import Tensor

from rlpack.models import own_attention
from rlpack.models.own_attention import layer_masks
from tests.unit.models.tiny import tiny_model


@pytest.mark.parametrize("fails", [False, True])
def test_recorded_masks_are_freed(fails: bool, monkeypatch: pytest.MonkeyPatch):
    built: list[weakref.ref[Tensor]] = []
    build = own_attention.eager_mask

    def noted(*sizes: object, **options: object) -> Tensor:
        mask = build(*sizes, **options)
        built.append(weakref.ref(mask))
        return mask

    monkeypatch.setattr(own_attention, "eager_mask", noted)
    model = tiny_model("gemma2", dtype=torch.float32)

    def run() -> None:
        model(input_ids=torch.arange(9)[None], use_cache=False)
        if fails:
            raise LookupError

    if fails:
        with pytest.raises(LookupError):
            layer_masks(model, run)
    else:
        masks = layer_masks(model, run)
        assert [int(mask.allowed.sum()) for mask in masks if mask.allowed is not None] == [30, 45]  # windows: 4, none
        del masks
    gc.collect()
    assert len(built) == 2
    assert all(mask() is None for mask in built)
    assert model.config._attn_implementation == "rlpack"
