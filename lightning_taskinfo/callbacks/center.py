"""The weights from which information is measured: those that are trained, as they were before."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_taskinfo._files import read_checkpoint
from lightning_taskinfo._observe import ParamDict, trainable_parameters
from lightning_taskinfo._ranges import check_finite_tensors
from lightning_taskinfo._warn import warn

Start = str | Mapping[str, Tensor]
NAMED = 5  # parameters that a message names


class Center:
    """Keeps each weight as it was when it first became trainable, and nothing of those that never do.

    A frozen base of billions of weights costs neither memory nor a place in checkpoints.

    Args:
        who: The callback, for messages.
        start: ``"initial"``; ``"zero"``, which keeps nothing; or a state dict, or the path of a
            checkpoint, whose weights are taken where it has them.

    Attributes:
        kept: The weights by name.
    """

    def __init__(self, who: str, start: Start = "initial") -> None:
        self.who = who
        self.start = start
        self.kept: ParamDict = {}
        self._frozen: list[nn.Parameter] = []

    def begin(self, model: nn.Module) -> bool:
        """Keep what is trainable now and not kept yet; return whether anything was kept before.

        What was kept in an earlier fit, or came from a checkpoint, stays, unless it has another
        shape.

        Raises:
            ValueError: If a checkpoint of the user's cannot be read, or has no weight of the model.
        """
        shapes = {name: p.shape for name, p in model.named_parameters()}
        for name in [*self.kept]:
            if shapes.get(name) != self.kept[name].shape:
                del self.kept[name]
        known = bool(self.kept)
        self._keep(model)
        return known

    def before_a_step(self, model: nn.Module) -> None:
        """Keep what has become trainable, before an optimizer moves it."""
        if any(p.requires_grad for p in self._frozen):  # the same objects: this runs at every step
            self._keep(model)

    def _keep(self, model: nn.Module) -> None:
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        new = {}
        for name, p in trainable_parameters(model).items():
            if name not in self.kept:
                new[name] = p.detach()
        if self.start == "zero" or not new:
            return
        stored = {} if self.start == "initial" else self._stored(new)
        for name, w in new.items():
            if name in stored:
                self.kept[name] = stored[name]
            else:
                self.kept[name] = w.clone()

    def _stored(self, weights: ParamDict) -> ParamDict:
        """Return the checkpoint's weights; those that it does not have, e.g. of a new head, count from the start."""
        stored = self.start
        if isinstance(stored, str):
            stored = read_checkpoint("prior_center", stored).state
            of_model = {name: stored[name] for name in weights if name in stored}
            check_finite_tensors("prior_center", of_model)
        found = {}
        for name, w in weights.items():
            if name in stored and stored[name].shape == w.shape:
                found[name] = stored[name].to(w, copy=True)
        if not found and not self.kept:
            raise ValueError(
                f"`prior_center` must hold trainable weights of the module, got none of {_some(weights)}; it has "
                f"{_some(stored)}. Give a state dict with the names of `module.state_dict()`."
            )
        if left := [name for name in weights if name not in found]:
            warn(
                f"{self.who} did not find {_some(left)} in `prior_center` and measures them from the start of their "
                "training; a state dict with the names of `module.state_dict()` would hold them."
            )
        return found

    def displacement(self, model: nn.Module) -> ParamDict:
        """Return how far each trainable weight is from the centre, in float32 or better."""
        self.before_a_step(model)
        moved = {}
        for name, p in trainable_parameters(model).items():
            dtype = torch.promote_types(p.dtype, torch.float32)
            w = p.detach().to(dtype)
            if self.start == "zero":
                moved[name] = w.clone()
            else:
                moved[name] = w - self.kept[name].to(w.device)
        return moved


def checked_center(start: str | os.PathLike[str] | Mapping[str, Tensor]) -> Start:
    """Return ``prior_center`` as :class:`Center` takes it: a checkpoint's dict as its weights, and paths as text.

    Raises:
        ValueError: If it is a word or path that is not known, or holds numbers that are not finite.
    """
    if isinstance(start, Mapping):
        nested: Any = start.get("state_dict", start)
        check_finite_tensors("prior_center", nested)
        return dict(nested)
    start = os.fspath(start)
    if start not in ("initial", "zero") and not Path(start).is_file():
        raise ValueError(
            "`prior_center` must be 'initial', 'zero', a state dict or the path of a checkpoint, "
            f"got {start!r}."
        )
    return start


def _some(names: Iterable[str]) -> str:
    """Return the first names, and how many more there are."""
    every = [*names]
    more = f" and {len(every) - NAMED} more" if len(every) > NAMED else ""
    return ", ".join(every[:NAMED]) + more
