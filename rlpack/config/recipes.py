"""Specs of recipes, and the schema composed with their sections.

A recipe is a module with a function `main(config)` and a `SPEC`. The spec is read from `<module>_spec` if that module
exists, else from the module itself: built-in recipes keep it apart, so that a config is validated without importing
PyTorch. `recipe.target` names the module, so a recipe outside the package is found the same way as a built-in one.

Invariants:
1. This package imports no recipe statically; `find_recipe` imports by name, after the operator's allow-list is checked.
2. Every key of a recipe's section has a default, and no section takes the name of a key of `Config`.
3. A config pickles by its recipe's target and its values, so every rank rebuilds the same class.
"""

import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar, cast

from pydantic import ValidationError, create_model, model_validator
from pydantic_core import PydanticSerializationError

from rlpack.config.allowed_packages import why_not_allowed
from rlpack.config.errors import ConfigError, to_config_error
from rlpack.config.schema import Config, Recipe, builtin_roles
from rlpack.config.sections.section import Section
from rlpack.user_code import UserCode, UserCodeError, describe_exception, find_user_module, import_user_module

Rule = Callable[[Any], Iterator[str]]
BUILTIN_PACKAGE = "rlpack.recipes"
# What `rlpack evaluate` runs; `rlpack train` doesn't offer it.
EVALUATE_TARGET = f"{BUILTIN_PACKAGE}.evaluate.evaluate_model"
_FOLDER = Path(__file__).resolve().parents[1] / "recipes"
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_HOW = "a recipe is a module with main(config) and SPEC = rlpack.config.recipes.RecipeSpec(...)"
_SECTION = "rlpack.config.sections.section.Section"
_YAML_TYPES = "numbers, strings, lists, tuples, enums, paths and dicts with string keys"
_PLACES = "in the current directory or on Python's path"
# Names that Hydra reads at the top of a config; those of pydantic are attributes of `Config`.
_RESERVED = {"defaults", "hydra"}
_Section = TypeVar("_Section", bound=Section)


@dataclass(frozen=True)
class RecipeSpec:
    """The description of a recipe, without its loop.

    Attributes:
        roles: built-in roles that it always starts. A recipe that starts `rollout` also starts `reference` when
            `algorithm.kl_coef` is above 0, `reward_model` when it has a path, and every role that users add.
        own_roles: its own roles, each with the default of `roles.<name>.target`. They are always started, and only
            the recipe calls them; roles that users add score rollouts.
        trains: roles that it trains, each a `Trainable`: they are saved, resumed and exported.
        sections: its own config sections by name; every key needs a default.
        rules: generators of problems that make a config invalid.
        warnings: generators of texts about choices that are valid but probably not intended.
        ignores: keys of shared sections that it doesn't read, each with the reason.
        advantage_columns: columns that it adds to rollouts for the advantage function.
        needs_demonstrations: whether its own steps train on demonstrations.
        runs_ahead: whether it takes its batches from `rlpack.recipes.driver.ahead`, as `trainer.lead` needs.
        draws_once: whether the batch of every step takes exactly `trainer.prompts_per_step` prompts from the stream, so
            that it is known where the next one begins.
        takes_late_groups: whether it draws batches group by group (`draw_rollouts`, or a `draw_groups` of its queue)
            and trains on any number of whole groups, as `trainer.late_groups.window` needs; it also needs `draws_once`.
    """

    roles: tuple[str, ...] = ("actor", "rollout", "reward")
    own_roles: Mapping[str, str] = field(default_factory=dict)
    trains: tuple[str, ...] = ("actor",)
    sections: Mapping[str, type[Section]] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    warnings: tuple[Rule, ...] = ()
    ignores: Mapping[str, str] = field(default_factory=dict)
    advantage_columns: tuple[str, ...] = ()
    needs_demonstrations: bool = False
    runs_ahead: bool = False
    draws_once: bool = False
    takes_late_groups: bool = False

    @property
    def starts(self) -> tuple[str, ...]:
        """The roles that it always starts, built-in and its own."""
        return (*self.roles, *self.own_roles)

    @property
    def generates(self) -> bool:
        """Whether it samples responses, and so needs rewards, a loss and a token budget for whole rollouts."""
        return "rollout" in self.roles


def builtin_recipes() -> list[str]:
    """Return the names of the built-in recipes.

    >>> builtin_recipes()
    ['dapo', 'grpo', 'ppo', 'remax', 'sft']
    """
    return sorted(path.stem.removesuffix("_spec") for path in _FOLDER.glob("*_spec.py"))


def builtin_target(name: str) -> str:
    """Return the `recipe.target` of a built-in recipe."""
    return f"{BUILTIN_PACKAGE}.{name}"


def builtin_sections() -> dict[str, str]:
    """Return the config sections that belong to built-in recipes, each with a recipe's name."""
    return {section: name for name in builtin_recipes() for section in find_recipe(builtin_target(name)).sections}


def recipe_of(config: Config) -> RecipeSpec:
    """Return the spec of a config's recipe."""
    return find_recipe(config.recipe.target)


def recipe_texts(config: Config, kind: Literal["rules", "warnings"]) -> Iterator[str]:
    """Yield what the rules or warnings of a config's recipe say, and which of them fail to say it."""
    for rule in getattr(recipe_of(config), kind):
        name = rule.__name__ if inspect.isfunction(rule) else repr(rule)
        where = f"recipe.target is {config.recipe.target!r}, whose RecipeSpec.{kind} has {name}, which"
        try:
            with UserCode():
                found = rule(config)
                texts = list(found) if isinstance(found, Iterable) and not isinstance(found, str) else found
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - a user's rule may raise anything
            yield f"{where} raised {describe_exception(error)}; yield a text for each problem instead"
            continue
        if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
            yield from texts
        else:
            yield f"{where} returns {texts!r}; write a generator that yields a text for each problem"


def recipe_section(config: Config, kind: type[_Section]) -> _Section:
    """Return the section of class `kind` that the config's recipe declares.

    Raises:
        ConfigError: the recipe doesn't declare it.
    """
    sections = recipe_of(config).sections
    name = next((name for name, section in sections.items() if section is kind), None)
    if name is None:
        declared = ", ".join(f"{name}: {section.__name__}" for name, section in sections.items()) or "none"
        text = f"recipe_section was called with {kind.__name__}, which {config.recipe.target} doesn't declare"
        raise ConfigError([f"{text} in SPEC.sections (it has {declared}); add {kind.__name__} there"])
    section = dict(config)[name]
    assert isinstance(section, kind)
    return section


@functools.cache
def find_recipe(target: str) -> RecipeSpec:
    """Return the spec of the recipe in module `target`.

    Raises:
        ConfigError: the module can't be imported or isn't allowed, or it is not a recipe.
    """
    if not _MODULE.fullmatch(target):
        raise ConfigError([f"recipe.target is {target!r}; it has to be package.module: {_HOW}"])
    if problem := why_not_allowed("recipe.target", target, os.environ):
        raise ConfigError([problem])
    module = _import(target)
    spec = vars(module).get("SPEC")
    if not isinstance(spec, RecipeSpec):
        what = " has no SPEC"
        if "SPEC" in vars(module):
            what = f".SPEC is of type {type(spec).__name__} and has to be a RecipeSpec"
        raise ConfigError([f"recipe.target is {target!r}, but {module.__name__}{what}; {_HOW}"])
    if module.__name__ == target:
        if not inspect.isfunction(main := vars(module).get("main")):
            raise ConfigError([f"recipe.target is {target!r}, but {target} has no function main; {_HOW}"])
        _check_runs_when_called(target, main)
    if problems := list(_form_problems(target, spec)):
        raise ConfigError(problems)
    return spec


@functools.cache
def config_class(target: str) -> type[Config]:
    """Return the schema for the recipe in module `target`: `Config` with the recipe's own sections.

    >>> [name for name in config_class("rlpack.recipes.dapo").model_fields if name not in Config.model_fields]
    ['dapo']

    Raises:
        ConfigError: there is no such recipe, or its sections can't be part of a config.
    """
    spec = find_recipe(target)
    if problems := [*_section_problems(target, spec.sections), *_role_problems(target, spec)]:
        raise ConfigError(problems)
    fields: dict[str, Any] = {name: (section, section()) for name, section in spec.sections.items()}
    fields["recipe"] = (Recipe, Recipe(target=target))
    return create_model("Config", __base__=_RecipeConfig, __module__=__name__, __doc__=Config.__doc__, **fields)


def sweep_class(targets: Sequence[str]) -> type[Config]:
    """Return the schema with the sections of several recipes, those of a sweep's jobs; one's is `config_class`'s.

    Raises:
        ConfigError: as `config_class`, or two recipes declare different sections of one name.
    """
    kinds = [config_class(target) for target in targets]
    owners: dict[str, tuple[str, type[Section]]] = {}
    for target in targets:
        for name, section in find_recipe(target).sections.items():
            other, first = owners.setdefault(name, (target, section))
            if section is not first:  # Hydra has one base node, so one recipe would get the other's defaults
                raise ConfigError(
                    [
                        f"recipe.target is both {other!r} and {target!r} in this sweep, and each has its own section "
                        f"{name!r}; give one of the sections another name, or run the recipes with separate commands"
                    ]
                )
    if len(kinds) == 1:
        return kinds[0]
    fields = {name: (info.annotation, info) for kind in kinds[1:] for name, info in kind.model_fields.items()}
    own = {name: value for name, value in fields.items() if name not in kinds[0].model_fields}
    return create_model("Config", __base__=kinds[0], **cast(dict[str, Any], own))


def load_main(target: str) -> Callable[[Config], None]:
    """Import the recipe in module `target` and return its `main`.

    Raises:
        ConfigError: the module exits while it is imported, or it has no `main` that runs when it is called.
    """
    try:
        main = vars(import_user_module(target)).get("main")
    except UserCodeError as error:
        raise ConfigError([f"recipe.target is {target!r}, but importing it failed: {error}"]) from error
    if main is None:
        raise ConfigError([f"recipe.target is {target!r}, but {target} has no function main; {_HOW}"])
    _check_runs_when_called(target, main)
    return main


def _check_runs_when_called(target: str, main: Callable) -> None:
    """Raise if a recipe's `main` can't be called, or would only return an object and end the command without a run."""
    kinds = {
        "a coroutine function (async def)": inspect.iscoroutinefunction,
        "a generator function (it contains yield)": inspect.isgeneratorfunction,
        "an asynchronous generator function": inspect.isasyncgenfunction,
    }
    for kind, is_kind in kinds.items():
        if is_kind(main):
            what = f"whose main is {kind}, so calling it would run nothing"
            raise ConfigError([f"recipe.target is {target!r}, {what}; write main(config) as a plain function"])
    try:
        inspect.signature(main, follow_wrapped=False).bind(None)  # decorators may supply arguments
    except TypeError as error:
        what = f"but main can't be called with the config: {error}"
        raise ConfigError([f"recipe.target is {target!r}, {what}; write main(config)"]) from error


class _RecipeConfig(Config):
    """Base of configs whose class is made at run time, which pickle can't find by name."""

    @model_validator(mode="before")
    @classmethod
    def _add_own_roles(cls, values: Any) -> Any:
        """Give the recipe's own roles their classes, unless the values do."""
        own = find_recipe(cls.model_fields["recipe"].default.target).own_roles
        roles = values.get("roles", builtin_roles()) if isinstance(values, Mapping) else None
        if not isinstance(roles, Mapping):
            return values
        added = {
            name: {"target": target, **roles.get(name, {})}
            for name, target in own.items()
            if isinstance(roles.get(name, {}), Mapping)
        }
        return {**values, "roles": {**roles, **added}} if added else values

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.recipe.target, self.__getstate__())


def _rebuild(target: str, state: dict[Any, Any]) -> Config:
    kind = config_class(target)
    config = kind.__new__(kind)
    config.__setstate__(state)
    return config


def _import(target: str) -> ModuleType:
    """Import the module that holds the spec of a recipe."""
    try:
        if find_user_module(target) is None:
            raise ConfigError([f"recipe.target is {target!r}, but there is no module {target} {_PLACES}; {_HOW}"])
        light = f"{target}_spec"
        return import_user_module(light if find_user_module(light) else target)
    except ConfigError:
        raise
    except ModuleNotFoundError as error:
        raise ConfigError([f"recipe.target is {target!r}: {error} {_PLACES}; {_HOW}"]) from error
    except Exception as error:  # importing user code can raise anything
        reason = describe_exception(error)
        raise ConfigError([f"recipe.target is {target!r}, but importing it failed: {reason}"]) from error


def _form_problems(target: str, spec: RecipeSpec) -> Iterator[str]:
    """Yield which attributes of a spec have the wrong type; users' modules are seldom type-checked."""
    where = f"recipe.target is {target!r}, whose RecipeSpec"
    for name in ("roles", "trains", "advantage_columns", "rules", "warnings"):
        value, of_functions = getattr(spec, name), name in ("rules", "warnings")
        items = value if isinstance(value, tuple | list) else [None]
        if not all(callable(item) if of_functions else isinstance(item, str) for item in items):
            example = "(my_rule,)" if of_functions else '("actor",)'
            yield f"{where}.{name} is {value!r}; write a tuple of {'functions' if of_functions else 'names'}: {example}"
    for name, example in (
        ("own_roles", '{"teacher": "package.module:Teacher"}'),
        ("sections", '{"my_section": MySection}'),
        ("ignores", '{"algorithm.scale": "the reason"}'),
    ):
        value = getattr(spec, name)
        pairs = value.items() if isinstance(value, Mapping) else [(None, None)]
        if not all(isinstance(key, str) and (name == "sections" or isinstance(item, str)) for key, item in pairs):
            yield f"{where}.{name} is {value!r}; write a dict such as {example}"


def _section_problems(target: str, sections: Mapping[str, type[Section]]) -> Iterator[str]:
    """Yield why sections of a recipe can't be part of a config."""
    for name, section in sections.items():
        where = f"recipe.target is {target!r}, whose section {name!r}"
        if not (inspect.isclass(section) and issubclass(section, Section)):
            way_out = "give the class" if isinstance(section, Section) else f"derive it from {_SECTION}"
            yield f"{where} is {section!r}; {way_out}"
        elif name in _RESERVED or (name in dir(Config) and name not in Config.model_fields):
            yield f"{where} can't have this name, which Hydra or pydantic reads; choose another name"
        elif name in Config.model_fields or not name.isidentifier() or name.startswith("_"):
            yield f"{where} can't have this name; use a Python name that is not a key: {', '.join(Config.model_fields)}"
        else:
            yield from _default_problems(where, section)


def _role_problems(target: str, spec: RecipeSpec) -> Iterator[str]:
    """Yield why roles of a recipe can't be started or trained."""
    for name in spec.own_roles:
        if name in builtin_roles():
            yield (
                f"recipe.target is {target!r}, whose own role {name!r} has the name of a built-in one; choose another "
                f"name, or set roles.{name}.target to replace the built-in class"
            )
    for name in spec.trains:
        if name not in spec.starts:
            yield (
                f"recipe.target is {target!r}, which trains the role {name!r} but does not start it; name it in "
                "RecipeSpec.roles or own_roles"
            )


def _default_problems(where: str, section: type[Section]) -> Iterator[str]:
    """Yield the keys of a section that lack a default, or whose default can't be read back from a base node in YAML."""
    try:
        with UserCode(where, to_config_error):
            default = section()
    except ValidationError as error:
        keys = ", ".join(".".join(map(str, details["loc"])) for details in error.errors())
        yield f"{where} has no valid default for {keys}; give every key one"
        return
    try:
        with UserCode(where, to_config_error):
            section.model_validate(default.model_dump(mode="json"))
    except PydanticSerializationError as error:
        yield f"{where} has a default that YAML can't express ({error}); use {_YAML_TYPES}"
    except ValidationError as error:
        keys = ", ".join(dict.fromkeys(str(name) for details in error.errors() for name in details["loc"][:1]))
        yield f"{where} has a type that YAML can't express for {keys or 'some key'}; use {_YAML_TYPES}"
