import os

import pytest

from rlpack.config.errors import ConfigError
from rlpack.config.sections.submission import Submission
from rlpack.distributed.context import RankContext
from rlpack.distributed.jobs.secrets import load_secrets
from rlpack.distributed.process import RankProcess


def test_a_secret_comes_from_the_environment_or_else_from_its_file(tmp_path):
    (tmp_path / "KEY").write_text("from the file\n")
    (tmp_path / "OTHER").write_text("from the file")
    environment = {"OTHER": "from the environment"}
    load_secrets(Submission(secret_names=("KEY", "OTHER"), secrets_dir=str(tmp_path)), environment)
    assert environment == {"KEY": "from the file", "OTHER": "from the environment"}


@pytest.mark.parametrize("content", [None, b"", b" \n", b"\xff\xfe"])
def test_a_secret_that_a_node_lacks_is_named_with_the_places_that_were_looked_at(tmp_path, content):
    if content is not None:
        (tmp_path / "KEY").write_bytes(content)
    environment = {}
    with pytest.raises(ConfigError, match=rf"job.secret_names holds KEY, which is neither .* {tmp_path}/KEY"):
        load_secrets(Submission(secret_names=("KEY",), secrets_dir=str(tmp_path)), environment)
    assert environment == {}


def test_a_rank_finds_secrets_on_its_own_node(tmp_path, monkeypatch):
    monkeypatch.setenv("RLPACK_TEST_KEY", "")
    (tmp_path / "RLPACK_TEST_KEY").write_text("abc")
    RankProcess(RankContext(), threads=1).load_secrets(
        Submission(secret_names=("RLPACK_TEST_KEY",), secrets_dir=str(tmp_path))
    )
    assert os.environ["RLPACK_TEST_KEY"] == "abc"
