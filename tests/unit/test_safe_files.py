import json
import os

import pytest

from rlpack import safe_files
from rlpack.safe_files import MOST_LEVELS, parse_json, read_json, read_object, read_text


def test_json_has_the_value_that_pythons_parser_returns(tmp_path):
    value = {"a": [1, 2.5, None, {"b": "\u00e9"}], "c": []}
    (tmp_path / "a.json").write_text(json.dumps(value))
    (tmp_path / "link").symlink_to("a.json")
    assert read_json(tmp_path / "a.json") == read_object(tmp_path / "link") == value


@pytest.mark.parametrize("levels", [MOST_LEVELS + 1, 500, 100_000])
@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ('{"a":', "}")])
def test_deep_json_is_refused(levels, begin, end):
    parse_json(begin * (MOST_LEVELS - 1) + "[]" + end * (MOST_LEVELS - 1))
    with pytest.raises(ValueError, match="nested more than 64 levels deep"):
        parse_json(begin * (levels - 1) + "[]" + end * (levels - 1))


@pytest.mark.parametrize("content", [b"{", b"\xff", b"\xef\xbb\xbf{}", b"9" * 5000, b""])
def test_what_is_no_json_is_a_value_error(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError):  # noqa: PT011 - the parser's own text
        read_json(tmp_path / "a")


def test_a_list_is_no_object(tmp_path):
    (tmp_path / "a").write_text("[1]")
    with pytest.raises(ValueError, match="it holds a list, not an object"):
        read_object(tmp_path / "a")


def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    for path in tmp_path.iterdir():
        with pytest.raises(OSError, match="not a regular file"):
            read_text(path)


def test_a_large_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(safe_files, "MOST_BYTES", 10)
    (tmp_path / "a").write_text("0123456789")
    assert read_text(tmp_path / "a") == "0123456789"
    (tmp_path / "a").write_text("0123456789a")
    with pytest.raises(ValueError, match="it has more than 10 bytes"):
        read_text(tmp_path / "a")
