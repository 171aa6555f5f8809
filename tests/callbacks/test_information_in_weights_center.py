"""Of weights that are never trained nothing is kept; the others count from when they first became trainable."""

import pytest
import torch
from torch import nn

from lightning_taskinfo import TaskInfoWarning
from lightning_taskinfo.callbacks import FisherTrace, InformationInWeights
from lightning_taskinfo.callbacks.pac_bayes_certificate import PACBayesCertificate
from tests.callbacks.hugging_face import Module, loader, lora
from tests.callbacks.runs import Classifier, fit, seed_everything


class Thawing(Classifier):
    """Its first layer is unfrozen in the middle of the training, in the training step itself."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.net[0].requires_grad_(False)
        self.started = {name: p.detach().clone() for name, p in self.named_parameters()}

    def training_step(self, batch, batch_idx):
        if self.global_step == 3:
            self.net[0].requires_grad_(True)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_weight_counts_from_when_it_became_trainable(tmp_path):
    callback = InformationInWeights(every_n_steps=1)
    model = Thawing()
    fit(tmp_path, callback, model=model)
    kept = callback.state_dict()["prior_center"]
    assert kept.keys() == model.started.keys()
    for name, start in model.started.items():
        assert torch.equal(kept[name], start), name


def test_frozen_weights_are_neither_copied_nor_stored(tmp_path):
    class Fixed(Thawing):
        def training_step(self, batch, batch_idx):
            return Classifier.training_step(self, batch, batch_idx)

    callback = InformationInWeights()
    fit(tmp_path, callback, model=Fixed())
    kept = callback.state_dict()["prior_center"]
    assert kept
    assert not any(name.startswith("net.0.") for name in kept)


def test_a_checkpoint_with_adapters_is_at_most_twice_as_large(tmp_path):
    def size(*callbacks):
        seed_everything()
        trainer = fit(tmp_path, *callbacks, model=Adapters(lora()), loader=loader("LoRA"))
        trainer.save_checkpoint(tmp_path / "some.ckpt")
        return (tmp_path / "some.ckpt").stat().st_size

    class Adapters(Module):
        def on_save_checkpoint(self, checkpoint):
            trained = {name for name, p in self.named_parameters() if p.requires_grad}
            checkpoint["state_dict"] = {
                n: w for n, w in checkpoint["state_dict"].items() if n in trained
            }

    certificate = PACBayesCertificate(
        prior_origin="pretrained on other texts", draws=20, betas=(1.0,)
    )
    alone = size()
    assert size(FisherTrace(every_n_steps=4), InformationInWeights()) <= 2 * alone
    assert size(certificate) <= 2 * alone


def test_at_most_five_names_of_many():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    none = InformationInWeights(prior_center={"else": torch.zeros(1)})
    with pytest.raises(
        ValueError,
        match=r"`prior_center` .*0\.weight, 0\.bias, .*2\.weight and 3 more; it has else",
    ) as refused:
        none.begin(model)
    assert "3.bias" not in str(refused.value)
    half = {"0.weight": torch.zeros(2, 2)}
    with pytest.warns(TaskInfoWarning, match=r"`prior_center`") as caught:
        InformationInWeights(prior_center=half).begin(model)
    assert "and 2 more" in str(caught[0].message)


@pytest.mark.parametrize("junk", [b"junk", b"", None, [torch.zeros(2)], {"a": 1}], ids=str)
def test_a_file_that_is_no_checkpoint_is_named_and_nothing_unsafe_recommended(tmp_path, junk):
    path = tmp_path / "weights.pt"
    path.write_bytes(junk) if isinstance(junk, bytes) else torch.save(junk, path)
    with pytest.raises(ValueError, match=r"`prior_center` must be .*weights\.pt") as refused:
        fit(tmp_path, InformationInWeights(prior_center=path))
    assert "weights_only" not in str(refused.value)
    assert "\n" not in str(refused.value)
