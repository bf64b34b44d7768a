"""Every benchmark starts, and has the options of the commands that the documents give for it.

Pyright checks the calls inside them (`make types`); nothing here measures.
"""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "benchmarks"
MODULES = sorted([*FOLDER.glob("*.py"), *(FOLDER / "gpu").glob("*.py")])
SCRIPTS = [path for path in MODULES if path.name == "__main__.py" or "\nif __name__ ==" in path.read_text("utf-8")]
DOCUMENTS = ("Makefile", "README.md", "CONTRIBUTING.md", "docs/design.md", "docs/guide.md", "benchmarks/RESULTS.md")
COMMAND = re.compile(r"python (?:-m )?benchmarks[./](?P<name>\w+)(?:\.py)?(?P<arguments>[^`\n]*)")
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")


def name_of(path: Path) -> str:
    return path.parent.name if path.name == "__main__.py" else path.stem


def options_of(name: str, text: str) -> set[str]:
    """Return the options that a text's commands give to a benchmark; lines that are continued are not followed."""
    return {word for one in COMMAND.finditer(text) if one["name"] == name for word in OPTION.findall(one["arguments"])}


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_every_script_explains_itself_and_has_the_options_that_the_documents_give_it(path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 0
    explained, _, options = capsys.readouterr().out.partition("\noptions:\n")
    named = set().union(*(options_of(name_of(path), (ROOT / name).read_text("utf-8")) for name in DOCUMENTS))
    assert (named | options_of(name_of(path), explained)) <= set(OPTION.findall(options))


@pytest.mark.parametrize("path", sorted({*MODULES} - {*SCRIPTS}), ids=name_of)
def test_every_other_module_can_be_imported(path):
    assert runpy.run_path(str(path))["__doc__"]


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_scripts_that_are_run_by_path_import_nothing_from_the_root(path):
    """The folder of the script is on Python's path then, not the root."""
    text = path.read_text("utf-8")
    documents = "".join((ROOT / name).read_text("utf-8") for name in DOCUMENTS)
    if f"python benchmarks/{path.name}" in text + documents:
        assert not re.search(r"^\s*(?:from|import) (?:benchmarks|tests)\b", text, re.MULTILINE)


def test_commands_of_the_documents_are_found():
    results = (FOLDER / "RESULTS.md").read_text("utf-8")
    assert options_of("training_step", results) >= {"--seed", "--hidden", "--repeats"}
    assert {name_of(path) for path in SCRIPTS} >= {one["name"] for one in COMMAND.finditer(results)}
