"""Recipes outside the package: found by name, with their own sections, and refused with one clear error."""

import pickle
import re
import sys
from pathlib import Path

import pytest

from rlpack.cli.main import main
from rlpack.cli.train import compose_jobs
from rlpack.config.compose import compose
from rlpack.config.errors import ConfigError
from rlpack.config.recipes import (
    builtin_recipes,
    builtin_sections,
    builtin_target,
    config_class,
    load_main,
    recipe_section,
)
from rlpack.config.roles import optimizers, role_batching, started_roles
from rlpack.config.schema import Role
from rlpack.config.sections.section import Section
from rlpack.config.validate import validate
from rlpack.config.warnings import config_warnings
from tests.builders import tiny_config

MODEL = {"model": {"config": {"model_type": "qwen2"}}}
RECIPE = '''
"""A user's recipe."""

from pathlib import Path

from pydantic import Field

from rlpack.config.recipes import RecipeSpec, recipe_section
from rlpack.config.sections.section import Section


class Mine(Section):
    """What this recipe adds."""

    key: int = Field(default=1, ge=0, description="A number.")


def not_seven(config):
    if recipe_section(config, Mine).key == 7:
        yield "my_section.key is 7; set another number"


def large(config):
    if recipe_section(config, Mine).key > 100:
        yield "my_section.key is large"


SPEC = RecipeSpec(roles=("actor",), sections={"my_section": Mine}, rules=(not_seven,), warnings=(large,))


def main(config):
    Path("ran").write_text(str(recipe_section(config, Mine).key))
'''


@pytest.fixture
def own(tmp_path, monkeypatch) -> str:
    """Return the target of a recipe in a package where the command is given; the package's name is the test's own."""
    package = tmp_path / f"own_{tmp_path.name}"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "my_recipe.py").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    return f"{package.name}.my_recipe"


def test_a_recipe_outside_the_package_runs_by_its_target_with_keys_of_its_own(own):
    assert main(["train", f"recipe.target={own}", "my_section.key=3", "sft_warmup.steps=0"]) == 0
    assert Path("ran").read_text() == "3"


TYPED = """
from enum import Enum
from pathlib import Path

from pydantic import Field

from rlpack.config.recipes import RecipeSpec, recipe_section
from rlpack.config.sections.section import Section


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Typed(Section):
    sizes: tuple[int, ...] = (1, 2)
    pair: tuple[str, Path] | None = ("a", Path("b"))
    color: Color = Color.RED
    folder: Path = Path("data")
    other: Path | None = None
    template: str = "Solve ${question}, ${run_dir}"
    names: list[str] = Field(default_factory=lambda: ["${x}"])


SPEC = RecipeSpec(roles=("actor",), sections={"typed": Typed}, ignores={"algorithm.clip_low": "is not read"})


def main(config):
    section = recipe_section(config, Typed)
    Path("ran").write_text(repr(tuple(dict(section).values())))
"""


@pytest.fixture
def typed(own) -> str:
    """Return the target of a recipe whose section has tuples, an enum, paths and texts with dollar signs."""
    Path(own.replace(".", "/") + ".py").with_name("typed.py").write_text(TYPED)
    return own.replace("my_recipe", "typed")


def test_a_section_may_have_tuples_enums_paths_and_texts_with_dollar_signs(typed, capsys):
    command = ["train", f"recipe.target={typed}", "sft_warmup.steps=0", "run_dir=run"]
    assert main(command) == 0, capsys.readouterr().err
    defaults = "((1, 2), ('a', PosixPath('b')), <Color.RED: 'red'>, PosixPath('data'), None, "
    assert Path("ran").read_text() == defaults + "'Solve ${question}, ${run_dir}', ['${x}'])"
    given = ["typed.sizes=[3]", "typed.pair=[c,d]", "typed.color=blue", "typed.folder=/x", "typed.other=y"]
    assert main([*command[:-1], "run_dir=second", *given, "typed.template=${run_dir}"]) == 0, capsys.readouterr().err
    changed = "((3,), ('c', PosixPath('d')), <Color.BLUE: 'blue'>, PosixPath('/x'), PosixPath('y'), "
    assert Path("ran").read_text() == changed + "'second', ['${x}'])"
    for override, message in (
        ("typed.color=green", "typed.color is 'green'; choose one of red, blue"),
        ("typed.sizes=[x]", "typed.sizes.0 is 'x'; it has to be a whole number"),
        ("typed.sizes=3", "typed.sizes is 3; it has to be a list, such as [1,2]"),
    ):
        assert main([*command, override]) == 2
        assert message in capsys.readouterr().err


NESTED = """
from enum import Enum
from pathlib import Path

from rlpack.config.recipes import RecipeSpec
from rlpack.config.sections.section import Section


class Color(Enum):
    RED = "red"


class Nested(Section):
    stages: list[tuple[int, float]] = [(1, 2.0)]
    spans: dict[str, tuple] = {"a": (1, 2)}
    folders: list[Path] | None = [Path("a")]
    colors: dict[str, list[Color]] = {"a": [Color.RED]}
    mixed: dict[str, float | list[float]] = {"a": [1.0], "b": 2.0}
    plain: list = [1]


SPEC = RecipeSpec(roles=("actor",), sections={"nested": Nested})


def main(config): ...
"""


def test_lists_and_dicts_of_a_section_may_hold_tuples_enums_and_paths(own, capsys):
    path = Path(own.replace(".", "/") + ".py")
    path.with_name("nested.py").write_text(NESTED)
    command = [f"recipe.target={own.replace('my_recipe', 'nested')}"]
    section = dict(compose(command))["nested"]
    assert section == type(section)()
    given = dict(compose([*command, "nested.stages=[[3,0.5],[4,1.0]]", "nested.folders=[b]", "nested.spans.b=[3]"]))
    assert given["nested"].stages == [(3, 0.5), (4, 1.0)]
    assert given["nested"].folders == [Path("b")]
    assert given["nested"].spans == {"a": (1, 2), "b": (3,)}
    assert main(["train", *command, "nested.stages=[[x,0.5]]"]) == 2
    assert "nested.stages.0.0 is 'x'; it has to be a whole number" in capsys.readouterr().err


@pytest.mark.parametrize(
    "field", ["names: set[str] = {'a'}", "weights: dict[int, float] = {1: 2.0}", "data: bytes = b'a'"]
)
def test_a_section_whose_type_yaml_can_not_express_is_refused_as_the_recipes_mistake(own, field):
    path = Path(own.replace(".", "/") + ".py")
    path.write_text(RECIPE.replace("    key: int", f"    {field}\n    key: int"))
    with pytest.raises(ConfigError, match=f"section 'my_section' has a type that YAML can't express for {field[:4]}"):
        compose([f"recipe.target={own}"])


def test_a_config_with_such_a_section_pickles(typed):
    config = compose([f"recipe.target={typed}", "typed.color=blue"])
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_typo_in_the_keys_that_a_recipe_ignores_is_refused(typed, capsys):
    path = Path(typed.replace(".", "/") + ".py")
    path.with_name("mistaken.py").write_text(path.read_text().replace("algorithm.clip_low", "algorithm.clip_lou"))
    assert main(["train", f"recipe.target={typed.replace('.typed', '.mistaken')}"]) == 2
    said = capsys.readouterr().err
    assert "RecipeSpec.ignores has algorithm.clip_lou is not a key; did you mean algorithm.clip_low?" in said


def test_its_keys_are_checked_like_any_other(own, capsys):
    for override, message in (
        ("my_section.kay=3", "my_section.kay is not a key; did you mean my_section.key? my_section has: key"),
        ("my_section.key=-1", "my_section.key is -1; it has to be at least 0"),
        ("my_section.key=x", "my_section.key is 'x'; it has to be a whole number"),
        ("my_section.key=7", "my_section.key is 7; set another number"),
        ("my_sectoin.key=3", "my_sectoin.key is not a key; did you mean my_section.key?"),
        ("dapo.max_rounds=3", "dapo.* belongs to recipe=dapo"),
    ):
        assert main(["train", f"recipe.target={own}", override]) == 2
        assert message in capsys.readouterr().err
    assert not Path("ran").exists()


def test_a_sweep_over_recipes_gives_each_job_the_keys_of_its_own(own):
    command = ["train", "--multirun", f"recipe.target={own},rlpack.recipes.dapo", "dapo.max_rounds=0"]
    assert main([*command, "my_section.key=3"]) == 2  # dapo's job refuses 0 rounds; the other has no such key


@pytest.fixture
def other(own) -> str:
    """Return the target of a recipe in the package of `own` whose section has the same name and another default."""
    path = Path(own.replace(".", "/") + ".py")
    path.with_name("other_recipe.py").write_text(RECIPE.replace("default=1", "default=9"))
    return own.replace("my_recipe", "other_recipe")


def test_a_sweep_over_recipes_with_different_sections_of_one_name_is_refused(own, other, capsys):
    for first, second in ((own, other), (other, own)):
        assert main(["train", "--multirun", f"recipe.target={first},{second}"]) == 2
        said = capsys.readouterr().err
        assert f"recipe.target is both '{first}' and '{second}' in this sweep, and each has its own section" in said
        assert "'my_section'; give one of the sections another name" in said
    assert not Path("ran").exists()


def test_recipes_that_share_a_section_can_be_swept_over(own):
    path = Path(own.replace(".", "/") + ".py")
    path.with_name("sharing.py").write_text(f"from {own} import SPEC, main\n")
    jobs = compose_jobs([f"recipe.target={own},{own.replace('my_recipe', 'sharing')}", "my_section.key=4", "-m"])
    assert [dict(job.config)["my_section"].key for job in jobs] == [4, 4]


def test_the_last_of_repeated_recipes_counts(own, other):
    for targets, key in (((own, other), 9), ((other, own), 1), ((other, "no.such.recipe", own), 1)):
        (job,) = compose_jobs([f"recipe.target={target}" for target in targets])
        assert job.config.recipe.target == targets[-1]
        assert dict(job.config)["my_section"].key == key
    jobs = compose_jobs([f"recipe.target={own},rlpack.recipes.dapo", f"recipe.target={other}", "--multirun"])
    assert [dict(job.config)["my_section"].key for job in jobs] == [9]


def test_an_experiment_can_choose_the_recipe(own, tmp_path, capsys):
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    preset = tmp_path / "conf" / "experiment" / "mine.yaml"
    preset.write_text(f"# @package _global_\nrecipe:\n  target: {own}\nmy_section:\n  key: 5\n")
    command = ["train", "--config-dir", "conf", "experiment=mine"]
    assert main(command) == 0
    assert Path("ran").read_text() == "5"
    assert main([*command, "my_section.key=6"]) == 0
    assert Path("ran").read_text() == "6"
    assert main([*command, "--cfg", "job"]) == 0
    assert "my_section:\n  key: 5\n" in capsys.readouterr().out
    preset.write_text("# @package _global_\ndefaults:\n- override /recipe: dapo\n")
    assert main([*command, "dapo.max_rounds=-1"]) == 2
    assert "dapo.max_rounds is -1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "defaults:\n- train\n- override recipe: dapo\n- _self_\n",
        "defaults:\n- train\n- override /recipe: dapo\n- _self_\n",
        "defaults:\n- train\n- _self_\nrecipe:\n  target: rlpack.recipes.dapo\n",
        "defaults:\n- schema\n- model: tiny\n- recipe: dapo\n- data: arithmetic\n- reward: final_answer\n- _self_\n",
        "defaults:\n- train\n- override experiment: chooses_dapo\n- _self_\n",
        "defaults:\n- other_root\n- _self_\n",
        "defaults:\n- train\n- override recipe: dapo\n- override experiment: chooses_ppo\n- _self_\n",
    ],
)
def test_a_root_config_can_choose_the_recipe(tmp_path, monkeypatch, capsys, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "mine.yaml").write_text(text + "dapo:\n  max_rounds: 3\n")
    (tmp_path / "conf" / "other_root.yaml").write_text("defaults:\n- train\n- override recipe: dapo\n- _self_\n")
    for name in ("dapo", "ppo"):
        preset = tmp_path / "conf" / "experiment" / f"chooses_{name}.yaml"
        preset.write_text(f"# @package _global_\ndefaults:\n- override /recipe: {name}\n")
    command = ["train", "--config-dir", "conf", "--config-name", "mine"]
    assert main([*command, "--cfg", "job"]) == 0
    shown = capsys.readouterr().out
    assert "target: rlpack.recipes.dapo\n" in shown
    assert "max_rounds: 3\n" in shown
    assert main([*command, "dapo.max_rounds=-1"]) == 2
    assert "dapo.max_rounds is -1" in capsys.readouterr().err


def test_the_command_line_chooses_over_a_root_config(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text("defaults:\n- train\n- override recipe: dapo\n- _self_\n")
    command = ["train", "--config-dir=conf", "--config-name=mine", "recipe=ppo"]
    assert main([*command, "--cfg", "job"]) == 0
    assert "target: rlpack.recipes.ppo\n" in capsys.readouterr().out
    assert main([*command, "dapo.max_rounds=2"]) == 2
    assert "dapo.* belongs to recipe=dapo" in capsys.readouterr().err


def with_role(own: str, spec: str) -> None:
    text = RECIPE.replace('SPEC = RecipeSpec(roles=("actor",), ', f"SPEC = RecipeSpec({spec}, ")
    Path(own.replace(".", "/") + ".py").write_text(text)


def test_roles_of_a_recipe_have_a_class_by_default_and_are_started(own):
    with_role(own, 'own_roles={"teacher": "my_pkg.teacher:Teacher"}, trains=("actor", "teacher")')
    config = compose([f"recipe.target={own}", "roles.teacher.arguments.size=3", "algorithm.kl_coef=0.1"])
    assert started_roles(config) == ["actor", "reference", "rollout", "reward", "teacher"]
    assert config.roles["teacher"] == Role(target="my_pkg.teacher:Teacher", arguments={"size": 3})
    replaced = compose([f"recipe.target={own}", "roles.teacher.target=my_pkg.other:Teacher"])
    assert replaced.roles["teacher"].target == "my_pkg.other:Teacher"
    assert pickle.loads(pickle.dumps(config)) == config
    jobs = compose_jobs(["--multirun", f"recipe.target={own},rlpack.recipes.dapo"])
    assert ["teacher" in job.config.roles for job in jobs] == [True, False]


@pytest.mark.parametrize(
    ("inherited", "trained", "expected"),
    [
        ("drop", "", "own_microbatch"),
        ("truncate", "", "own_microbatch"),
        ("error", "", "error"),
        ("drop", ', trains=("actor", "teacher")', "drop"),
    ],
)
def test_a_recipes_role_gets_whole_rows_that_the_update_cuts_or_drops(own, inherited, trained, expected):
    with_role(own, 'own_roles={"teacher": "my_pkg.teacher:Teacher"}' + trained)
    command = [f"recipe.target={own}", f"batching.overlong={inherited}", "batching.max_tokens=1024"]
    assert role_batching(compose(command), "teacher").overlong == expected
    own_value = [*command, "roles.teacher.batching.overlong=drop"]
    assert role_batching(compose(own_value), "teacher").overlong == "drop"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ('own_roles={"actor": "my_pkg.actor:Actor"}', "whose own role 'actor' has the name of a built-in one"),
        ('trains=("actor", "critic")', "trains the role 'critic' but does not start it; name it in RecipeSpec.roles"),
        ('trains=("tutor",)', "trains the role 'tutor' but does not start it"),
    ],
)
def test_roles_that_a_recipe_cannot_have_are_one_clear_error(own, spec, message):
    with_role(own, spec)
    with pytest.raises(ConfigError, match=re.escape(message)):
        compose([f"recipe.target={own}"])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("rules=not_seven", "RecipeSpec.rules is <function not_seven"),
        ('rules=("not_seven",)', "RecipeSpec.rules is ('not_seven',); write a tuple of functions: (my_rule,)"),
        ('trains=("actor")', "RecipeSpec.trains is 'actor'; write a tuple of names: (\"actor\",)"),
        ("sections=[Mine]", '; write a dict such as {"my_section": MySection}'),
        ('own_roles=["teacher"]', "RecipeSpec.own_roles is ['teacher']; write a dict such as {\"teacher\": "),
        ('own_roles={"teacher": Mine}', '; write a dict such as {"teacher": "package.module:Teacher"}'),
        ('ignores=["algorithm.scale"]', "RecipeSpec.ignores is ['algorithm.scale']; write a dict such as"),
        *(
            (f'sections={{"{name}": Mine}}', f"whose section '{name}' can't have this name, which Hydra or pydantic")
            for name in ("defaults", "hydra", "model_config", "model_dump")
        ),
        ("rules=(lambda config: None,)", "RecipeSpec.rules has <lambda>, which returns None; write a generator"),
        ('rules=(lambda config: "bad",)', "RecipeSpec.rules has <lambda>, which returns 'bad'; write a generator"),
        ("rules=(lambda config: [3],)", "RecipeSpec.rules has <lambda>, which returns [3]; write a generator"),
        ("rules=(lambda config: 1 / 0,)", "has <lambda>, which raised ZeroDivisionError: division by zero; yield a"),
    ],
)
def test_a_mistake_in_a_spec_is_one_clear_error(own, capsys, spec, message):
    Path(own.replace(".", "/") + ".py").write_text(f"{RECIPE}\nSPEC = RecipeSpec({spec})\n")
    assert main(["train", f"recipe.target={own}"]) == 2
    said = capsys.readouterr().err
    assert said.count(f"recipe.target is '{own}', whose ") == 1
    assert message in said
    assert "Traceback" not in said


def test_a_warning_of_a_recipe_that_fails_is_a_warning(own):
    Path(own.replace(".", "/") + ".py").write_text(f"{RECIPE}\nSPEC = RecipeSpec(warnings=(lambda config: 1 / 0,))\n")
    (text,) = config_warnings(compose([f"recipe.target={own}"]))
    assert "RecipeSpec.warnings has <lambda>, which raised ZeroDivisionError" in text


def test_roles_warnings_and_optimizers_follow_from_its_spec(own):
    config = compose([f"recipe.target={own}", "my_section.key=200"])
    assert config.recipe.name == "my_recipe"
    assert started_roles(config) == ["actor"]
    assert list(optimizers(config)) == ["actor.optimizer"]
    assert config_warnings(config) == ["my_section.key is large"]


def test_a_decorator_may_supply_arguments_of_main(own):
    decorator = "def main(config):\n    return wrapped(config, 1)\n\n\nmain.__wrapped__ = wrapped\n"
    path = Path(own.replace(".", "/") + ".py")
    path.write_text(RECIPE.replace("def main(config)", "def wrapped(config, tracker)") + "\n\n" + decorator)
    assert compose([f"recipe.target={own}"]).recipe.target == own


def test_a_config_with_its_section_crosses_processes(own):
    config = compose([f"recipe.target={own}", "my_section.key=4"])
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert again.model_dump()["my_section"] == {"key": 4}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no SPEC; a recipe is a module with main(config) and SPEC"),
        ('SPEC = {"sections": {}}', ".SPEC is of type dict and has to be a RecipeSpec; a recipe is"),
        (RECIPE.replace("def main", "def run"), "has no function main; a recipe is"),
        (RECIPE.replace('"my_section": Mine', '"trainer": Mine'), "whose section 'trainer' can't have this name"),
        (RECIPE.replace('"my_section": Mine', '"my_section": dict'), "derive it from rlpack.config.sections.section"),
        (RECIPE.replace('"my_section": Mine', '"my_section": Mine()'), "Mine(key=1); give the class"),
        (
            RECIPE.replace("def main(config)", "def main()"),
            "main can't be called with the config: too many positional arguments; write main(config)",
        ),
        (RECIPE.replace("default=1, ge=0, ", ""), "has no valid default for key; give every key one"),
        ("1 / 0", "importing it failed: ZeroDivisionError: division by zero"),
        (RECIPE + "raise SystemExit(main)", "importing it failed: SystemExit: <function main"),
        ("import sys\nsys.exit(0)", "importing it failed: SystemExit: 0"),
        ("import no_such_module", "No module named 'no_such_module'"),
    ],
)
def test_a_module_that_is_no_recipe_is_one_clear_error(own, capsys, text, message):
    Path(own.replace(".", "/") + ".py").write_text(text)
    assert main(["train", f"recipe.target={own}"]) == 2
    said = capsys.readouterr().err
    assert f"recipe.target is '{own}'" in said
    assert message in said
    assert "Traceback" not in said


def test_a_recipe_apart_from_its_spec_that_exits_on_import_is_one_clear_error(own, capsys, no_ray):
    path = Path(own.replace(".", "/") + ".py")
    path.with_name("my_recipe_spec.py").write_text(RECIPE)
    path.write_text("import sys\nsys.exit(0)\n")
    assert main(["train", f"recipe.target={own}", "run_dir=new"]) == 2
    assert f"recipe.target is '{own}', but importing it failed: SystemExit: 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (RECIPE.replace("def main", "async def main"), "main is a coroutine function"),
        (RECIPE + "    yield\n", "main is a generator function"),
        (RECIPE.replace("def main", "async def main") + "    yield\n", "main is an asynchronous generator function"),
    ],
)
def test_a_main_that_would_do_nothing_when_called_is_refused(own, capsys, text, what):
    file = Path(own.replace(".", "/") + ".py")
    file.write_text(text)
    assert main(["train", f"recipe.target={own}", "sft_warmup.steps=0"]) == 2
    said = capsys.readouterr().err
    assert f"recipe.target is '{own}', whose {what}" in said
    assert "Traceback" not in said
    file.with_name("my_recipe_spec.py").write_text(RECIPE)
    with pytest.raises(ConfigError, match=rf"whose {what}.*, so calling it would run nothing; write main"):
        load_main(own)


@pytest.mark.parametrize("target", ["no_such.recipe", "rlpack.recipes.grpoo", "my recipe", "rlpack.recipes.grpo:main"])
def test_a_target_that_names_no_module_is_one_clear_error(target):
    with pytest.raises(ConfigError, match=r"recipe\.target is '.*; a recipe is a module|has to be package\.module"):
        validate(MODEL | {"recipe": {"target": target}})


def test_a_recipe_from_a_package_that_the_operator_does_not_allow_is_never_imported(own, monkeypatch, capsys):
    Path(own.replace(".", "/") + ".py").write_text("open('imported', 'w')")
    monkeypatch.setenv("RLPACK_ALLOWED_PACKAGES", "other")
    assert main(["train", f"recipe.target={own}"]) == 2
    assert "RLPACK_ALLOWED_PACKAGES allows only code from rlpack, other" in capsys.readouterr().err
    assert not Path("imported").exists()


@pytest.mark.parametrize("name", builtin_recipes())
def test_every_built_in_recipe_has_a_main_and_roles_that_exist(name):
    config = tiny_config(name)
    assert callable(load_main(builtin_target(name)))
    assert set(started_roles(config)) <= set(config.roles)
    assert [f"{role}.optimizer" for role in ("actor", "critic")][: 2 if name == "ppo" else 1] == [*optimizers(config)]


def test_a_section_of_another_recipe_is_named_with_its_owner():
    assert builtin_sections() == {"dapo": "dapo"}
    with pytest.raises(ConfigError, match=r"dapo is not a key of this recipe; dapo\.\* belongs to recipe=dapo"):
        validate(MODEL | {"dapo": {"max_rounds": 3}})


def test_a_length_penalty_over_the_longest_response_is_refused():
    values = MODEL | {"recipe": {"target": builtin_target("dapo")}, "rollout": {"max_new_tokens": 8}}
    validate(values | {"dapo": {"overlong_buffer": 8}})
    with pytest.raises(ConfigError, match=r"dapo\.overlong_buffer is 9, over rollout\.max_new_tokens=8"):
        validate(values | {"dapo": {"overlong_buffer": 9}})


def test_a_recipe_reads_its_section_by_class():
    kind = config_class(builtin_target("dapo"))
    section = builtin_target("dapo_spec")
    dapo = vars(sys.modules[section])["Dapo"]
    assert recipe_section(kind(dapo=dapo(max_rounds=3)), dapo).max_rounds == 3


class Undeclared(Section):
    """A section of no recipe."""


def test_a_section_that_the_recipe_does_not_declare_is_named():
    problem = r"with Undeclared, which rlpack.recipes.dapo doesn't declare in SPEC.sections \(it has dapo: Dapo\); add"
    with pytest.raises(ConfigError, match=problem):
        recipe_section(tiny_config("dapo"), Undeclared)
    with pytest.raises(ConfigError, match=r"in SPEC.sections \(it has none\); add Undeclared there"):
        recipe_section(tiny_config("grpo"), Undeclared)
