import pytest

from rlpack.config.errors import ConfigError
from rlpack.config.yaml_limits import check_yaml_files

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
)


@pytest.mark.parametrize("text", [BOMB, "a: &a [*a]\n", "a: &a {b: *a}\n"])
def test_an_alias_bomb_or_cycle_is_refused(tmp_path, text):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.yaml holds more than 10,000 values"):
        check_yaml_files(tmp_path)


@pytest.mark.parametrize("text", ["a: &a [1, 2]\nb: *a\n", "", "a:\n\t- b\n", "a: [1"])
def test_ordinary_and_broken_files_are_left_to_hydra(tmp_path, text):
    (tmp_path / "fine.yaml").write_text(text)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    check_yaml_files(tmp_path)
