r"""Embeddings of tasks by their Fisher information, compared in closed form.

The embedding of a task is the diagonal of the Fisher information of a fixed network, averaged
over the weights of each filter: how much each filter matters to the task [Achille2019]_. All
entries are non-negative; how their sizes compare from filter to filter is what tells tasks apart.

.. [Achille2019] Achille, Lam, Tewari, Ravichandran, Maji, Fowlkes, Soatto, Perona, *Task2Vec: Task Embedding for
   Meta-Learning*, ICCV 2019, arXiv:1902.03545.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad


def embedding_distance(
    a: Tensor,
    b: Tensor,
) -> Tensor:
    r"""Symmetric distance between task embeddings, from 0 to 1.

    .. math:: d(a, b) = 1 - \cos\Big( \frac{F_a}{F_a + F_b},\; \frac{F_b}{F_a + F_b} \Big)

    Dividing filter by filter lets each count alike, however large its Fisher information is. A task
    differs by 0 from itself times any factor, and a factor common to both changes nothing; a factor
    on one of two different embeddings does. Filters without information in both tasks do not count.
    Computed as half the squared distance of the two unit vectors, which is exactly 0 at equality
    and loses nothing to cancellation near it.

    Args:
        a: Non-negative embeddings, shape ``[..., D]``.
        b: Others, broadcastable with ``a``.

    Returns:
        The distances, shape ``[...]``; NaN where an embedding is zero everywhere and has no
        direction.

    Example:
        >>> a, b = torch.tensor([1.0, 0.0]), torch.tensor([[3.0, 0.0], [0.0, 1.0]])
        >>> embedding_distance(a, b)
        tensor([0., 1.])

    References:
        Achille et al., *Task2Vec*, ICCV 2019, section 3.1.
    """
    a, b = torch.broadcast_tensors(a, b)
    total = (a + b).clamp(min=torch.finfo(a.dtype).tiny)
    u, v = (part / total for part in (a, b))  # [..., D]
    u = u / u.norm(dim=-1, keepdim=True)
    v = v / v.norm(dim=-1, keepdim=True)
    return 0.5 * (u - v).square().sum(-1)


def classical_scaling(distances: Tensor) -> tuple[Tensor, Tensor]:
    r"""Points of a plane whose distances come near given ones: classical multidimensional scaling.

    .. math:: B = -\tfrac12 J D^{\circ 2} J = V \Lambda V^\top, \qquad X = V_2 \Lambda_2^{1/2}, \qquad J = I - \tfrac1K

    Exact where the distances are those of points in a plane. The first axis has the larger spread.

    Args:
        distances: Symmetric, with zeros on the diagonal, shape ``[K, K]``.

    Returns:
        Coordinates, shape ``[K, 2]``, and the part of the distances' spread that they show: kept over
        all absolute eigenvalues, from 0 to 1.

    Raises:
        ValueError: If ``distances`` is not a symmetric matrix.

    Example:
        >>> points, share = classical_scaling(torch.tensor([[0.0, 2.0], [2.0, 0.0]]).double())
        >>> points.abs().round(decimals=6), share.round(decimals=6)
        (tensor([[1., 0.],
                [1., 0.]], dtype=torch.float64), tensor(1., dtype=torch.float64))

    References:
        Torgerson, *Multidimensional scaling: I. Theory and method*, Psychometrika 1952.
    """
    if distances.ndim != 2 or not torch.equal(distances, distances.T):
        raise ValueError(
            f"`distances` must be a symmetric matrix, got the shape {list(distances.shape)}."
        )
    K = len(distances)
    J = distances.new_ones(K).diag() - 1 / K
    centred = -0.5 * J @ distances.square() @ J
    values, vectors = torch.linalg.eigh(centred)  # in rising order
    spread = values.abs().sum()
    kept = values.clamp(min=0)
    axes = (vectors * kept.sqrt()).flip(1)
    points = pad(axes, (0, 2))[:, :2]  # a single task has one axis only
    share = torch.where(spread > 0, kept[-2:].sum() / spread, 1.0)
    return points, share
