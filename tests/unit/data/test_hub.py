"""A Hub that answers late, not at all, or once: one deadline for all repositories."""

import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rlpack.config.schema import Config, Critic, Data, Model, Recipe
from rlpack.config.sections.value_models import RewardModel
from rlpack.data.hub import Repository, ask_hub, hub_problem
from rlpack.startup.dataset_checks import hub_datasets
from rlpack.startup.model_files import hub_models

NAMES = {f"a/{name}" for name in ("model", "tokenizer", "critic", "scorer", "train", "held-out")}


@pytest.fixture
def hub(monkeypatch):
    """Return the paths asked for on a Hub, and the barrier where its answers wait until all NAMES were asked for."""
    asked: list[str] = []
    together = threading.Barrier(len(NAMES))

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            if not self.path.startswith(("/api/models/", "/api/datasets/")):  # the client asks for its own settings
                self.send_error(404)
                return
            asked.append(self.path)
            with suppress(threading.BrokenBarrierError):
                together.wait(timeout=5.0)
            self.send_error(500 if together.broken else 418)

        def log_message(self, format, *args):
            """Keep the console clean."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        yield asked, together
        server.shutdown()


def test_the_hub_is_asked_for_all_sources_of_a_run_at_once_and_each_only_once(hub):
    config = Config(
        recipe=Recipe(target="rlpack.recipes.ppo"),
        model=Model(path="a/model", tokenizer="a/tokenizer"),
        critic=Critic(path="a/critic"),
        reward_model=RewardModel(path="a/scorer"),
        data=Data(source="a/train", validation_source="a/held-out"),
    )
    repositories = [*hub_models(config), *hub_datasets(config)]
    assert {repository.name for repository in repositories} == NAMES
    ask_hub(repositories)
    for _ in range(2):  # the checks, and the loaders
        assert {hub_problem(repository) for repository in repositories} == {"it answered 418"}
    assert len(hub[0]) == len(NAMES)


def test_an_answer_is_kept_for_a_while_only(monkeypatch, hub):
    asked, together = hub
    together.abort()
    repository = Repository("dataset", "a/forgotten")
    monkeypatch.setattr("rlpack.data.hub._KEEP_S", -1.0)
    assert [hub_problem(repository) for _ in range(2)] == ["it answered 500"] * 2
    assert len(asked) == 2


def test_paths_and_generated_data_are_not_asked_for(tmp_path):
    (tmp_path / "rows.jsonl").touch()
    data = Data(source=str(tmp_path / "rows.jsonl"), validation_source="no/such/file.jsonl")
    model = Model(path=str(tmp_path), tokenizer="~/none")
    assert [*hub_models(Config(model=model)), *hub_datasets(Config(data=data))] == []
    assert [*hub_models(Config(model=Model(path="x" * 5000))), *hub_datasets(Config())] == [
        Repository("model", "x" * 5000)
    ]
