"""BackPACK: per-sample gradients for comparison, and Kronecker factors of the Fisher."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn

from lightning_taskinfo._arguments import checked_arguments
from lightning_taskinfo._batches import sample_count, take
from lightning_taskinfo._observe import ParamDict, observing, trainable_parameters
from lightning_taskinfo.fisher.per_sample import Forward
from lightning_taskinfo.functional.likelihood import Categorical, Gaussian, Likelihood, as_likelihood


def backpack_gradients(
    model: nn.Module, forward: Forward, inputs: Any, score: Tensor, names: set[str]
) -> Iterator[tuple[int, ParamDict]]:
    """Yield the per-sample gradients ``[N, *shape]`` of the named parameters, by BackPACK's ``BatchGrad``.

    BackPACK's hooks stay on a module, so it works on a copy.

    Raises:
        ValueError: If BackPACK does not know a layer, or its gradients do not add up to the gradient of the batch.
    """
    backpack, extend, extensions = _backpack()
    extended = extend(copy.deepcopy(model))
    with _refusing("`engine='backpack'` cannot run this model; use `engine='auto'`"), backpack(extensions.BatchGrad()):
        (forward(extended, take(inputs, _with_gradient)) * score).sum().backward()
    gradients: dict[str, Any] = {
        name: getattr(p, "grad_batch", None) for name, p in extended.named_parameters() if name in names
    }
    for name, g in gradients.items():
        if g is None or not torch.allclose(g.sum(0), extended.get_parameter(name).grad, rtol=1e-3, atol=1e-5):
            raise ValueError(f"`engine='backpack'` does not cover {name}; use `engine='auto'`.")
    yield 0, gradients


@checked_arguments
def kronecker_factors(
    model: nn.Module,
    inputs: Any,
    *,
    labels: Literal["sampled", "exact"] = "sampled",
    likelihood: str | Likelihood = "categorical",
    mc_samples: int = 1,
    generator: Generator | None = None,
    chunk_size: int = 128,
    forward_fn: Forward | None = None,
) -> dict[str, tuple[Tensor, ...]]:
    r"""Kronecker factors of the Fisher information by parameter name, means over samples, by BackPACK.

    .. math:: F_W \approx B \otimes A, \qquad A = \frac1N \sum_n \sum_t a_{nt} a_{nt}^\top, \qquad
        B = \frac{1}{NT} \sum_n \sum_t \mathbb{E}_y\, b_{nt} b_{nt}^\top

    with a layer's inputs :math:`a_{nt}` and the score's gradients :math:`b_{nt}` by its outputs at the :math:`T` output
    positions of a convolution (KFC); a linear layer has one position. The block of a bias is exact, :math:`F_c =
    \frac1N \sum_n \mathbb{E}_y (\sum_t b_{nt})(\sum_t b_{nt})^\top`.

    Args:
        model: A network of layers that BackPACK knows (linear, convolution, activation and pooling layers), each of
            which hands its output on to the next one as it is; a copy of it is run.
        inputs: A batch of ``N`` inputs.
        labels: ``"sampled"`` from the model (KFAC) or ``"exact"`` (KFLR).
        likelihood: ``"categorical"`` or ``"gaussian"``.
        mc_samples: Number of labels drawn for each sample, for ``labels="sampled"``.
        generator: Source of the draws.
        chunk_size: Samples of one forward pass.
        forward_fn: How to get the outputs, ``forward_fn(model, inputs)``; ``model(inputs)`` by default.

    Returns:
        ``(B, A)`` for each weight, ``(B,)`` for each bias.

    Raises:
        ValueError: If BackPACK cannot serve the likelihood or a layer; by name.
        ModuleNotFoundError: If BackPACK is not installed.

    References:
        Martens, Grosse, *Optimizing neural networks with Kronecker-factored approximate curvature*, ICML 2015; Grosse,
        Martens, *A Kronecker-factored approximate Fisher matrix for convolution layers*, ICML 2016.
    """
    backpack, extend, extensions = _backpack()
    check_request(labels, likelihood)
    kind = as_likelihood(likelihood)
    loss_fn, scale = _loss(kind)
    check_layers(model)
    extension = _with_kfc(extensions.KFAC(mc_samples=mc_samples) if labels == "sampled" else extensions.KFLR())
    n, factors = sample_count(inputs), dict[str, list[Tensor]]()
    with observing(model):
        extended, loss = copy.deepcopy(model).eval(), extend(loss_fn)
        for layer in (module for module in extended.modules() if not list(module.children())):
            extend(layer)  # and no container, of which BackPACK would have to know the class
        called = _called_once(extended)
        if generator is not None:  # BackPACK draws from the global generator, which `observing` puts back
            torch.manual_seed(int(torch.randint(2**62, (), generator=generator, device=generator.device)))
        for start in range(0, n, chunk_size):
            chunk = take(inputs, itemgetter(slice(start, start + chunk_size)))
            called.clear()
            outputs = (forward_fn or nn.Module.__call__)(extended, take(chunk, _with_gradient))
            kind.check(outputs, None)
            targets = outputs.detach().argmax(-1) if isinstance(kind, Categorical) else outputs.detach()
            with _refusing("BackPACK has no Kronecker factors for this model"), backpack(extension):
                loss(outputs, targets).backward()
            _add_factors(factors, extended, extension.savefield, sample_count(chunk) / n, scale(outputs))
    return {name: tuple(factors[name]) for name in trainable_parameters(model)}


def check_request(labels: str, likelihood: str | Likelihood) -> None:
    """Raise an error if there are no such Kronecker factors, or BackPACK is not there to make them."""
    if labels not in ("sampled", "exact"):
        raise ValueError(f"`labels` must be 'sampled' or 'exact' for Kronecker factors, got {labels!r}.")
    _loss(as_likelihood(likelihood))
    _backpack()


def check_layers(model: nn.Module) -> None:
    """Raise a ``ValueError`` that names a trainable parameter of which there are no Kronecker factors."""
    owners: dict[int, str] = {}
    for layer, module in model.named_modules():
        for key, p in module.named_parameters(recurse=False):
            name = f"{layer}.{key}".lstrip(".")
            if p.requires_grad and not isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
                kind = type(module).__name__
                raise ValueError(f"Only linear and convolution layers have Kronecker factors, got {name!r} of {kind}.")
            if p.requires_grad and owners.setdefault(id(p), name) != name:
                raise ValueError(f"Kronecker factors need weights of one layer each, got {name!r} tied.")


def _called_once(model: nn.Module) -> set[str]:
    """Return where calls of layers are noted; a second one, whose factors would replace the first's, is an error."""
    called: set[str] = set()

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            if name in called:
                raise ValueError(f"Kronecker factors need layers that are called once, got a second call of {name!r}.")
            called.add(name)

        return hook

    for name, module in model.named_modules():
        if any(p.requires_grad for p in module.parameters(recurse=False)):
            module.register_forward_pre_hook(note(name))
    return called


def _add_factors(factors: dict[str, list[Tensor]], model: nn.Module, field: str, share: float, scale: float) -> None:
    for name, p in trainable_parameters(model).items():
        parts = getattr(p, field, None)
        if parts is None:
            raise ValueError(f"BackPACK has no Kronecker factors for {name}.")
        weighted = [share * (scale if i == 0 else 1.0) * part.detach() for i, part in enumerate(parts)]
        known = factors.get(name)
        factors[name] = weighted if known is None else [a + b for a, b in zip(known, weighted, strict=True)]


def _with_kfc(extension: Any) -> Any:
    """Let a BackPACK extension average the output gradients of a convolution over positions, as KFC does.

    BackPACK takes the block of the bias for this factor, in which positions are summed before they are squared.
    """
    from backpack.extensions.secondorder.hbp.convnd import HBPConvNd

    class KFC(HBPConvNd):
        def weight(self, ext: Any, module: nn.Module, g_inp: Any, g_out: Any, backproped: Tensor) -> list[Tensor]:
            _, A = super().weight(ext, module, g_inp, g_out, backproped)
            b = backproped.flatten(3)  # [scores, N, channels, positions]
            return [torch.einsum("snit,snjt->ij", b, b) / b.shape[3], A]

    for dims, kind in enumerate((nn.Conv1d, nn.Conv2d, nn.Conv3d), start=1):
        extension.set_module_extension(kind, KFC(dims), overwrite=True)
    return extension


def _loss(likelihood: Likelihood) -> tuple[nn.Module, Any]:
    """Return BackPACK's loss and what turns its mean's curvature into that of the negative log-likelihood."""
    if isinstance(likelihood, Categorical):
        return nn.CrossEntropyLoss(), lambda outputs: 1.0
    if isinstance(likelihood, Gaussian):  # the mean over N·C squares has curvature 2/C a sample
        return nn.MSELoss(), lambda outputs: outputs[0].numel() / (2 * likelihood.std**2)
    raise ValueError(f"`likelihood` must be categorical or gaussian for Kronecker factors, got {likelihood}.")


@contextmanager
def _refusing(message: str) -> Iterator[None]:
    try:
        yield
    except (AssertionError, AttributeError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"{message}: {error}") from error


def _with_gradient(x: Tensor) -> Tensor:
    """BackPACK's hooks warn about inputs without a gradient."""
    return x.detach().requires_grad_() if x.is_floating_point() else x


def _backpack() -> tuple[Any, Any, Any]:
    try:
        from backpack import backpack, extend, extensions
    except ImportError as error:
        raise ModuleNotFoundError("Install BackPACK for this: `pip install lightning-taskinfo[backpack]`.") from error
    return backpack, extend, extensions
