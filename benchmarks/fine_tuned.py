"""Time the Fisher information of networks that people fine-tune, beside a plain forward and backward pass.

Usage::

    python benchmarks/fine_tuned.py --rounds 5

Needs ``transformers`` and ``peft``. Each network runs in a process of its own. What counts is the ratio of a
measurement to a plain step of the same batch right before it. The first measurement of a network, which has to find
out where its samples are, is told apart.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from environment import environment
from measure import in_child, seconds
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


def forward(model: nn.Module, x: Tensor) -> Tensor:
    """Return the logits."""
    return model(x).logits


def ratios(name: str, rounds: int) -> list[dict[str, Any]]:
    """Time a plain step and both quantities in turn, and return the ratios; the first call is told apart."""
    torch.manual_seed(0)
    case = CASES[name]
    model, x = case.make()
    model.eval()
    with torch.no_grad():
        outputs = forward(model, x)
    y = torch.randint(outputs.shape[-1], outputs.shape[:-1])

    def plain() -> None:
        model.zero_grad()
        logits = forward(model, x).flatten(0, -2)
        nn.functional.cross_entropy(logits, y.flatten(), reduction="sum").backward()

    options = {"labels": "empirical", "forward_fn": forward}
    calls = {"trace": lambda: fisher_trace(model, x, y, **options)}
    if case.diagonal is not None:
        calls["diagonal"] = lambda: fisher_diagonal(model, x, y, **options)
    plain()
    rows = []
    for quantity, call in calls.items():
        first = seconds(call)
        times = [(seconds(plain), seconds(call)) for _ in range(rounds)]
        found = sorted(ours / step for step, ours in times)
        rows.append(
            {
                "network": name,
                "quantity": quantity,
                "ratio": median(found),
                "low": found[0],
                "high": found[-1],
                "goal": getattr(case, quantity),
                "first": first / median(step for step, _ in times),
                "plain_seconds": median(step for step, _ in times),
                "rounds": rounds,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results" / "fine_tuned.json"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results: dict[str, Any] = {"environment": environment(), "threads": args.threads, "speed": []}
    if args.output.exists():
        results["speed"] = json.loads(args.output.read_text())["speed"]
    for name in args.networks:
        kept = [row for row in results["speed"] if row["network"] != name]
        rows = in_child(ratios, name, args.rounds)
        results["speed"] = kept + rows
        for row in rows:
            print(
                f"{name}, {row['quantity']}: {row['ratio']:.2f} (first {row['first']:.2f}), goal {row['goal']}"
            )
        args.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
