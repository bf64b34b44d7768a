"""Files that processes with user code must not read: credentials, and those that the caller adds, such as the run's."""

import os
import pwd
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

# Below the home directory.
_IN_HOME = (
    ".config", ".netrc", "_netrc", ".ray", ".ssh", ".gnupg", ".git-credentials", ".gitconfig", ".aws", ".azure", ".oci",
    ".boto", ".gsutil", ".s3cfg", ".mc", ".ossutilconfig", ".rclone.conf", ".kube", ".docker", ".huggingface",
    ".kaggle", ".wandb", ".comet.config", ".mlflow", ".databrickscfg", ".snowflake", ".modal.toml", ".sky", ".runpod",
    ".lambda_cloud", ".vast_api_key", ".ngc", ".fly", ".terraform.d", ".vault-token", ".password-store", ".pgpass",
    ".my.cnf", ".npmrc", ".pypirc", ".pip", ".condarc", ".env", ".cargo/credentials", ".cargo/credentials.toml",
    ".local/share/keyrings", ".bash_history", ".zsh_history", ".python_history", ".claude", ".claude.json", ".codex",
    ".gemini", ".openai", ".anthropic", ".bashrc", ".bash_profile", ".bash_login", ".bash_logout", ".bash_aliases",
    ".profile", ".zshenv", ".zprofile", ".zshrc", ".zlogin", ".zlogout", ".inputrc", ".vimrc", ".xprofile", ".xinitrc",
    ".xsessionrc", ".pam_environment", ".viminfo", ".lesshst", ".psql_history", ".mysql_history", ".sqlite_history",
    ".node_repl_history", ".rediscli_history", ".local/share/jupyter/runtime", ".jupyter", ".ipython", ".m2",
    ".gem/credentials", ".bundle/config", ".terraformrc", ".tofurc", ".local/share/fish", ".local/share/uv/credentials",
    ".streamlit", ".vnc", ".Xauthority", ".ICEauthority", ".composer/auth.json", ".gradle/gradle.properties",
    ".nuget/NuGet", ".sbt/.credentials", ".ivy2/.credentials", ".yarnrc.yml", ".pulumi/credentials.json", ".subversion",
    ".local/state/bash", ".local/share/nvim/shada", ".local/state/nvim/shada",
)  # fmt: skip
_IN_HF_HOME = ("token", "stored_tokens")
_OF_SYSTEM = (
    "/run/secrets", "/var/run/secrets", "/etc/shadow", "/etc/shadow-", "/etc/gshadow", "/etc/gshadow-", "/etc/sudoers",
    "/etc/sudoers.d", "/etc/kubernetes", "/etc/krb5.keytab", "/etc/ssl/private", "/var/lib/kubelet",
)  # fmt: skip
# Variables that name files or directories of credentials.
_FILE_VARS = re.compile(
    r"TOKEN(?!IZER)|CREDENTIAL|SECRET|PASSW|PGPASS|(API|PRIVATE|SSH|ACCESS).?KEY|KEY_?(FILE|PATH)|KUBECONFIG|NETRC|"
    r"AWS_CONFIG",
    re.IGNORECASE,
)
_FOLDER_VARS = (
    "XDG_CONFIG_HOME",
    "DOCKER_CONFIG",
    "CLOUDSDK_CONFIG",
    "AZURE_CONFIG_DIR",
    "GNUPGHOME",
    "KAGGLE_CONFIG_DIR",
    "WANDB_CONFIG_DIR",
)


def hidden_paths(environment: Mapping[str, str], more: Iterable[Path] = ()) -> list[Path]:
    """Return the absolute paths of credentials, existing or not, and `more`.

    In the working directory, these are the `.env` files that exist.

    >>> Path("/home/me/.netrc") in hidden_paths({"HOME": "/home/me"})
    True
    >>> Path("/keys/hub") in hidden_paths({"HF_TOKEN_PATH": "/keys/hub"})
    True
    """
    homes = {Path(environment["HOME"])} if environment.get("HOME") else set()
    with suppress(KeyError):  # a container's user without an entry
        homes.add(Path(pwd.getpwuid(os.getuid()).pw_dir))
    paths = {home / name for home in homes for name in _IN_HOME}
    caches = {home / ".cache" for home in homes} | _folders(environment, "XDG_CACHE_HOME")
    hubs = {cache / "huggingface" for cache in caches} | _folders(environment, "HF_HOME")
    paths |= {hub / name for hub in hubs for name in _IN_HF_HOME}
    paths |= {Path(path) for path in _OF_SYSTEM} | _folders(environment, *_FOLDER_VARS)
    for name, value in environment.items():
        if _FILE_VARS.search(name):
            paths |= {Path(part) for part in value.split(os.pathsep) if part.startswith("/")}
    paths |= {*Path("/etc/ssh").glob("ssh_host_*_key"), *Path.cwd().glob(".env*")}
    return sorted({path.absolute() for path in (*paths, *more)} - {Path("/")})


def _folders(environment: Mapping[str, str], *names: str) -> set[Path]:
    return {Path(environment[name]) for name in names if environment.get(name)}
