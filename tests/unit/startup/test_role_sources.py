import pytest

from rlpack.config.schema import Config, Role
from rlpack.distributed.errors import PlacementError
from rlpack.startup.role_sources import check_role_sources

SCORING = (
    "from rlpack.worker import Worker, sharded\nclass Judge(Worker):\n    @sharded()\n    def score(self, shard): ..."
)

# What surely is no scoring role, and the refusal.
WRONG = {
    "no class": ("class Judges: ...", "has no class Judge"),
    "no worker": ("class Judge:\n    def score(self, shard): ...", "no method from_settings.*derives from"),
    "no score": ("from rlpack.worker import Worker\nclass Judge(Worker): ...", "no method score"),
    "a base without score": (
        "from rlpack.worker import Worker\nclass Base(Worker):\n    x = 1\nclass Judge(Base): ...",
        "no method score",
    ),
    "a class of another kind": ("class Judge(dict): ...", "no method from_settings"),
    "a class from elsewhere": ("from json import JSONDecoder as Judge", "no method from_settings"),
    "no Python": ("class Judge(:", "can't be imported: SyntaxError"),
}
# What may be one, or can't be told without importing it.
POSSIBLE = {
    "a scoring role": SCORING,
    "a score that is assigned": "from rlpack.worker import Worker\nclass Judge(Worker): ...\nJudge.score = lambda: 0",
    "a score of a base": "from tests.builders import Base\nclass Judge(Base): ...",
    "a class that is made": "Judge = type('Judge', (), {})",
    "a decorated class": "import mine_too\n@mine_too.with_score\nclass Judge: ...",
    "a metaclass": "import mine_too\nclass Judge(metaclass=mine_too.Meta): ...",
    "attributes by name": "class Judge: ...\nsetattr(Judge, 'score', len)",
    "names of another module": "from mine_too import *\n",
    "a base of another package": "import torch\nclass Judge(torch.nn.Module): ...",
    "a class in a branch": "if True:\n    class Judge: ...",
    "a class that replaces another": "from json import JSONDecoder as Judge\n" + SCORING,
    "a class that derives from its own name": "from json import JSONDecoder as Judge\nclass Judge(Judge): ...",
    "a class that a branch replaces": "class Judge: ...\nif True:\n    class Judge: ...",
    "a method added to an imported class": "from json import JSONDecoder as Judge\nJudge.from_settings = len\n"
    "Judge.score = len",
    "a name in the namespace": "Judges = 1\nlocals()['Judge'] = object",
    "an import of itself": "from a_judge import Judge",
}


def check(source, folder, monkeypatch):
    (folder / "a_judge.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    check_role_sources(Config(roles={"judge": Role(target="a_judge:Judge")}))


@pytest.mark.parametrize("name", WRONG)
def test_what_surely_is_no_scoring_role_is_refused(tmp_path, monkeypatch, name):
    source, message = WRONG[name]
    with pytest.raises(PlacementError, match=f"(?s)roles.judge.target is 'a_judge:Judge'.*{message}"):
        check(source, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", POSSIBLE)
def test_what_may_be_a_scoring_role_is_left_to_its_import(tmp_path, monkeypatch, name):
    check(POSSIBLE[name], tmp_path, monkeypatch)


def test_a_replacement_of_a_built_in_role_needs_its_own_methods_alone(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "a_judge.py").write_text("from rlpack.worker import Worker\nclass Judge(Worker): ...")
    replaced = Config(roles={**Config().roles, "actor": Role(target="a_judge:Judge")})
    check_role_sources(replaced)
    (tmp_path / "a_judge.py").write_text("class Judge: ...")
    with pytest.raises(PlacementError, match=r"roles.actor.target is .* no method from_settings; derive it from"):
        check_role_sources(replaced)


def test_a_module_in_a_package_is_found_without_importing_the_package(tmp_path, monkeypatch):
    (tmp_path / "a_package").mkdir()
    (tmp_path / "a_package" / "__init__.py").write_text("raise SystemExit\n")
    (tmp_path / "a_package" / "judges.py").write_text("class Judge: ...")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PlacementError, match="no method from_settings"):
        check_role_sources(Config(roles={"judge": Role(target="a_package.judges:Judge")}))
