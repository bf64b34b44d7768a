"""Write a model folder atomically: under its final name, it is complete or doesn't exist.

    <parent>/.tmp-<name>-<nonce>/    ranks write the model here
        hash all files into manifest.json, and flush files and directories
    <parent>/.replaced-<name>-*/     an earlier folder, renamed; deleted last
    <parent>/<name>/                 renamed from .tmp-*
    <parent>/<name>/COMMITTED        SHA-256 of the manifest, flushed; renamed from .COMMITTED

Invariants (tests/unit/checkpoint/test_model_folder.py):
1. If writing fails, the earlier folder is unchanged. After a kill between the two renames, the next writer first
   restores its name.
2. A folder with a marker has all files that its manifest lists.
"""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rlpack import __version__
from rlpack.checkpoint.errors import CheckpointError
from rlpack.checkpoint.files import discard_folder
from rlpack.checkpoint.publish import publish_folder


@contextmanager
def new_model_folder(target: Path, *, check: Callable[[], None] | None = None) -> Iterator[Path]:
    """Yield the path of a new folder, which replaces `target` when the block ends.

    Args:
        target: the model folder; its parent must exist. Only one process at a time may write it.
        check: raises if that is another process by now; called before anything in the parent is changed or renamed.

    Raises:
        CheckpointError: the folder could not be written or renamed; an earlier one is unchanged, or still exists as
            `.replaced-*`.
    """
    if check is not None:
        check()
    _restore(target)
    for debris in target.parent.glob(f".tmp-{target.name}-*"):
        discard_folder(debris)
    staging = target.with_name(f".tmp-{target.name}-{secrets.token_hex(4)}")
    try:
        yield staging
        aside = target.with_name(f".replaced-{target.name}-{secrets.token_hex(4)}")
        publish_folder(staging, target, {"rlpack": __version__}, aside=aside, check=check)
        for old in target.parent.glob(f".replaced-{target.name}-*"):
            discard_folder(old)
    except OSError as error:
        raise CheckpointError(f"the model could not be written to {target}: {error}") from error
    finally:
        discard_folder(staging)


def _restore(target: Path) -> None:
    """Restore the name of a folder that was moved aside, unless another one has taken it."""
    aside = sorted(target.parent.glob(f".replaced-{target.name}-*"), key=lambda folder: folder.stat().st_mtime)
    if aside and not target.exists():
        aside[-1].rename(target)
