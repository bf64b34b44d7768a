"""The model folders of a run: its trained models at the end, and a damaged reference that is stored again."""

from functools import partial

from rlpack.checkpoint.errors import CheckpointError
from rlpack.checkpoint.model_folder import new_model_folder
from rlpack.distributed.errors import RoleError
from rlpack.models.policy_folder import complete_policy_folder, save_tokenizer
from rlpack.models.stop_tokens import own_stop_token_ids
from rlpack.observe.run_dir import MODEL
from rlpack.recipes.driver.reference_policy import Rebuild, rebuild_reference, reference_model
from rlpack.recipes.driver.session import Session
from rlpack.worker import Trainable


def export_models(session: Session) -> None:
    """Write each trained role's model as a Hugging Face folder, tokenizer included.

    Raises:
        CheckpointError: a folder could not be hashed or renamed.
        RoleError: a rank could not write its files.
        RunTakenOverError: another process has taken over the run directory; its models are left alone.
    """
    try:
        _export_models(session)
    except (CheckpointError, RoleError):
        session.run.note(
            "all steps are done and saved; once the cause is fixed, write the models with "
            f"run_dir={session.run.run_dir} resume=auto"
        )
        raise


def _export_models(session: Session) -> None:
    """Write the models."""
    for name, group in session.trained.items():
        # The folders of roles other than the policy have the roles' names.
        folder = session.run.run_dir / (MODEL if name == "actor" else f"{name}_model")
        with new_model_folder(folder, check=session.run.check_lock) as staging:
            group.run(Trainable.export_model, str(staging))
            if name == "actor":
                config, tokenizer = session.config, session.tokenizer
                ends = own_stop_token_ids(config, tokenizer)
                complete_policy_folder(staging, config.model, tokenizer, stop_token_ids=ends)
            else:
                save_tokenizer(session.tokenizer, staging)
        session.run.note(f"{'model' if name == 'actor' else name} written to {folder}")


def store_reference_again(session: Session, rebuild: Rebuild) -> None:
    """Store a damaged reference again; `Session.restore` follows, because this changes the actor's weights."""
    if rebuild.checkpoint is not None:
        session.actor.run(Trainable.load, str(rebuild.checkpoint / "actor"))
    export = partial(session.actor.run, Trainable.export_reference)
    rebuild_reference(session.run.run_dir, rebuild, export)
    session.run.note(f"reference rebuilt in {reference_model(session.run.run_dir)}, bit for bit")
