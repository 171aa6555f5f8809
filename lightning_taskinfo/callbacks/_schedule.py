"""When a callback measures: every so many optimizer steps, or at the end of every so many epochs."""

from lightning_taskinfo._lightning import Trainer


class Schedule:
    """The part of a probe that knows when it is due."""

    every_n_steps: int | None
    every_n_epochs: int | None
    data: str
    _last_step: int  # after the last batch
    _measured_at: int  # the last measurement of this fit

    def _due(self, trainer: Trainer) -> bool:
        if self.every_n_steps is None:
            return self._ends_an_epoch(trainer)
        step, last = trainer.global_step, self._last_step
        self._last_step = step
        return (
            step // self.every_n_steps != last // self.every_n_steps
        )  # the same while accumulating

    def _ends_an_epoch(self, trainer: Trainer) -> bool:
        every = (
            self.every_n_epochs
        )  # first: this is asked at every batch, and looking anything up counts
        return (
            every is not None and trainer.is_last_batch and (trainer.current_epoch + 1) % every == 0
        )

    def _due_next(self, trainer: Trainer) -> bool:
        """Whether the batch that begins may be one to look at, where a batch is one optimizer step at most."""
        every = self.every_n_steps
        return self._ends_an_epoch(trainer) if every is None else (self._last_step + 1) % every == 0
