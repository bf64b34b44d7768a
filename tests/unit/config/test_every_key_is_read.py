"""Follow sections through the source by their types, and find for each key an attribute access that reads it.

A name's type comes from annotations (parameters, class attributes), and from assignments, loops and comprehensions over
what already has a type. Only `section.key` with a section of the right type counts; an equal name elsewhere doesn't.
"""

import ast
from dataclasses import fields, is_dataclass
from inspect import signature
from pathlib import Path
from typing import get_args

import rlpack
from rlpack.algorithms.registry import ADVANTAGES, LOSSES
from rlpack.config import schema
from rlpack.config.keys import Key, children, root_key, walk
from rlpack.config.recipes import EVALUATE_TARGET, builtin_recipes, builtin_target, config_class, find_recipe
from rlpack.packing.batching import Batching

ROOT = Path(rlpack.__file__).parents[1]
# These hand a role's own batching and layout on, and a set's own prompts and reward; the rest of rlpack.config only
# checks and describes keys.
_MERGES = ("roles.py", "layout_sizes.py", "evaluation_sets.py")
SOURCES = [
    path
    for package in ("rlpack", "workers", "recipes")
    for path in sorted((ROOT / package).rglob("*.py"))
    if path.parent.name != "config" or path.name in _MERGES
]
TARGETS = [*map(builtin_target, builtin_recipes()), EVALUATE_TARGET]
OF_RECIPES = [section for target in TARGETS for section in find_recipe(target).sections.values()]
SECTIONS = {
    name: value
    for name, value in vars(schema).items()
    if isinstance(value, type) and (issubclass(value, schema.Section) or value is Batching)
} | {section.__name__: section for section in OF_RECIPES}

SHARED = {*schema.Compute.model_fields}
INHERITING = {
    "RoleBatching": schema.RoleBatching,
    "ForwardBatching": schema.ForwardBatching,
    "RoleParallel": schema.RoleParallel,
}


def types_of_keys():
    """Return section name -> key -> name of the section below it, `[Name]` for a mapping of sections."""
    found = {}
    for name, section in SECTIONS.items():
        below = children(Key("", section))
        found[name] = {
            key.name: key.annotation.__name__ if key.is_section else f"[{get_args(key.annotation)[1].__name__}]"
            for key in below.values()
            if key.is_section or (key.is_open and not key.is_leaf)
        }
    return found


def type_in(annotation, known):
    """Return the first known class that an annotation names, also one in quotes."""
    if annotation is None:
        return None
    for node in ast.walk(annotation):
        name = getattr(node, "id", getattr(node, "attr", getattr(node, "value", None)))
        if isinstance(name, str) and name.strip('"').split(" ")[0].rpartition(".")[2] in known:
            return name.strip('"').split(" ")[0].rpartition(".")[2]
    return None


class Reads(ast.NodeVisitor):
    """Collects (section, key) pairs of one file; `attributes` maps every class to its typed attributes."""

    def __init__(self, attributes, returns, reads):
        self.attributes, self.returns, self.reads = attributes, returns, reads
        self.scopes, self.owner = [{}], None

    def type_of(self, node):
        """Return the class of an expression where it can be told."""
        match node:
            case ast.Name(id=name):
                return next((scope[name] for scope in reversed(self.scopes) if name in scope), None)
            case ast.Attribute(value=base, attr=attribute):
                return self.attributes.get(self.type_of(base), {}).get(attribute)
            case ast.Subscript(value=base) | ast.Call(func=ast.Attribute(value=base, attr="get")):
                return (self.type_of(base) or "").strip("[]") or None
            case (
                ast.Call(func=ast.Name(id="cast"), args=[kind, _])
                | ast.Call(func=ast.Name(id="recipe_section"), args=[_, kind])
            ):
                return type_in(kind, self.attributes)
            case ast.Call(func=ast.Name(id=function)):
                return self.returns.get(function)
        return None

    def visit_Attribute(self, node):
        self.reads.add((self.type_of(node.value), node.attr))
        self.generic_visit(node)

    def visit_Call(self, node):
        match node.func:  # the whole config is dumped too, to be shown, which reads nothing
            case ast.Attribute(value=dumped, attr="model_dump") if self.type_of(dumped) in INHERITING:
                kind = self.type_of(dumped)
                self.reads.update((kind, name) for name in INHERITING[kind].model_fields)
            # `role_compute` merges sections into a `Compute`, whose own keys have to be read like any others.
            case ast.Attribute(value=dumped, attr="model_dump") if self.type_of(dumped) in ("Actor", "RoleCompute"):
                kinds = [kind for kind in SECTIONS if issubclass(SECTIONS[kind], SECTIONS[self.type_of(dumped)])]
                self.reads.update((kind, name) for kind in kinds for name in SHARED & set(SECTIONS[kind].model_fields))
        self.generic_visit(node)

    def visit_ClassDef(self, node):
        before, self.owner = self.owner, node.name
        self.generic_visit(node)
        self.owner = before

    def visit_FunctionDef(self, node):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        scope = {argument.arg: type_in(argument.annotation, self.attributes) for argument in arguments}
        if self.owner and arguments and arguments[0].arg == "self":
            scope["self"] = self.owner
        self.scopes.append(scope)
        self.generic_visit(node)
        self.scopes.pop()

    def visit_Assign(self, node):
        pairs = [(node.targets[0], node.value)]
        if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = list(zip(node.targets[0].elts, node.value.elts, strict=True))
        for target, value in pairs:
            self.bind(target, self.type_of(value))
        self.generic_visit(node)

    def visit_AnnAssign(self, node):
        self.bind(node.target, type_in(node.annotation, self.attributes))
        self.generic_visit(node)

    def visit_For(self, node):
        self.bind_loop(node.target, node.iter)
        self.generic_visit(node)

    def visit_ListComp(self, node):
        for loop in node.generators:
            self.bind_loop(loop.target, loop.iter)
        self.generic_visit(node)

    def visit_SetComp(self, node):
        self.visit_ListComp(node)

    def visit_DictComp(self, node):
        self.visit_ListComp(node)

    def visit_GeneratorExp(self, node):
        self.visit_ListComp(node)

    def bind_loop(self, target, iterated):
        if isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Attribute):
            element = (self.type_of(iterated.func.value) or "").strip("[]")
            if iterated.func.attr == "values":
                self.bind(target, element)
            if iterated.func.attr == "items" and isinstance(target, ast.Tuple):
                self.bind(target.elts[1], element)

    def bind(self, target, found):
        match target:
            case ast.Name(id=name) if found:
                self.scopes[-1][name] = found
            case ast.Attribute(value=ast.Name(id="self"), attr=name) if found and self.owner:
                self.attributes[self.owner][name] = found


def all_reads():
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    attributes = types_of_keys() | {node.name: {} for node in classes if node.name not in SECTIONS}
    for node in classes:
        for line in node.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and node.name not in SECTIONS:
                attributes[node.name][line.target.id] = type_in(line.annotation, attributes)
    functions = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    returns = {node.name: type_in(node.returns, attributes) for node in functions}
    reads = set()
    for _ in range(2):  # what one file's classes hold may be set in a file that comes later
        for tree in trees:
            Reads(attributes, returns, reads).visit(tree)
    return reads


def test_every_key_of_the_schema_is_read_outside_of_the_config_package():
    reads = all_reads()
    # A loss and an advantage function get the keys of `algorithm` that their signature names.
    named = {name for function in (*LOSSES.values(), *ADVANTAGES.values()) for name in signature(function).parameters}
    reads |= {("Algorithm", name) for name in named}
    keys = [
        (name, field)
        for name, section in SECTIONS.items()
        if name != "Section"
        for field in ([f.name for f in fields(section)] if is_dataclass(section) else section.model_fields)
    ]
    assert [f"{section}.{key}" for section, key in keys if (section, key) not in reads] == []


def test_the_sections_hold_every_key():
    named = {key.name for section in SECTIONS.values() for key in children(Key("", section)).values()}
    roots = [root_key(config_class(target)) for target in TARGETS]
    of_recipes = {name for target in TARGETS for name in find_recipe(target).sections}
    assert {key.name for root in roots for key in walk(root) if key.name != "<name>"} == named | of_recipes
