from rlpack.config.keys import walk
from rlpack.config.reference_page import PAGE, render


def test_the_reference_page_is_what_the_schema_says():
    assert PAGE.read_text(encoding="utf-8") == render(), "run python -m rlpack.config.reference_page"


def test_the_reference_page_names_every_key():
    page = render()
    assert [key.path for key in walk() if key.is_leaf and f"| `{key.name}` |" not in page] == []
