"""Small networks of the kinds that people fine-tune, from ``transformers`` and ``peft``."""

from collections.abc import Callable
from typing import Any, NamedTuple

import peft
import torch
import transformers
from torch import Tensor, nn

WORDS, WIDTH = 50, 16
TEXT = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**TEXT, "num_key_value_heads": 1}
IMAGE = {
    "image_size": 16,
    "patch_size": 8,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


class Case(NamedTuple):
    """How to make a network, its inputs and its outputs."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    forward: Callable[[nn.Module, Tensor], Tensor]
    dtype: torch.dtype = torch.float64


def words(n: int) -> Tensor:
    return torch.randint(3, WORDS, (n, 6))


def images(n: int, size: int = 16) -> Tensor:
    return torch.randn(n, 3, size, size)


def large_images(n: int) -> Tensor:
    return images(n, 32)


def sounds(n: int) -> Tensor:
    return torch.randn(n, 200)


def of_words(model: nn.Module, x: Tensor) -> Tensor:
    return model(input_ids=x).logits


def of_two_texts(model: nn.Module, x: Tensor) -> Tensor:
    return model(input_ids=x, decoder_input_ids=x.flip(1)).logits


def of_images(model: nn.Module, x: Tensor) -> Tensor:
    return model(pixel_values=x).logits


def of_sounds(model: nn.Module, x: Tensor) -> Tensor:
    return model(input_values=x).logits


def made(kind: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    """Return how to make a network of ``transformers``."""

    def make() -> nn.Module:
        configured = getattr(transformers, config)(**options)
        return getattr(transformers, kind)(configured)

    return make


def text(kind: str, config: str, **options: Any) -> Case:
    return Case(made(kind, config, **options), words, of_words)


def image(kind: str, config: str, **options: Any) -> Case:
    return Case(made(kind, config, num_labels=3, **options), images, of_images)


def classifier(name: str, **options: Any) -> Case:
    kind = f"{name}ForSequenceClassification"
    return text(kind, f"{name}Config", **{**TEXT, "num_labels": 3, **options})


def language_model(name: str, **options: Any) -> Case:
    return text(f"{name}ForCausalLM", f"{name}Config", **{**GROUPED, **options})


GPT2 = {"vocab_size": WORDS, "n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 32, **ENDS}
SEQ2SEQ = {"vocab_size": WORDS, "d_model": WIDTH}
CASES: dict[str, Case] = {
    "BERT": classifier("Bert"),
    "BERT, masked words": text("BertForMaskedLM", "BertConfig", **TEXT),
    "DistilBERT": text(
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        vocab_size=WORDS,
        dim=WIDTH,
        n_layers=2,
        n_heads=2,
        hidden_dim=24,
        num_labels=3,
    ),
    "DeBERTa": classifier(
        "DebertaV2",
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        max_relative_positions=8,
        position_buckets=4,
    ),
    "ALBERT": classifier("Albert", embedding_size=8),
    "ELECTRA": classifier("Electra", embedding_size=8),
    "RoBERTa": classifier("Roberta"),
    "ModernBERT": classifier("ModernBert", cls_token_id=1, sep_token_id=2),
    "GPT-2": text("GPT2LMHeadModel", "GPT2Config", **GPT2),
    "GPT-2, classifier": text("GPT2ForSequenceClassification", "GPT2Config", num_labels=3, **GPT2),
    "T5": Case(
        made(
            "T5ForConditionalGeneration",
            "T5Config",
            d_kv=8,
            d_ff=24,
            num_layers=2,
            num_heads=2,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=16,
            **SEQ2SEQ,
        ),
        words,
        of_two_texts,
    ),
    "BART": Case(
        made(
            "BartForConditionalGeneration",
            "BartConfig",
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            max_position_embeddings=32,
            **SEQ2SEQ,
        ),
        words,
        of_two_texts,
    ),
    "Gemma 3": text(
        "Gemma3ForCausalLM", "Gemma3TextConfig", head_dim=8, sliding_window=4, **GROUPED
    ),
    "Mixtral": language_model("Mixtral", num_local_experts=4, num_experts_per_tok=2)._replace(
        dtype=torch.float32
    ),
    "Mamba": text(
        "MambaForCausalLM",
        "MambaConfig",
        vocab_size=WORDS,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        state_size=4,
    ),
    "Llama": language_model("Llama"),
    "Qwen 3": language_model("Qwen3", head_dim=8),
    "OPT": text("OPTForCausalLM", "OPTConfig", ffn_dim=24, word_embed_proj_dim=WIDTH, **TEXT),
    "BLOOM": text(
        "BloomForCausalLM",
        "BloomConfig",
        vocab_size=WORDS,
        hidden_size=WIDTH,
        n_layer=2,
        n_head=2,
        **ENDS,
    ),
    "GPT-NeoX": text("GPTNeoXForCausalLM", "GPTNeoXConfig", **TEXT),
    "Phi-3": language_model("Phi3"),
    "ViT": image("ViTForImageClassification", "ViTConfig", **IMAGE),
    "DINOv2": image("Dinov2ForImageClassification", "Dinov2Config", **IMAGE),
    "Swin": image(
        "SwinForImageClassification",
        "SwinConfig",
        image_size=16,
        patch_size=2,
        embed_dim=8,
        depths=[2, 1],
        num_heads=[2, 2],
        window_size=4,
    ),
    "BEiT": image(
        "BeitForImageClassification", "BeitConfig", use_relative_position_bias=True, **IMAGE
    ),
    "ConvNeXt": image(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        hidden_sizes=[4, 8],
        depths=[1, 1],
        num_stages=2,
    ),
    "ResNet": image(
        "ResNetForImageClassification",
        "ResNetConfig",
        embedding_size=4,
        hidden_sizes=[8, 8],
        depths=[1, 1],
    )._replace(inputs=large_images),
    "MobileNetV2": image(
        "MobileNetV2ForImageClassification", "MobileNetV2Config", depth_multiplier=0.1
    )._replace(inputs=large_images),
    "SegFormer": image(
        "SegformerForImageClassification",
        "SegformerConfig",
        hidden_sizes=[4, 4, 8, 8],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=8,
    )._replace(inputs=large_images),
    "CLIP": image(
        "CLIPForImageClassification",
        "CLIPConfig",
        text_config=TEXT,
        vision_config=IMAGE,
        projection_dim=8,
    ),
    "wav2vec 2.0": Case(
        made(
            "Wav2Vec2ForSequenceClassification",
            "Wav2Vec2Config",
            vocab_size=8,
            hidden_size=WIDTH,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=24,
            conv_dim=(8, 8),
            conv_stride=(5, 4),
            conv_kernel=(10, 4),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            classifier_proj_size=8,
            num_labels=3,
        ),
        sounds,
        of_sounds,
    ),
}


def adapted(base: str, config: peft.PeftConfig) -> Case:
    """Return a network with adapters, trained a little: new ones have zeros that hide the gradients of others."""

    def make() -> nn.Module:
        model = peft.get_peft_model(CASES[base].make(), config)
        for name, p in model.named_parameters():
            if p.requires_grad and ("lora_B" in name or "ia3" in name):
                nn.init.normal_(p, 1.0, 0.1)
        return model

    return CASES[base]._replace(make=make)


CASES |= {
    "LoRA on GPT-2": adapted(
        "GPT-2", peft.LoraConfig(r=2, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    ),
    "LoRA on BERT": adapted("BERT", peft.LoraConfig(r=2, target_modules=["query", "value"])),
    "LoRA on Llama": adapted("Llama", peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"])),
    "DoRA": adapted(
        "Llama", peft.LoraConfig(r=2, use_dora=True, target_modules=["q_proj", "down_proj"])
    ),
    "IA3": adapted(
        "Llama",
        peft.IA3Config(target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    ),
    "prompt tuning": adapted(
        "Llama", peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    ),
    "prefix tuning": adapted(
        "Llama", peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    ),
}
