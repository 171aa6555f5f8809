"""What a batch is, in one place: its inputs, its targets, and how a model is called on them.

Everything that looks at batches reads them here: callbacks, certificates, metrics, task embeddings
and transfer. ::

    reader = Reader(batch_fn, forward_fn)  # both `None` unless the user has given them
    inputs, targets = reader.read(model, batch)  # raises a ValueError that says what to do
    outputs = reader.outputs(model, inputs)  # a tensor [N, ..., C], one row for each sample

``inputs`` is a tensor, or tuples, lists and dicts of tensors, samples along the first axis:
:func:`take`, :func:`first_samples`, :func:`joined`, :func:`sample_count` and :func:`tensors` work
on all of them. ``targets`` stand where the outputs predict them: the labels of a causal language
model are shifted as its own loss does it, and padding is -100. Engines of ``fisher`` and the
likelihoods take both as they are; hand ``reader.outputs`` to them as ``forward_fn``, or leave it
out: :func:`outputs_of` is the default.

How the model is called is found out with the first batch, by calling it on two samples inside
``observing``, and remembered as long as the model lives.
"""

from lightning_taskinfo._batches.calls import NoLogitsError
from lightning_taskinfo._batches.reading import (
    BatchFn,
    Forward,
    Reader,
    call_on,
    is_labeled,
    labeled_key,
    labeled_part,
    outputs_of,
    read_batch,
    read_by,
    with_targets,
)
from lightning_taskinfo._batches.structure import (
    IGNORED,
    described,
    filled_up,
    first_samples,
    joined,
    joined_targets,
    moved,
    sample_count,
    size,
    split,
    take,
    tensors,
)

__all__ = [
    "IGNORED",
    "BatchFn",
    "Forward",
    "NoLogitsError",
    "Reader",
    "call_on",
    "described",
    "filled_up",
    "first_samples",
    "is_labeled",
    "joined",
    "joined_targets",
    "labeled_key",
    "labeled_part",
    "moved",
    "outputs_of",
    "read_batch",
    "read_by",
    "sample_count",
    "size",
    "split",
    "take",
    "tensors",
    "with_targets",
]
