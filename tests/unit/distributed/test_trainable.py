"""A method of a trained role that not every rank would run is refused where it is written."""

import pytest

from rlpack.worker import RankContext, Trainable, Worker, broadcast, rank_zero
from rlpack.workers.actor import ActorWorker


def test_a_trained_role_whose_save_is_not_run_by_every_rank_is_refused():
    with pytest.raises(TypeError, match=r"Forgetful\.save is not decorated with @broadcast"):

        class Forgetful(Worker, Trainable):
            def save(self, folder: str) -> None: ...

    with pytest.raises(TypeError, match=r"Lonely\.export_model is not decorated with @broadcast"):

        class Lonely(ActorWorker):
            @rank_zero
            def export_model(self, folder: str) -> None: ...


def test_a_trained_role_without_one_of_the_methods_cannot_be_built():
    class Unsaved(Worker, Trainable):
        @broadcast
        def load(self, folder: str) -> None: ...

    with pytest.raises(TypeError, match=r"abstract methods '?export_model'?, '?save"):
        Unsaved(None)


def test_a_role_that_exports_its_model_needs_no_other_method_for_a_reference():
    class Exporter(Worker, Trainable):
        @broadcast
        def save(self, folder: str) -> None: ...

        @broadcast
        def load(self, folder: str) -> None: ...

        @broadcast
        def export_model(self, folder: str) -> None:
            self.exported = folder

    exporter = Exporter(RankContext())
    exporter.export_reference("there")
    assert exporter.exported == "there"
