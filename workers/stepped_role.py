"""The base class of actor and critic: a trained role that saves and loads the state of its `OptimizerStepper`."""

from rlpack.worker import Trainable, Worker, broadcast
from rlpack.workers.optimizer_step import OptimizerStepper


class SteppedRole(Worker, Trainable):
    """One data-parallel rank of a trained model (FSDP2) with its optimizer."""

    _stepper: OptimizerStepper

    @broadcast
    def save(self, folder: str) -> None:
        """Write this rank's part of weights and optimizer state into `folder`; a collective."""
        self._stepper.save(folder)

    @broadcast
    def start_save(self, folder: str, timeout_s: float) -> None:
        """Copy weights and optimizer state, and start to write the copy in the background; a collective."""
        self._stepper.start_save(folder, timeout_s)

    @broadcast
    def save_is_done(self) -> bool:
        """Return whether writing the copy has succeeded or failed, without waiting."""
        return self._stepper.saver.is_done()

    @broadcast
    def finish_save(self, timeout_s: float) -> None:
        """Wait until all ranks have written their copies; a collective."""
        self._stepper.saver.wait(timeout_s)

    @broadcast
    def load(self, folder: str) -> None:
        """Restore weights and optimizer state, saved on any number of ranks; a collective."""
        self._stepper.load(folder)
