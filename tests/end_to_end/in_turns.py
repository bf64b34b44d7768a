"""Built-in recipes without their queue: they draw a batch in the step that takes it, as runs without a lead do."""

import textwrap
from pathlib import Path

# The queue of a built-in recipe is replaced by one that calls its draw and publishes its weights, and nothing else.
_RECIPE = """
    from rlpack.recipes.{name}_spec import SPEC


    class InTurns:
        def __init__(self, session, draw, draw_groups=None, *, rounds=1):
            self.session, self.draw = session, draw

        def take(self, step):
            return self.draw(self.session, step)

        def publish(self, step):
            from rlpack.recipes.driver.engine_weights import sync_weights

            sync_weights(self.session, step)


    def main(config):
        from rlpack.recipes import {name}

        {name}.AheadQueue = InTurns
        {name}.main(config)
"""


def write_recipe(folder: Path, name: str) -> str:
    """Write a built-in recipe without its queue into a folder, and return its module."""
    module = f"{name}_in_turns"
    (folder / f"{module}.py").write_text(textwrap.dedent(_RECIPE.format(name=name)))
    return module
