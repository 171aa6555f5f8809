"""What can be proved about a text classifier whose adapters were fine-tuned? A tiny BERT with LoRA, made-up sentences.

The frozen base costs nothing: only the adapters and the fresh head have a prior, centred where fine-tuning began.
Three proofs stand beside each other: the PAC-Bayes bound for the stochastic network, the bound for the network itself
by disagreement on sentences without labels, and the test-set bound on held-out labels. Needs transformers and peft;
nothing is downloaded. Run it with ``python examples/certified_adapters.py``.
"""

# %%
import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from lightning_taskinfo.certificates import Certificate, Prior, certify

WORDS, LENGTH = 200, 12
Batch = dict[str, Tensor]


# %% Sentences of random words; a sentence is positive if it has more words of the upper half than of the lower one
def sentences(n: int, seed: int) -> Batch:
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, WORDS, (n, LENGTH), generator=g)
    labels = ((tokens > WORDS // 2).float().mean(1) > 0.5).long()
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


# %% A tiny BERT whose base is frozen; adapters and the head are trained
def network() -> nn.Module:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    base = BertForSequenceClassification(BertConfig(vocab_size=WORDS, **sizes))
    adapters = LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["classifier"])
    return get_peft_model(base, adapters)


def train(model: nn.Module, data: Batch, epochs: int) -> nn.Module:
    g = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    model.train()
    for _ in range(epochs):
        for index in torch.randperm(len(data["labels"]), generator=g).split(32):
            optimizer.zero_grad()
            model(**{name: values[index] for name, values in data.items()}).loss.backward()
            optimizer.step()
    return model


# %% The three proofs, as a picture
def draw(certificate: Certificate, path: Path) -> None:
    assert certificate.network is not None
    bounds = {
        "stochastic network": certificate.bound,
        "network itself": certificate.network.bound,
        "held-out labels": certificate.test_set.bound or 1.0,
    }
    figure, axes = plt.subplots(figsize=(6, 2.5), layout="constrained")
    axes.barh(list(bounds), list(bounds.values()))
    axes.axvline(0.5, color="grey", linestyle="--")
    axes.set_xlabel("true error at most (dashed: chance)")
    axes.set_xlim(0, 1)
    figure.savefig(path, dpi=150)


# %% All of it
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--fast", action="store_true", help="fewer sentences and draws, to see that it runs"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/certified_adapters"), help="where the figure goes"
    )
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    n, draws, epochs = (200, 20, 1) if arguments.fast else (4_000, 500, 5)

    data = sentences(n, seed=0)
    model = network()
    prior = Prior.of(model, origin="random base, adapters and head")  # before fine-tuning
    train(model, data, epochs)
    unlabelled = {
        name: values for name, values in sentences(2 * n, seed=1).items() if name != "labels"
    }
    certificate = certify(
        model,
        data,
        prior,
        unlabelled=unlabelled,
        held_out=sentences(n // 4, seed=2),
        draws=draws,
        betas=(0.1, 1.0, 10.0),
    )
    print(certificate)
    figure = arguments.folder / "certified_adapters.png"
    draw(certificate, figure)
    print(f"\nPicture: {figure}")


if __name__ == "__main__":
    main()
