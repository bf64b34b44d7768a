"""Which attention kernel is used depends on whether flash-attn can be imported, not only on whether it is installed."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlpack.models.attention import flash_attn_function


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the file of an installed package `flash_attn`."""
    (tmp_path / "flash_attn").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    flash_attn_function.cache_clear()
    yield tmp_path / "flash_attn" / "__init__.py"
    sys.modules.pop("flash_attn", None)
    flash_attn_function.cache_clear()


def test_an_installed_flash_attn_is_used(package: Path):
    package.write_text("def flash_attn_varlen_func(): return 7\n")
    function = flash_attn_function()
    assert function is not None
    assert function() == 7


def test_a_flash_attn_for_another_pytorch_is_not_used_and_warned_about_once(
    package: Path, caplog: pytest.LogCaptureFixture
):
    package.write_text("raise ImportError('undefined symbol: _ZN3c105ErrorC2')\n")
    assert flash_attn_function() is None
    assert flash_attn_function() is None
    (record,) = caplog.records
    assert "undefined symbol: _ZN3c105ErrorC2; compile it for PyTorch " + torch.__version__ in record.getMessage()
