from typing import Any, cast

import pytest

from rlpack.recipes.driver.role_groups import RoleGroups


def test_a_role_that_the_run_lacks_is_an_error_with_those_it_has():
    groups = RoleGroups(cast(Any, {"actor": 1, "reviser": 2}))
    assert groups["reviser"] == 2
    assert groups.get("critic") is None
    with pytest.raises(KeyError, match=r"no role 'revisor'; it has actor, reviser"):
        groups["revisor"]
