"""The other packages, each as its own documentation uses it; imported only when it is built.

The shape of the dicts is that of ``contenders``.
"""

from collections.abc import Callable
from copy import deepcopy

import torch.nn.functional as F
from contenders import CLASSES, LOOP, Builder, Call, by_gradients, ours, over_classes, vmapped
from torch import Tensor, nn


def backpack_builder(extension: str, attribute: str, *, scale: bool = True) -> Builder:
    """A quantity that one of BackPACK's extensions leaves at every parameter."""

    def build(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], dict[str, Tensor]]:
        from backpack import backpack, extend, extensions

        # Only the second-order extensions follow residual adds and reshapes, through a converter.
        foreign = any(not type(m).__module__.startswith("torch.nn") for m in model.modules())
        model = extend(
            deepcopy(model), use_converter=foreign and extension == "DiagGGNExact"
        ).eval()
        loss = extend(nn.CrossEntropyLoss(reduction="sum"))

        def call() -> dict[str, Tensor]:
            model.zero_grad()
            with backpack(getattr(extensions, extension)()):
                loss(model(x), y).backward()
            found = {}
            for name, p in model.named_parameters():
                found[name] = getattr(p, attribute) / (len(x) if scale else 1)
                delattr(p, attribute)
            return found

        return call

    return build


def summed(build: Builder) -> Builder:
    """The trace: everything that ``build`` returns, added up."""

    def trace(model: nn.Module, x: Tensor, y: Tensor) -> Call:
        call = build(model, x, y)
        return lambda: sum(part.sum() for part in call().values())

    return trace


BACKPACK: dict[str, Builder] = {
    "trace": summed(backpack_builder("BatchL2Grad", "batch_l2")),
    "diagonal": backpack_builder("SumGradSquared", "sum_grad_squared"),
    "exact": backpack_builder("DiagGGNExact", "diag_ggn_exact"),
    "gram": by_gradients(backpack_builder("BatchGrad", "grad_batch", scale=False))["gram"],
}


def nngeometry_builder(quantity: str) -> Builder:
    """Nngeometry's hooks; the dataset's labels through a function that returns their log-probability."""

    def build(model: nn.Module, x: Tensor, y: Tensor) -> Call:
        from nngeometry.backend import TorchHooksJacobianBackend
        from nngeometry.layercollection import LayerCollection
        from nngeometry.metrics import FIM
        from nngeometry.object import FMatDense, PMatDiag

        model = deepcopy(model)  # a call that fails leaves its hooks behind
        layers = LayerCollection.from_model(model)
        named = [*layers.named_parameters(layers.get_layerid_module_maps(model)[0])]

        def log_probability(inputs: Tensor, targets: Tensor) -> Tensor:
            return model(inputs).log_softmax(-1).gather(1, targets[:, None])

        def fixed() -> TorchHooksJacobianBackend:
            return TorchHooksJacobianBackend(model, log_probability, layer_collection=layers)

        def by_name(flat: Tensor) -> dict[str, Tensor]:
            parts = flat.split([p.numel() for _, p in named])
            return {name: part.view_as(p) for (name, p), part in zip(named, parts, strict=True)}

        calls: dict[str, Call] = {
            "trace": lambda: fixed().implicit_trace((x, y)),
            "diagonal": lambda: by_name(PMatDiag(fixed(), examples=(x, y)).get_diag()),
            "exact": lambda: by_name(
                FIM(model, (x, y), PMatDiag, layer_collection=layers).get_diag()
            ),
            "gram": lambda: FMatDense(fixed(), examples=(x, y)).data[0, :, 0],
        }
        return calls[quantity]

    return build


def opacus_gradients(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], dict[str, Tensor]]:
    """Opacus' GradSampleModule. It sees modules in train mode only, so a BatchNorm in eval mode is passed over."""
    from opacus.grad_sample import GradSampleModule

    wrapped = GradSampleModule(opacus_ready(model), loss_reduction="sum", strict=False)

    def call() -> dict[str, Tensor]:
        wrapped.zero_grad(set_to_none=True)
        F.cross_entropy(wrapped(x), y, reduction="sum").backward()
        return {
            name.removeprefix("_module."): p.grad_sample for name, p in wrapped.named_parameters()
        }

    return call


def opacus_ghost(model: nn.Module, x: Tensor, y: Tensor) -> Call:
    """Opacus' ghost norms, which never form a sample's gradient where a layer has a shorter way."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(
        opacus_ready(model), loss_reduction="sum", strict=False
    )

    def call() -> Tensor:
        wrapped.zero_grad(set_to_none=True)
        F.cross_entropy(wrapped(x), y, reduction="sum").backward()
        return wrapped.get_norm_sample().square().mean()

    return call


def opacus_ready(model: nn.Module) -> nn.Module:
    """Return a copy in train mode, which is what Opacus looks at; BatchNorm mixes the samples there."""
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        raise NotImplementedError("needs train mode, where BatchNorm mixes the samples")
    return deepcopy(model).train()


def laplace_builder(interface: str) -> Builder:
    """laplace-torch, with the backend it takes by default."""

    def build(model: nn.Module, x: Tensor, y: Tensor) -> Call:
        from laplace import curvature

        model = deepcopy(model)
        model.output_size = CLASSES
        backend = getattr(curvature, interface)(model, "classification")
        named = [*model.named_parameters()]

        def call() -> dict[str, Tensor]:
            parts = backend.diag(x, y)[1].split([p.numel() for _, p in named])
            return {
                name: part.view_as(p) / len(x) for (name, p), part in zip(named, parts, strict=True)
            }

        return call

    return build


def asdl_diagonal(fisher_type: str) -> Builder:
    """ASDL's diagonal Fisher; what it leaves at no module is missing."""

    def build(model: nn.Module, x: Tensor, y: Tensor) -> Call:
        from asdl.fisher import FisherConfig, get_fisher_maker
        from asdl.grad_maker import LOSS_CROSS_ENTROPY
        from asdl.matrices import SHAPE_DIAG

        model = deepcopy(model)
        config = FisherConfig(
            fisher_type, [SHAPE_DIAG], loss_type=LOSS_CROSS_ENTROPY, data_size=len(x)
        )

        def call() -> dict[str, Tensor]:
            maker = get_fisher_maker(model, config)
            outputs = maker.setup_model_call(model, x)
            if fisher_type == "fisher_emp":
                maker.setup_loss_call(nn.CrossEntropyLoss(reduction="sum"), outputs, y)
            maker.forward_and_backward()
            found = {}
            for prefix, module in model.named_modules():
                diagonal = getattr(getattr(module, "fisher", None), "diag", None)
                for name, _ in module.named_parameters(recurse=False):
                    if getattr(diagonal, name, None) is not None:
                        found[f"{prefix}.{name}".lstrip(".")] = getattr(diagonal, name)
            return found

        return call

    return build


CONTENDERS: dict[str, dict[str, Builder]] = {
    "auto": ours(),
    "one by one": ours(chunk_size=1),
    "torch.func": by_gradients(vmapped) | {"exact": over_classes(vmapped)},
    "BackPACK": BACKPACK,
    "nngeometry": {
        quantity: nngeometry_builder(quantity)
        for quantity in ("trace", "diagonal", "exact", "gram")
    },
    "Opacus": by_gradients(opacus_gradients) | {"trace": opacus_ghost},
    "laplace-torch": {
        "trace": summed(laplace_builder("CurvlinopsEF")),
        "diagonal": laplace_builder("CurvlinopsEF"),
        "exact": laplace_builder("CurvlinopsGGN"),
    },
    "ASDL": {
        "trace": summed(asdl_diagonal("fisher_emp")),
        "diagonal": asdl_diagonal("fisher_emp"),
        "exact": asdl_diagonal("fisher_exact"),
    },
    "batch-of-one loop": LOOP,
}
