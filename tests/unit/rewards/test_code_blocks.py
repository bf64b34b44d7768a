import time

import pytest

from rlpack.rewards.code_blocks import program_of

PYTHON = "```python\nx = 1\n```"


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("x = 1", "x = 1"),
        ("", ""),
        (PYTHON, "x = 1\n"),
        ("x = 1\n```\nThis sets x.", "x = 1\n"),
        ("def f():\n    x = 1\n``` \n", "def f():\n    x = 1\n"),
        ("```\nx = 1\n", "```\nx = 1\n"),
        ("\n```\nx = 1\n", "\n```\nx = 1\n"),
        ("x = 1\n```python\ny", "x = 1\n```python\ny"),
        ("x = 1\n``` is a fence", "x = 1\n``` is a fence"),
        ("'''\n  ```\n'''\nx = 1", "'''\n  ```\n'''\nx = 1"),
        ("x = 1  # ```", "x = 1  # ```"),
        (f"x = 0\n```\nBetter:\n{PYTHON}", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```python3\nx = 1\n```", "x = 1\n"),
        ("``` Python title='a.py'\nx = 1\n```", "x = 1\n"),
        ("```{.py}\nx = 1\n```", "x = 1\n"),
        ("```python\r\nx = 1\r\n```", "x = 1\r\n"),
        (f"```bash\npip install x\n```\nThen:\n{PYTHON}", "x = 1\n"),
        (f"Run ```sh\nls\n``` first.\n{PYTHON}", "x = 1\n"),
        (f"{PYTHON}\n```text\n1\n```\n", "x = 1\n"),
        (f"{PYTHON}\n```pycon\n>>> x\n```\n", "x = 1\n"),
        (f"```py\nx = 0\n```\n{PYTHON}", "x = 1\n"),
        (f"```python\nx = 0\n```Or:\n{PYTHON}", "x = 1\n"),
        (f"{PYTHON}\nOutput:\n```\n1\n```\n", "x = 1\n"),
        (f"```\nx = 0\n```\n{PYTHON}\n```\n1\n```\n```sh\nls\n```", "x = 1\n"),
        ("```\nx = 0\n```\n```\nx = 1\n```\n```text\n1\n```", "x = 1\n"),
        ("```c\nint x;\n```\n```js\nx\n```", "x\n"),
        ("Here: ```python\nx = 1```", "x = 1"),
        (f"Use ``` for code, or ```x```.\n{PYTHON}", "x = 1\n"),
        ("  ```python\n  x = 1\n  ```\n", "x = 1\n"),
        ("1. Code:\n\n   ```python\n   def f():\n       x = 1\n\n   y = 1\n   ```", "def f():\n    x = 1\n\ny = 1\n"),
        ("\t```python\n\tdef f():\n\t\tx = 1\n\t```", "def f():\n\tx = 1\n"),
        ('  ```python\n\n  x = """\n a\nb\n    c"""\n  ```', '\nx = """\na\nb\n  c"""\n'),
        ("  ```python\ndef f():\n  x = 1\n```", "def f():\n  x = 1\n"),
        ("```python\n  x = 1\n```", "  x = 1\n"),
        ("  ```python\n    x = 1\n  ```", "  x = 1\n"),
        ("  ```python\n  ```", ""),
        ("```python\nx = '```'\n```", "x = '```'\n"),
        ("```python\n'''\n    ```\n    y\n    ```\n'''\n```", "'''\n    ```\n    y\n    ```\n'''\n"),
        ("````python\n```\n````", "```\n"),
        (f"{PYTHON}\n```python\nx = 2", "x = 1\n"),
        ("```python\nx = 1", "```python\nx = 1"),
        (f"I enclose the code in ``` delimiters.\n{PYTHON}", "x = 1\n"),
        (f"Format: put it between ``` fences:\n\n{PYTHON}", "x = 1\n"),
        (f"I enclose the code in ```\nas asked.\n{PYTHON}", "x = 1\n"),
        (f"``` fences enclose the code.\n{PYTHON}", "x = 1\n"),
        (f"I start with ```python\nas asked.\n{PYTHON}", "x = 1\n"),
        (f"```markdown\nThe code:\n{PYTHON}\n```", "x = 1\n"),
        (f"````markdown\n{PYTHON}\n````", "x = 1\n"),
        (f"```python\nx = 0\n{PYTHON}", "x = 1\n"),
        ("- ```python\n  x = 1\n  ```", "x = 1\n"),
        ("```python\nx = 1 ```", "x = 1"),
        ("```python\r\nx = 1 ```\r\nDone.", "x = 1"),
        ("```python\n'''\n    ```python\n    y\n    ```\n'''\n```", "'''\n    ```python\n    y\n    ```\n'''\n"),
        ("````python\n'''\n```python\ny\n```\n'''\n````", "'''\n```python\ny\n```\n'''\n"),
        ("```python\nx = 1  # not ```x```\n```", "x = 1  # not ```x```\n"),
    ],
)
def test_the_program_is_the_last_block_that_may_be_python(completion, program):
    assert program_of(completion) == program


@pytest.mark.parametrize(
    "text",
    [
        " ",
        "`",
        "```a\n",
        "```a ",
        "```python\n",
        "x ``` y z\n",
        "a `` b\n",
        "  ```py\n  x\n  ```\n",
        "````\n```\n",
        "```a\nx ```",
    ],
)
def test_the_time_to_find_blocks_is_in_proportion_to_the_text(text):
    began = time.monotonic()
    program_of(text * (400_000 // len(text)))
    assert time.monotonic() - began < 10.0
