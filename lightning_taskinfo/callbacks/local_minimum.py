"""Characterise the local minimum that a training has found."""

from typing import Any, Literal

from torch import Generator, Tensor, nn

from lightning_taskinfo._ranges import check_choice, check_counts
from lightning_taskinfo.callbacks.probe import Probe
from lightning_taskinfo.callbacks.source import Samples
from lightning_taskinfo.fisher import gradient_gram
from lightning_taskinfo.functional.likelihood import NumberedDraws
from lightning_taskinfo.functional.minima import local_minimum_summary, normalise_logits


class LocalMinimum(Probe):
    r"""Log ``local_minimum/gamma``, the log-determinant of the Gram matrix of the samples' gradients.

    .. math:: \hat\gamma = \frac1T \sum_{t=1}^T \log|J_t J_t^\top|

    with :math:`J_t` the gradients of :math:`N'` random training samples by their own labels; lower
    is better. Beside it go ``local_minimum/gamma_standard_error`` over the draws,
    ``local_minimum/spectral_radius``, ``/frobenius``, ``/trace`` and ``/mean_loss``: minima compare
    only at nearly equal training loss. Once at the end of training, unless told otherwise. There is
    one Gram matrix of ``max_samples`` samples, and every draw is a part of it.

    Processes do not share the samples: each has the whole matrix. Weights that FSDP2 spreads over
    processes are followed as by :class:`FisherTrace`.

    Args:
        draws: :math:`T`.
        subset_size: :math:`N'`, at most ``max_samples``; ``min(100, samples // 2)`` by default.
        normalise_logits: Whether to divide each logit vector by 0.04 times its norm first, so that
            networks of different confidence compare.
        max_samples: At most this many samples are measured.
        data: As for every probe; a fixed subset of the training set by default.
        labels: The dataset's (``"empirical"``), or one draw from the model (``"sampled"``).
        **probe: When and at what to look, see :class:`~lightning_taskinfo.callbacks.Probe`.

    Raises:
        ValueError: If an argument is out of its range.

    Example::

        trainer = Trainer(callbacks=[LocalMinimum()])

    References:
        Jia, Su, *Information-theoretic local minima characterization and regularization*, ICML
        2020.
    """

    ylabel = "log-determinant of the gradients' Gram matrix"
    headline = ("local_minimum/gamma",)
    split_over_ranks = False

    def __init__(
        self,
        *,
        draws: int = 100,
        subset_size: int | None = None,
        normalise_logits: bool = False,
        max_samples: int = 500,
        data: Literal["train_batch", "train", "val"] = "train",
        labels: Literal["empirical", "sampled"] = "empirical",
        **probe: Any,
    ) -> None:
        super().__init__(max_samples=max_samples, data=data, labels=labels, **probe)
        check_choice(["empirical", "sampled"], labels=labels)
        if self.mc_samples != 1:
            raise ValueError(
                "`mc_samples` must be 1, as the matrix has one gradient for each sample, got "
                f"{self.mc_samples}."
            )
        check_counts(draws=draws, subset_size=subset_size)
        if subset_size is not None and subset_size > max_samples:
            raise ValueError(
                f"`subset_size` must be at most `max_samples`, {max_samples}, got {subset_size}."
            )
        self.draws = draws
        self.subset_size = subset_size
        self.normalise_logits = normalise_logits

    def _outputs(self, model: nn.Module, inputs: Any) -> Tensor:
        outputs = self.reader.outputs(model, inputs)
        return normalise_logits(outputs) if self.normalise_logits else outputs

    def observe(self, model: nn.Module, samples: Samples) -> dict[str, float]:
        draws = NumberedDraws(samples.likelihood, seed=samples.seed, total=samples.total)
        gram = gradient_gram(
            model,
            samples.inputs,
            samples.targets,
            labels=self.labels,
            likelihood=draws,
            forward_fn=self._outputs,
        )
        result = local_minimum_summary(
            gram,
            subset_size=self.subset_size and min(self.subset_size, len(gram)),
            draws=self.draws,
            generator=Generator().manual_seed(samples.seed),
        )
        values = result._asdict() | {"mean_loss": samples.losses(model).mean()}
        return {f"local_minimum/{name}": value.item() for name, value in values.items()}

    def summarise(self, observed: dict[str, float], samples: Samples) -> dict[str, float]:
        return observed
