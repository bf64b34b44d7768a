"""The operator's list of packages from which a run may load code: `RLPACK_ALLOWED_PACKAGES`.

Roles, rewards, losses, advantages and recipes are named by a config. On shared machines the list bounds what a config
can import; it is checked before anything is imported.
"""

from collections.abc import Mapping

# Packages, separated by commas; unset allows any.
ALLOWED = "RLPACK_ALLOWED_PACKAGES"
OWN_PACKAGES = ("rlpack",)


def why_not_allowed(key: str, target: str, environment: Mapping[str, str]) -> str:
    """Return why `target` may not be imported, or "" if it may.

    Args:
        key: config key that names the target, for the message.
        target: `package.module` or `package.module:Name`.
        environment: environment variables of the process.

    >>> why_not_allowed("reward.function", "mine.rewards:f", {"RLPACK_ALLOWED_PACKAGES": "mine,other"})
    ''
    """
    names = [name.strip() for name in environment.get(ALLOWED, "").split(",") if name.strip()]
    packages = [*OWN_PACKAGES, *names]
    module = target.partition(":")[0]
    if not names or any(module == name or module.startswith(f"{name}.") for name in packages):
        return ""
    return (
        f"{key} is {target!r}, but {ALLOWED} allows only code from {', '.join(packages)}; use one of these, or ask "
        f"the operator to add {module.partition('.')[0]}"
    )
