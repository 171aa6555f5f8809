"""Information in the weights as a penalty."""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_taskinfo._ranges import check_counts, check_not_negative
from lightning_taskinfo._warn import warn
from lightning_taskinfo.regularizers._base import Regularizer, Weight, WeightSchedule
from lightning_taskinfo.variational import noisy_weights, weight_kl


class WeightInformation(Regularizer):
    r"""Penalty :math:`(\beta / N)\,\mathrm{KL}(Q \| P)` beside a **mean** loss: train the information complexity.

    .. math:: \frac1N C_\beta = \mathbb{E}_Q[L_D]/N + \frac{\beta}{N}\,\mathrm{KL}(Q \| P)

    The model's weights must be noisy (:func:`lightning_taskinfo.add_weight_noise`). :math:`N` is
    the size of the labelled training set over all ranks, never of a batch; :math:`\beta = 1` is the
    ELBO. Give the parameters whose names end with ``log_variance`` no weight decay: it would pull
    every standard deviation to 1.

    Args:
        beta: Factor of the divergence beside the **sum** loss, or a :class:`WeightSchedule`.
        num_samples: The :math:`N`. In a LightningModule it may be left out: the mixin asks the
            Trainer.

    Raises:
        ValueError: If ``beta`` is negative or ``num_samples`` not positive.

    Example:
        >>> from lightning_taskinfo.variational import add_weight_noise
        >>> net = add_weight_noise(nn.Linear(1, 1, bias=False), prior_center="zero", std=0.1, prior_std=0.1)
        >>> net.parametrizations.weight.original.data.fill_(0.1)
        tensor([[0.1000]])
        >>> information = WeightInformation(beta=1.0, num_samples=100)
        >>> information(net)  # KL = 1/2
        tensor(0.0050, grad_fn=<MulBackward0>)

    References:
        Achille, Paolini, Mbeng, Soatto, *The information complexity of learning tasks, their
        structure and their distance*, 2019.
    """

    def __init__(
        self,
        beta: Weight = 1.0,
        *,
        num_samples: int | None = None,
    ) -> None:
        if not isinstance(beta, WeightSchedule):
            check_not_negative(beta=beta)
        super().__init__(beta)
        check_counts(num_samples=num_samples)
        self.num_samples = num_samples

    def forward(
        self,
        model: nn.Module,
        *,
        num_samples: int | None = None,
        epoch: int = 0,
    ) -> Tensor:
        """Return the penalty.

        Args:
            model: A module with noisy weights.
            num_samples: The :math:`N`, where the constructor was not given one.
            epoch: Current epoch, for the weight.

        Returns:
            ``beta / N * KL``, a scalar; :attr:`value` is the divergence in nats, :attr:`weight` is
            beta.

        Raises:
            ValueError: If the model has no noisy weights, or :math:`N` is unknown.
        """
        N = self.num_samples if num_samples is None else num_samples
        if N is None:
            raise ValueError(
                "`num_samples` must be given: the size of the labeled training set over all ranks."
            )
        kl = weight_kl(model)
        return self.penalty(kl / N, self.schedule(epoch), value=kl)


def warn_of_decay(model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Warn if the weight decay of an optimizer works on log-variances: it pulls standard deviations to 1."""
    noisy = {id(noise.log_variance): name for name, _, noise in noisy_weights(model)}
    names = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if group.get("weight_decay"):
                names += [
                    noisy[id(p)] for p in group["params"] if p.requires_grad and id(p) in noisy
                ]
    if names:
        warn(
            f"Weight decay pulls the standard deviations of {len(names)} noisy weights to 1, `{names[0]}` among them: "
            "put the parameters whose names end with `log_variance` into a param group with `weight_decay=0`."
        )
