"""Networks that people fine-tune: the time and memory of their Fisher information beside a plain step.

A part of ``fisher.py``, which runs each network in processes of its own. Needs ``transformers`` and ``peft``. What
counts is the ratio of a measurement to a plain step of the same batch right before it. A diagonal needs one copy of the
trainable weights beside what a plain step needs (whose gradients are such a copy), a trace none.
"""

import ctypes
import gc
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from measure import WRONG, reason, resident_bytes, seconds, tensor_bytes
from peers import opacus_ghost
from torch import Tensor, nn

from lightning_taskinfo.fisher import fisher_diagonal, fisher_trace


class Case(NamedTuple):
    """A network, a batch of inputs, and what it was to take at most: trace and diagonal over a plain step."""

    make: Callable[[], tuple[nn.Module, Tensor]]
    trace: float
    diagonal: float | None = None


def words(model: nn.Module, samples: int, tokens: int) -> tuple[nn.Module, Tensor]:
    """Return a model with a batch of random tokens."""
    return model, torch.randint(5, model.config.vocab_size, (samples, tokens))


def bert() -> tuple[nn.Module, Tensor]:
    from transformers import BertConfig, BertForSequenceClassification

    return words(BertForSequenceClassification(BertConfig(num_labels=3)), 8, 128)


def gpt2() -> tuple[nn.Module, Tensor]:
    from transformers import GPT2Config, GPT2LMHeadModel

    return words(GPT2LMHeadModel(GPT2Config()), 4, 128)


def llama() -> tuple[nn.Module, Tensor]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=768,
        num_hidden_layers=8,
        num_attention_heads=12,
        intermediate_size=2048,
        max_position_embeddings=512,
    )
    return words(LlamaForCausalLM(config), 4, 128)


def vit() -> tuple[nn.Module, Tensor]:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(num_labels=10)), torch.randn(8, 3, 224, 224)


def lora() -> tuple[nn.Module, Tensor]:
    from peft import LoraConfig, get_peft_model

    base, x = gpt2()
    model = get_peft_model(base, LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True))
    for name, p in model.named_parameters():
        if "lora_B" in name:  # zero at first, which hides the gradients of the other matrix
            nn.init.normal_(p, std=0.02)
    return model, x


CASES = {
    "ViT-B/16, 8 images": Case(vit, 1.10, 1.35),
    "BERT-base, 8×128 tokens": Case(bert, 1.25, 1.6),
    "GPT-2 small, 4×128 tokens": Case(gpt2, 1.4, 2.0),
    "Llama-like, 4×128 tokens": Case(llama, 1.2, 1.6),
    "LoRA on GPT-2 small, 4×128 tokens": Case(lora, 1.15),
}
OPACUS = "Opacus, ghost norms"


def forward(model: nn.Module, x: Tensor) -> Tensor:
    """Return the logits."""
    return model(x).logits


class Logits(nn.Module):
    """A network whose forward pass returns logits, rows of classes last, and nothing random."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0

    def forward(self, x: Tensor) -> Tensor:
        logits = forward(self.model, x)
        return logits.movedim(-1, 1)  # as cross_entropy wants it


def made(name: str, samples: int | None = None) -> dict[str, Callable[[], Any]]:
    """Return what can be called for a network: a plain step, the trace, the diagonal, and the trace by Opacus."""
    torch.manual_seed(0)
    model, x = CASES[name].make()
    x = x[:samples]
    model.eval()
    with torch.no_grad():
        outputs = forward(model, x)
    y = torch.randint(outputs.shape[-1], outputs.shape[:-1])

    def plain() -> None:
        logits = forward(model, x).flatten(0, -2)
        nn.functional.cross_entropy(logits, y.flatten(), reduction="sum").backward()
        model.zero_grad()

    ghost: list[Callable[[], Tensor]] = []

    def opacus() -> Tensor:
        if not ghost:
            ghost.append(opacus_ghost(Logits(deepcopy(model)), x, y))
        return ghost[0]()

    options = {"labels": "empirical", "forward_fn": forward}
    return {
        "plain": plain,
        "trace": lambda: fisher_trace(model, x, y, **options),
        "diagonal": lambda: fisher_diagonal(model, x, y, **options),
        OPACUS: opacus,
    }


def ratios(name: str, rounds: int) -> list[dict[str, Any]]:
    """Time each quantity in turn with a plain step, and return the ratios; the first call is told apart."""
    calls = made(name)
    plain = calls.pop("plain")
    plain()
    rows = []
    for quantity, call in calls.items():
        row = {"network": name, "quantity": quantity, "goal": getattr(CASES[name], quantity, None)}
        rows.append(row)
        try:
            first = seconds(call)
            if quantity == OPACUS:
                row["error"] = abs(float(call()) / float(calls["trace"]()) - 1)
        except Exception as error:  # whatever a peer raises: it does not serve this network
            row["refused"] = reason(error)
            continue
        if row.get("error", 0.0) > WRONG:
            continue
        times = [(seconds(plain), seconds(call)) for _ in range(rounds)]
        found = sorted(ours / step for step, ours in times)
        step = median(step for step, _ in times)
        row |= {"ratio": median(found), "low": found[0], "high": found[-1]}
        row |= {"first": first / step, "plain_seconds": step, "rounds": rounds}
    return rows


def peak(name: str, quantity: str) -> dict[str, float]:
    """Return what a call adds to memory at its peak, and the size of the trainable weights, in MB (Linux).

    Tensors are counted as torch allocates and frees them; the resident memory has besides what the
    allocator does not give back. The first call, which looks for the samples, is told apart, and the
    second looks for them once more; run this in a child of its own.
    """
    call = made(name)[quantity]
    first = tensor_bytes(call)
    call()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or the call takes what the one before has left
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = resident_bytes()
    call()
    status = Path("/proc/self/status").read_text()
    grown = 1024 * int(status.partition("VmHWM:")[2].split()[0]) - before
    weights = sum(p.nbytes for p in CASES[name].make()[0].parameters() if p.requires_grad)
    return {
        "first_mb": first / 1e6,
        "peak_mb": tensor_bytes(call) / 1e6,
        "resident_mb": grown / 1e6,
        "weights_mb": weights / 1e6,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results as a table in Markdown."""
    lines = [
        "# Networks that people fine-tune",
        "",
        "Time over a plain forward and backward pass of the same batch, median (lowest to highest); that of the first "
        "call, which finds out where the samples are; how much one call raises the peak of memory: of tensors, those "
        "of the first call, and of the resident memory, in which freed blocks are left over.",
        "",
        "| Network | Quantity | Ratio | Goal | First call | Tensors, MB | First, MB | Resident, MB | Weights, MB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        told = row.get("refused") or ""
        if "ratio" in row:
            told = f"{row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f})"
        elif "error" in row:
            told = f"wrong by {row['error']:.0%}"
        goal = "" if row.get("goal") is None else f"{row['goal']:.2f}"
        first = f"{row['first']:.2f}" if "first" in row else ""
        keys = ("peak_mb", "first_mb", "resident_mb", "weights_mb")
        memory = [f"{row[key]:.0f}" if key in row else "" for key in keys]
        cells = (row["network"], row["quantity"], told, goal, first, *memory)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
