"""Tasks as vectors: what the filters of a fixed network matter to each."""

import math
from copy import deepcopy
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn

from lightning_taskinfo._batches import BatchFn, Reader
from lightning_taskinfo._calls import Forward, outputs_of
from lightning_taskinfo._files import digest
from lightning_taskinfo._nested import (
    IGNORED,
    described,
    moved,
    pick,
    sample_count,
    split,
)
from lightning_taskinfo._observe import observing
from lightning_taskinfo._ranges import check_counts, check_positive
from lightning_taskinfo.certificates.samples import Data, read_labelled
from lightning_taskinfo.data.arrays import ArrayData
from lightning_taskinfo.fisher import fisher_diagonal
from lightning_taskinfo.tasks import ready
from lightning_taskinfo.tasks.embedding import TaskEmbedding
from lightning_taskinfo.tasks.training import first_answers

BATCH = 512


class Task2Vec:
    r"""Embed tasks by the Fisher information of a fixed network, the probe network of the paper.

    .. math:: F_{ii} = \frac1N \sum_n \mathbb{E}_{y \sim p_w(\cdot|x_n)} (\partial_i \log p_w(y|x_n))^2,
        \qquad \text{embedding}_f = \frac{1}{|f|} \sum_{i \in f} F_{ii}

    For every task a new linear head is fitted to the network's frozen features; then each sample's
    gradient by the network's weights is squared (never the mean gradient of a batch) and averaged
    over the weights of each filter: the output channel of a convolution, the row of a matrix (of a
    transposed convolution, which has its inputs first, an input channel). The
    head is left out, so tasks with different numbers of classes have embeddings of one length.
    Biases and the vectors of normalisation layers are left out too. The network is copied and stays
    as it is; it is measured in eval mode.

    Args:
        network: Any module from inputs to logits; a small network trained on the embedded digits and
            letters where ``None``, which takes images of any size.
        head: Name of the module in the network that the head takes the place of, as in
            ``named_modules()``; its input must be one tensor ``[N, D]`` and its output the logits.
            The last ``nn.Linear`` where ``None``.
        labels: ``"exact"`` expectation over the model's labels, whose cost grows with the classes,
            or ``"sampled"``.
        mc_samples: Number of labels drawn for each sample, for ``labels="sampled"``.
        max_samples: At most this many samples, drawn at random, go into the Fisher information; the
            head sees all.
        weight_decay: Penalty :math:`\frac\lambda2\|W\|^2` of the head beside its mean loss, on
            standardised features; it decides how sure the head gets, and with it the scale of the
            embedding.
        seed: Seed of the draws.
        forward_fn: How to get the logits, ``forward_fn(network, inputs)``; found out by default.
        batch_fn: Picks ``(inputs, labels)`` out of a batch; needed where the batch does not say it
            plainly.

    Raises:
        ValueError: If an argument is outside its domain, or no weight is left beside the head.

    Example:
        >>> network = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> x = torch.randn(60, 4, generator=Generator().manual_seed(0))
        >>> embedding = Task2Vec(network, head="2").embed((x, (x[:, 0] > 0).long()), name="sign")
        >>> embedding.vector.shape, embedding.layers
        (torch.Size([3]), ('0.weight',))

    References:
        Achille et al., *Task2Vec: Task Embedding for Meta-Learning*, ICCV 2019.
    """

    def __init__(
        self,
        network: nn.Module | None = None,
        *,
        head: str | None = None,
        labels: Literal["exact", "sampled"] = "exact",
        mc_samples: int = 1,
        max_samples: int = 1000,
        weight_decay: float = 1e-3,
        seed: int = 0,
        forward_fn: Forward | None = None,
        batch_fn: BatchFn | None = None,
    ) -> None:
        if labels not in ("exact", "sampled"):
            raise ValueError(f"`labels` must be 'exact' or 'sampled', got {labels!r}.")
        check_counts(mc_samples=mc_samples, max_samples=max_samples)
        check_positive(weight_decay=weight_decay)
        self.labels = labels
        self.mc_samples = mc_samples
        self.max_samples = max_samples
        self.weight_decay = weight_decay
        self.seed = seed
        self.forward_fn = forward_fn
        self.batch_fn = batch_fn
        if network is None:
            network = ready.reference_network()
        self.network = deepcopy(network).eval()
        self.head = ready.find_head(self.network, head)
        self.weights = _weights(self.network, self.head)
        for name, parameter in self.network.named_parameters():
            parameter.requires_grad_(name in self.weights)
        self.device = next(self.network.parameters()).device
        self.fingerprint = fingerprint(self.network, self.head)

    def embed(
        self,
        data: ArrayData | Data,
        *,
        name: str | None = None,
        test: Data | None = None,
    ) -> TaskEmbedding:
        """Fit a head to the task and return the embedding.

        Args:
            data: The task's samples: ``(inputs, labels)``, a dataset of such pairs, a loader over
                one, or an :class:`~lightning_taskinfo.data.ArrayData`, whose training split is
                taken. Labels are class indices, shape ``[N]``; classes that do not occur do not
                count, nor do samples whose label is -100.
            name: What to call the task; the name of an ``ArrayData`` where not given.
            test: Samples for :attr:`TaskEmbedding.test_error`; the test split of an ``ArrayData``
                where not given.

        Raises:
            ValueError: If there is no name, ``data`` or ``test`` is one, the labels are not
                classes, fewer than two classes occur, the network does not take the inputs, they
                are not finite, or the head does not get one tensor ``[N, D]`` and put out the logits.
        """
        if isinstance(data, ArrayData):
            name = name or data.name
            test = data.test() if test is None else test
            data = data.train()
        inputs, labels = self._read(data, "data")
        if not name:
            raise ValueError("`name` must be given for data without a name of its own.")
        classes, targets = labels.unique(return_inverse=True)  # [C], [N]
        if len(classes) < 2:
            raise ValueError(f"`data` must hold at least two classes, got {len(classes)}.")
        tested = None if test is None else self._read(test, "test")
        self._fit(inputs, targets)
        picked = self._pick(len(labels))
        means = self._fisher(pick(inputs, picked))
        error = math.nan
        if tested is not None:
            error = self._error(*tested, classes)
        return TaskEmbedding(
            name=name,
            vector=torch.cat(means),
            layers=tuple(self.weights),
            sizes=tuple(map(len, means)),
            network=self.fingerprint,
            labels=self.labels,
            samples=len(picked),
            num_classes=len(classes),
            test_error=error,
        )

    def _read(self, data: Data, argument: str) -> tuple[Any, Tensor]:
        """Return all inputs and labels, by the user's own function where there is one; the network takes the inputs."""
        reader = self.batch_fn and Reader(self.batch_fn, self.forward_fn)
        inputs, labels = read_labelled(data, argument=argument, model=self.network, reader=reader)
        first_answers(self.network, inputs, argument=argument, run=self._outputs)
        if labels.ndim != 1 or labels.is_floating_point():
            found = f"{labels.dtype} {list(labels.shape)}"
            raise ValueError(f"`{argument}` must have class indices as labels, [N], got {found}.")
        labels = labels.cpu().long()
        counted = labels != IGNORED
        negative = labels[counted & (labels < 0)]
        if len(negative):
            raise ValueError(
                f"`{argument}` must have classes from 0 on, or {IGNORED} for none, as labels, got {negative[0]}."
            )
        if not counted.any():
            raise ValueError(f"`{argument}` must hold a label that counts, got none.")
        if not counted.all():
            inputs, labels = pick((inputs, labels), counted)
        return inputs, labels

    def _outputs(self, inputs: Any) -> Tensor:
        """Run the network, on its own device."""
        inputs = moved(inputs, self.device)
        return outputs_of(self.network, inputs, self.forward_fn)

    def _features(self, inputs: Any) -> Tensor:
        """Return what the head gets as input, ``[N, D]``, in float64 on the CPU."""
        seen = []
        head = self.network.get_submodule(self.head)
        handle = head.register_forward_pre_hook(lambda _, args: seen.extend(args))
        with observing(self.network), torch.no_grad(), handle:
            for batch in split(inputs, BATCH):
                self._outputs(batch)
        n = sample_count(inputs)
        rows = [len(x) for x in seen if isinstance(x, Tensor) and x.ndim == 2]
        if len(rows) < len(seen) or sum(rows) != n:
            got = ", ".join(map(described, seen[:2]))
            raise ValueError(
                "`head` must run once a pass, on one tensor [N, D], and is the last nn.Linear where "
                f"not given; {self.head!r} got {got or 'nothing'}, … for {n} samples."
            )
        return torch.cat(seen).double().cpu()

    def _fit(self, inputs: Any, targets: Tensor) -> None:
        """Put a fitted head into the network, and see that its outputs are the network's, up to a constant."""
        features = self._features(inputs)
        fitted = ready.fit_linear_head(features, targets, weight_decay=self.weight_decay)
        like = next(self.network.parameters())
        head = fitted.to(like).eval().requires_grad_(False)
        self.network.set_submodule(self.head, head)
        some = pick(inputs, slice(8))
        try:
            with torch.no_grad():
                expected = head(features[:8].to(like)).softmax(-1)
                found = self._outputs(some).softmax(-1)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
        except (AssertionError, RuntimeError) as error:
            # They differ, or a layer behind the head wants another number of inputs.
            raise ValueError(
                f"`head` must be the last layer, whose outputs are the network's logits; {self.head!r} is not."
            ) from error

    def _pick(self, n: int) -> Tensor:
        """Return which samples go into the Fisher information."""
        order = torch.randperm(n, generator=Generator().manual_seed(self.seed))
        return order[: self.max_samples].sort().values

    def _fisher(self, inputs: Any) -> list[Tensor]:
        """Return the mean Fisher information of each weight's filters, float64 on the CPU."""
        diagonal = fisher_diagonal(
            self.network,
            moved(inputs, self.device),
            labels=self.labels,
            mc_samples=self.mc_samples,
            generator=Generator(self.device).manual_seed(self.seed),
            forward_fn=self.forward_fn,
            chunk_size=BATCH,
        )
        return [diagonal[name].double().flatten(1).mean(1).cpu() for name in self.weights]

    def _error(self, inputs: Any, labels: Tensor, classes: Tensor) -> float:
        """Share of wrong answers of the network with its fitted head; a class that was not fitted is always wrong."""
        with observing(self.network), torch.no_grad():
            batches = split(inputs, BATCH)
            answers = [self._outputs(batch).argmax(-1).cpu() for batch in batches]
        wrong = classes[torch.cat(answers)] != labels
        return wrong.double().mean().item()


def fingerprint(network: nn.Module, head: str) -> str:
    """Return a short hash of all parameters and buffers but those of the head, names included."""
    state = sorted(network.state_dict().items())
    return digest((name, x) for name, x in state if not name.startswith(f"{head}."))


def _weights(network: nn.Module, head: str) -> list[str]:
    """Return the names of all weights of two or more axes outside the head."""
    found = []
    for name, p in network.named_parameters():
        if p.ndim > 1 and p.is_floating_point() and not name.startswith(f"{head}."):
            found.append(name)
    if not found:
        raise ValueError(
            f"`network` must have a weight with filters beside its head {head!r}, got none."
        )
    return found
