import pickle
from typing import Any, cast

import numpy as np
import pytest

from rlpack.packing import Batching, PackingError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mode": "packd"}, "batching.mode is 'packd'; choose one of packed, dynamic, fixed"),
        ({"algorithm": "ffd"}, "batching.algorithm is 'ffd'; choose one of concatenative"),
        ({"overlong": "cut"}, "batching.overlong is 'cut'; choose one of error, truncate, drop, own_microbatch"),
        ({"balance": "slots"}, "batching.balance is 'slots'; choose one of cost, tokens, none"),
        ({"equal_rows": 1}, "batching.equal_rows is 1; set true or false"),
        ({"max_tokens": 0}, "batching.max_tokens is 0"),
        ({"max_tokens": None}, "batching.max_tokens is not set; batching.mode=packed needs"),
        ({"micro_batch_size": True}, "batching.micro_batch_size is True"),
        ({"pad_to_multiple": 1.5}, "batching.pad_to_multiple is 1.5"),
        ({"divisible_by": -1}, "batching.divisible_by is -1"),
        ({"mode": []}, r"batching.mode is \[\]; choose one of packed"),
        ({"algorithm": np.array(["optimal", "optimal"])}, "batching.algorithm is array"),
        ({"max_tokens": 2**31}, "batching.max_tokens is 2147483648, over the limit of 2147483647"),
        ({"micro_batch_size": 2**63}, "batching.micro_batch_size is 9223372036854775808, over the limit of 2147483647"),
        ({"pad_to_multiple": 2**40}, "batching.pad_to_multiple is 1099511627776, over the limit of 2147483647"),
        ({"length_multiple": 2**31}, "batching.length_multiple is 2147483648, over the limit of 2147483647"),
        ({"min_microbatches": 2**20 + 1}, "batching.min_microbatches is 1048577, over the limit of 1048576"),
        ({"divisible_by": 2**31}, "batching.divisible_by is 2147483648, over the limit of 1048576"),
    ],
)
def test_a_value_outside_its_limits_is_rejected_with_its_key(values: dict[str, Any], message: str) -> None:
    with pytest.raises(PackingError, match=message):
        Batching(**values)


def test_the_limits_themselves_are_allowed() -> None:
    batching = Batching(max_tokens=2**31 - 1, micro_batch_size=2**31 - 1, min_microbatches=2**20, divisible_by=2**20)
    assert (batching.max_tokens, batching.divisible_by) == (2147483647, 1048576)


def test_integers_of_numpy_become_pythons_own() -> None:
    batching = Batching(max_tokens=cast(int, np.int32(65536)), micro_batch_size=cast(int, np.int8(4)))
    assert (type(batching.max_tokens), type(batching.micro_batch_size)) == (int, int)
    assert batching == Batching(max_tokens=65536, micro_batch_size=4)


def test_errors_and_specs_pickle() -> None:
    assert pickle.loads(pickle.dumps(Batching(micro_batch_size=3))) == Batching(micro_batch_size=3)
    assert str(pickle.loads(pickle.dumps(PackingError("text")))) == "text"
