"""Tiny Hugging Face models in LightningModules, as the documentation of both writes them."""

from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

TOKENS, LENGTH, VOCABULARY, CLASSES = 8, 6, 20, 3


def bert_classifier() -> nn.Module:
    from transformers import BertForSequenceClassification

    return BertForSequenceClassification(_bert(num_labels=CLASSES))


def token_classifier() -> nn.Module:
    from transformers import BertForTokenClassification

    return BertForTokenClassification(_bert(num_labels=CLASSES))


def masked_model() -> nn.Module:
    from transformers import BertForMaskedLM

    return BertForMaskedLM(_bert())


def _bert(**arguments: Any) -> Any:
    from transformers import BertConfig

    return BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=16,
        **arguments,
    )


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=8, n_layer=2, n_head=2, n_positions=16)
    )


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    return LlamaForCausalLM(config)


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2)
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config)


def bart() -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=VOCABULARY,
        d_model=8,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=12,
        decoder_ffn_dim=12,
        max_position_embeddings=16,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=2,
    )
    return BartForConditionalGeneration(config)


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        image_size=8,
        patch_size=4,
        num_labels=CLASSES,
    )
    return ViTForImageClassification(config)


def lora() -> nn.Module:
    from peft import LoraConfig, TaskType, get_peft_model

    config = LoraConfig(task_type=TaskType.SEQ_CLS, r=2, target_modules=["query", "value"])
    return get_peft_model(bert_classifier(), config)


def lora_gpt2() -> nn.Module:
    from peft import LoraConfig, TaskType, get_peft_model

    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM, r=2, target_modules=["c_attn"], fan_in_fan_out=True
    )
    return get_peft_model(gpt2(), config)


def lora_llama() -> nn.Module:
    from peft import LoraConfig, TaskType, get_peft_model

    config = LoraConfig(task_type=TaskType.CAUSAL_LM, r=2, target_modules=["q_proj", "v_proj"])
    return get_peft_model(llama(), config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "BERT classifier": bert_classifier,
    "token classifier": token_classifier,
    "masked": masked_model,
    "GPT-2": gpt2,
    "Llama": llama,
    "T5": t5,
    "BART": bart,
    "ViT": vit,
    "LoRA": lora,
    "LoRA GPT-2": lora_gpt2,
    "LoRA Llama": lora_llama,
}


class Sentences(Dataset[dict[str, Tensor]]):
    """Samples of the task of a model, as its collator makes them: padded, with masks, and -100 where nothing counts."""

    def __init__(self, name: str, n: int = 16) -> None:
        generator = torch.Generator().manual_seed(0)
        self.n = n
        ids = torch.randint(3, VOCABULARY, (n, LENGTH), generator=generator)
        lengths = torch.randint(3, LENGTH + 1, (n, 1), generator=generator)
        kept = torch.arange(LENGTH) < lengths
        self.fields = {"input_ids": ids * kept, "attention_mask": kept.long()}
        if name == "ViT":
            self.fields = {"pixel_values": torch.randn(n, 3, 8, 8, generator=generator)}
        if name in ("BERT classifier", "LoRA", "ViT"):
            labels = torch.randint(CLASSES, (n,), generator=generator)
        elif name == "token classifier":
            labels = torch.randint(CLASSES, (n, LENGTH), generator=generator).masked_fill(
                ~kept, -100
            )
        elif name == "masked":
            masked = torch.rand(n, LENGTH, generator=generator) < 0.5
            masked[:, 0] = True
            labels = ids.masked_fill(~(kept & masked), -100)
            self.fields["input_ids"] = self.fields["input_ids"].masked_fill(masked, 1)
        elif name in ("T5", "BART"):
            labels = torch.randint(3, VOCABULARY, (n, LENGTH - 1), generator=generator)
            labels[:, -1] = -100
        elif (
            name == "LoRA Llama"
        ):  # a question and its answer, of which only the answer has a label
            labels = ids.masked_fill(torch.arange(LENGTH) != lengths - 1, -100)
        else:
            labels = ids.masked_fill(~kept, -100)
        self.fields["labels"] = labels

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[index] for name, values in self.fields.items()}


class Module(pl.LightningModule):
    """As the examples of Lightning and of transformers have it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(**batch)[0]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def loader(name: str, n: int = 16, batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(Sentences(name, n), batch_size=batch_size)
