"""Parameters are put together by the layer that owns them, or that an adapter of peft adapts."""

import pytest
import torch

from lightning_taskinfo._observe import layer_of
from lightning_taskinfo.callbacks import FisherTrace, InformationInWeights
from tests.callbacks.hugging_face import Module, bert_classifier, loader, lora
from tests.callbacks.runs import fit


@pytest.mark.parametrize(
    ("parameter", "layer"),
    [
        ("weight", ""),
        ("net.0.bias", "net.0"),
        ("query.lora_embedding_A.default", "query"),
        ("query.lora_magnitude_vector.default.weight", "query"),
        ("a.base_model.model.classifier.modules_to_save.default.weight", "a.classifier"),
        ("base_model.model.query.base_layer.weight", "query.base_layer"),
        ("query.lora_A.other.weight", "query:other"),
    ],
)
def test_names(parameter, layer):
    assert layer_of(parameter) == layer


def peft_models():
    import peft

    return {
        "LoRA": peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query"], r=2),
        "DoRA": peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query"], r=2, use_dora=True),
        "AdaLoRA": peft.AdaLoraConfig(task_type="SEQ_CLS", target_modules=["query"], total_step=10),
        "IA3": peft.IA3Config(
            task_type="SEQ_CLS", target_modules=["query"], feedforward_modules=[]
        ),
        "LoHa": peft.LoHaConfig(task_type="SEQ_CLS", target_modules=["query"], r=2),
        "LoKr": peft.LoKrConfig(task_type="SEQ_CLS", target_modules=["query"], r=2),
        "OFT": peft.OFTConfig(task_type="SEQ_CLS", target_modules=["query"], oft_block_size=4, r=0),
        "VeRA": peft.VeraConfig(task_type="SEQ_CLS", target_modules=["query"], r=2),
    }


@pytest.mark.parametrize("kind", peft_models())
def test_all_parts_of_an_adapter_are_one_value(kind):
    import peft

    model = peft.get_peft_model(bert_classifier(), peft_models()[kind])
    layers = {layer_of(name) for name, p in model.named_parameters() if p.requires_grad}
    queries = {f"bert.encoder.layer.{i}.attention.self.query" for i in range(2)}
    assert layers == {*queries, "classifier"}


@pytest.mark.parametrize(
    "group_fn", [None, lambda name: name.rpartition(".")[0].split("lora_")[-1][:1]]
)
def test_adapters_have_values_of_their_own(tmp_path, group_fn):
    torch.manual_seed(0)
    trace, information = (
        FisherTrace(every_n_steps=4, group_fn=group_fn),
        InformationInWeights(group_fn=group_fn),
    )
    fit(tmp_path, trace, information, model=Module(lora()), loader=loader("LoRA"), max_epochs=1)
    for callback, key in ((trace, "fisher_trace"), (information, "information_nats")):
        row = callback.history[-1]
        layers = {
            name.removeprefix(f"{key}/"): value
            for name, value in row.items()
            if name.startswith(f"{key}/")
        }
        if group_fn is None:
            adapted = [
                f"bert.encoder.layer.{i}.attention.self.{part}"
                for i in range(2)
                for part in ("query", "value")
            ]
            assert layers.keys() == {f"model.{name}" for name in (*adapted, "classifier")}
        else:
            assert layers.keys() == {"A", "B", "m"}
        assert sum(layers.values()) == pytest.approx(row[key], rel=1e-4)
