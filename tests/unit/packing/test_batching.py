import pickle
from typing import Any

import pytest

from rlpack.packing import Batching, PackingError


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"mode": "packd"}, "batching.mode is 'packd'; choose one of packed, dynamic, fixed"),
        ({"algorithm": "ffd"}, "batching.algorithm is 'ffd'; choose one of concatenative"),
        ({"overlong": "cut"}, "batching.overlong is 'cut'; choose one of error, truncate, drop, own_microbatch"),
        ({"max_tokens": 0}, "batching.max_tokens is 0"),
        ({"max_tokens": None}, "batching.max_tokens is not set; batching.mode=packed needs"),
        ({"rows": True}, "batching.rows is True"),
        ({"pad_to_multiple": 1.5}, "batching.pad_to_multiple is 1.5"),
        ({"divisible_by": -1}, "batching.divisible_by is -1"),
    ],
)
def test_a_value_outside_its_limits_is_refused_by_key(values: dict[str, Any], said: str) -> None:
    with pytest.raises(PackingError, match=said):
        Batching(**values)


def test_errors_and_specs_pickle() -> None:
    assert pickle.loads(pickle.dumps(Batching(rows=3))) == Batching(rows=3)
    assert str(pickle.loads(pickle.dumps(PackingError("text")))) == "text"
