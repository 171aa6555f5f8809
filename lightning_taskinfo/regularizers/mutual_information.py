"""Mutual information between inputs and features, to be minimised against a critic that is trained beside it."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_taskinfo._ranges import check_choice, check_counts, check_finite, check_positive
from lightning_taskinfo.functional import discrepancy as mi
from lightning_taskinfo.regularizers._base import (
    Regularizer,
    Weight,
    check_rows,
    checked_shape,
    mean_over_ranks,
)
from lightning_taskinfo.regularizers.critics import CLIP, SeparableCritic

Objective = Literal["jensen_shannon", "donsker_varadhan", "mine", "nwj", "info_nce"]


class MutualInformation(Regularizer):
    r"""Penalty :math:`\lambda \hat I(x; z)`: make the features of unlabelled target inputs tell less about them.

    A critic :math:`M(x, z)` is trained to **maximise** the objective while the network, through the
    penalty, minimises it, in turns at each step. Critic and network follow ``objective``. What is
    reported, :attr:`value`, is in nats: the SMILE estimate (:math:`\tau = 5`) for the Jensen–Shannon
    objective, the objective itself for the others, which are estimates of their own. SMILE is
    refused as an objective: once the product scores are clipped nothing holds the joint scores
    back. A lower bound that is being minimised promises nothing: check the result with
    :func:`estimate_mutual_information`.

    The critic has its own optimizer in here, whose state goes into the checkpoint. Its parameters
    do not require gradients, so that the network's optimizer, clipping and DDP never see them; its
    steps run in float32 on copies, and their gradients are averaged over ranks, which keeps it the
    same on all of them.

    Args:
        input_shape: Shape of one input.
        feature_dim: Width of the features.
        weight: The :math:`\lambda`, or a :class:`WeightSchedule`.
        critic: A module that maps inputs ``[B, *input_shape]`` and features ``[B, F]`` to scores
            ``[B, B]``; by default a :class:`.regularizers.critics.SeparableCritic`.
        objective: What critic and network follow: ``"jensen_shannon"``, ``"donsker_varadhan"``,
            ``"mine"`` (the same with the moving-average correction of its gradient), ``"nwj"`` or
            ``"info_nce"``.
        critic_steps: Critic steps per call. If a fresh estimate rises with the weight, the critic
            is too slow: take more of them.
        learning_rate: Learning rate of the critic's Adam.
        seed: Seed of the critic's initial weights.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> regularizer = MutualInformation(input_shape=(4,), feature_dim=2, weight=0.1)
        >>> x = torch.randn(16, 4)
        >>> features = (x @ torch.randn(4, 2)).requires_grad_()
        >>> regularizer(x, features).backward()
        >>> features.grad.shape
        torch.Size([16, 2])
    """

    log_average: Tensor

    def __init__(
        self,
        input_shape: Sequence[int],
        feature_dim: int,
        *,
        weight: Weight = 0.1,
        critic: nn.Module | None = None,
        objective: Objective = "jensen_shannon",
        critic_steps: int = 5,
        learning_rate: float = 1e-3,
        seed: int = 0,
    ) -> None:
        super().__init__(weight)
        check_choice(get_args(Objective), objective=objective)
        check_positive(learning_rate=learning_rate)
        check_counts(critic_steps=critic_steps)
        self.input_shape = checked_shape(input_shape)
        self.feature_dim = feature_dim
        self.objective = objective
        self.critic_steps = critic_steps
        if critic is None:
            critic = SeparableCritic(self.input_shape, feature_dim, seed=seed)
        self.critic = critic.requires_grad_(False).float()
        self.register_buffer("log_average", torch.tensor(-torch.inf))
        self._optimizer = torch.optim.Adam(self.critic.parameters(), lr=learning_rate)

    def forward(self, inputs: Tensor, features: Tensor, *, epoch: int = 0) -> Tensor:
        """Train the critic by ``critic_steps`` (in train mode) and return the penalty.

        Args:
            inputs: Unlabelled inputs, shape ``[B, *input_shape]``.
            features: Their features, shape ``[B, feature_dim]``; the penalty's gradient flows into
                these only.
            epoch: Current epoch, for the weight.

        Returns:
            ``weight * objective``, a scalar; :attr:`value` is the estimate.

        Raises:
            ValueError: If shapes are wrong, inputs are not finite, or the batch holds fewer than
                two samples.
        """
        check_rows("inputs", inputs, self.input_shape)
        check_rows("features", features, [self.feature_dim], rows=len(inputs))
        check_finite("inputs", inputs)
        with torch.autocast(inputs.device.type, enabled=False):
            x = inputs.detach().float()
            z = features.float()
            if self.training:
                self._train_critic(x, z.detach())
            scores = self.scores(x, z)
            objective = value = self._objective(scores)
            if self.objective == "jensen_shannon":  # which is no estimate in nats
                value = mi.smile(scores, CLIP)
        return self.penalty(objective, self.schedule(epoch), value=value)

    def scores(self, inputs: Tensor, features: Tensor) -> Tensor:
        """Return the critic's scores of all pairs, shape ``[B, B]``, unmoved by its later steps."""
        # Its steps move the weights in place, which a graph that waits for its backward must not see.
        with saved_tensors_hooks(torch.clone, lambda saved: saved):
            return self.critic(inputs, features)

    def _objective(self, scores: Tensor) -> Tensor:
        """Return what critic and network follow."""
        if self.objective == "mine":
            return mi.mine(scores, self.log_average)
        return getattr(mi, self.objective)(scores)

    @torch.enable_grad()
    def _train_critic(self, x: Tensor, z: Tensor) -> None:
        self.critic.requires_grad_()
        try:
            for _ in range(self.critic_steps):
                self._step(x, z)
        finally:  # nobody else is to see that its parameters have gradients
            self.critic.requires_grad_(False)

    def _step(self, x: Tensor, z: Tensor) -> None:
        scores = self.critic(x, z)
        if self.objective == "mine":
            average = self.log_average
            (moved,) = mean_over_ranks(mi.update_log_average(average, scores, 0.99))
            average.copy_(torch.where(moved.isfinite(), moved, average))
        parameters = list(self.critic.parameters())
        own = torch.autograd.grad(-self._objective(scores), parameters)
        gradients = mean_over_ranks(*own)
        if not all(g.isfinite().all() for g in gradients):
            return  # e.g. features that overflowed: the next batch is fine
        for p, g in zip(parameters, gradients, strict=True):
            p.grad = g
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _apply(self, fn: Any, recurse: bool = True) -> "MutualInformation":
        super()._apply(fn, recurse)
        # Casts its state to where the critic went.
        self._optimizer.load_state_dict(self._optimizer.state_dict())
        return self

    def get_extra_state(self) -> dict[str, Any]:
        """Return the state of the critic's optimizer, for checkpoints."""
        return self._optimizer.state_dict()

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take up the state of the critic's optimizer from a checkpoint."""
        # It would share the tensors of a state dict in memory.
        self._optimizer.load_state_dict(deepcopy(state))
