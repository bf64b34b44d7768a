import importlib
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpack.packing.algorithms import halving, kernels
from rlpack.packing.algorithms import partition as partitioning
from rlpack.packing.algorithms.jit import compiled


@compiled
def double(value: int) -> int:
    return 2 * value


@compiled
def quadruple(value: int) -> int:
    return double(double(value))


def test_a_compiled_function_calls_another_of_its_module() -> None:
    assert quadruple(3) == 12
    assert quadruple.compile() is not quadruple.python


def test_numba_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    plain = compiled(double.python)
    assert plain(3) == 6
    assert plain.compile() is double.python


def test_numba_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    plain = compiled(double.python)
    assert plain(3) == 6
    assert plain.compile() is double.python


def test_versions_of_numba_keep_their_machine_code_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        "from rlpack.packing.algorithms.jit import compiled\n\n@compiled\ndef triple(value):\n    return 3 * value\n"
    )
    (tmp_path / "tripled.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for version in (numba.__version__, "1.2.3"):
        monkeypatch.setattr(numba, "__version__", version)
        monkeypatch.delitem(sys.modules, "tripled", raising=False)
        assert importlib.import_module("tripled").triple(2) == 6
    assert len(list(tmp_path.rglob("*.nbi"))) == 2


def test_importing_the_planner_imports_neither_numba_nor_torch() -> None:
    code = "import sys, rlpack.packing; print([name for name in ('numba', 'torch', 'pydantic') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=60), k=st.integers(1, 7))
@settings(max_examples=50, deadline=None)
def test_python_and_numba_agree(sizes: list[int], k: int) -> None:
    lengths = np.array(sizes, dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    ones = np.ones_like(lengths)
    calls = [
        (kernels.next_fit, (lengths, 50)),
        (kernels.first_fit, (lengths, order, 50)),
        (kernels.spread, (lengths[order], lengths[order], k, 10**9)),
        (kernels.chunk, (ones, lengths, lengths, (k, 100, 90))),
        (partitioning._differencing, (lengths, order, k, 1)),
        (halving.halve_costliest, (0 * lengths, order, lengths[:1] * 0 + lengths.size, k, ones, lengths, True, False)),
        (halving.halve_costliest, (0 * lengths, order, lengths[:1] * 0 + lengths.size, k, ones, lengths, True, True)),
        (halving.halve_costliest, (0 * lengths, order, lengths[:1] * 0 + lengths.size, k, ones, lengths, False, True)),
    ]
    for function, arguments in calls:
        assert function(*arguments).tolist() == function.python(*arguments).tolist(), function.python.__name__
    grid = lengths[order][: len(order) // k * k].reshape(-1, k)
    assert kernels.deal(grid).tolist() == kernels.deal.python(grid).tolist()
