"""The source tree keeps its structure: no cycles, no repeated names, plain words, short functions."""

import pytest

from benchmarks import structure


@pytest.mark.parametrize("measure", structure.measures(), ids=lambda measure: measure.name)
def test_every_measure_of_the_tree_is_within_its_limit(measure):
    assert measure.is_kept, "\n".join([f"{measure.name}: {measure.figure:g}, limit {measure.limit:g}", *measure.places])


def test_the_measures_find_what_they_look_for(tmp_path, monkeypatch):
    package = tmp_path / "rlpack"
    (package / "inner").mkdir(parents=True)
    for folder in structure.PACKAGES + structure._TEXTS:
        (tmp_path / folder).mkdir(exist_ok=True)
    long = "\n".join(f"    x = {number}" for number in range(61))
    files = {
        "__init__.py": "",
        "a.py": "def f():\n    from rlpack.b import g\n    return g",
        "b.py": f"import rlpack.a\n\nclass Twice: ...\n\ndef long():\n{long}",
        "inner/__init__.py": '"""One.\n\nTwo.\n"""',
        "inner/a.py": "# beside it\nclass Twice: ...\nx = config.recipe == 'sft'\n",
    }
    for name, text in files.items():
        (package / name).write_text(text)
    monkeypatch.setattr(structure, "ROOT", tmp_path)
    assert set(structure.import_cycle()) == {"rlpack.a", "rlpack.b"}
    assert structure.recipe_comparisons() == ["rlpack/inner/a.py:3: x = config.recipe == 'sft'"]
    assert structure.banned_words() == ["rlpack/inner/a.py:1: # beside it"]
    assert structure.repeated_modules() == ["rlpack/a.py, rlpack/inner/a.py"]
    assert structure.repeated_classes() == ["rlpack/b.py:Twice, rlpack/inner/a.py:Twice"]
    assert max(structure.function_lengths().values()) == 61
    assert structure.short_init_docs() == ["rlpack/__init__.py: 0 lines"]


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("if recipe == name: ...", True),
        ("if 'sft' == x: ...", True),
        ("if x != 'sft': ...", True),
        ("if name in ('ppo', 'sft'): ...", True),
        ("if recipe not in own: ...", True),
        ("if config.recipe.name == own: ...", True),
        ("if config.recipe.target.partition('.')[2] == own: ...", True),
        ("if values['recipe'] == own: ...", True),
        ("if values.get('recipe') == own: ...", True),
        ("match config.recipe:\n    case 'mine': ...", True),
        ("match x:\n    case 'ppo' | 'sft': ...", True),
        ("if x == 'other': ...", False),
        ("if recipe is None: ...", False),
        ("match x:\n    case 'other': ...", False),
        ("match recipe:\n    case {'target': str(target)}: ...", False),
        ("x = 'sft'  # recipe == 'sft'", False),
    ],
)
def test_every_form_of_a_branch_on_the_recipe_is_found(code, is_found, tmp_path, monkeypatch):
    for folder in structure.PACKAGES:
        (tmp_path / folder).mkdir()
    (tmp_path / "rlpack" / "a.py").write_text(code)
    (tmp_path / "recipes" / "sft.py").write_text("if x == 'sft': ...")
    (tmp_path / "recipes" / "ppo.py").touch()
    monkeypatch.setattr(structure, "ROOT", tmp_path)
    assert bool(structure.recipe_comparisons()) == is_found


@pytest.mark.parametrize(
    "text",
    ["as if anew", "the dearest bin", "they lie elsewhere", "put it away", "a file of one's own", "Whoever asks"],
)
def test_private_words_are_banned_in_any_case(text):
    assert structure._BANNED.search(text)


@pytest.mark.parametrize("text", ["a renewal", "besides", "an endearing name", "who ever knew", "put the lid on"])
def test_ordinary_words_are_not_banned(text):
    assert not structure._BANNED.search(text)
