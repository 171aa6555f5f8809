"""A watched training is the unwatched one: the whole checkpoint and every random state, bit for bit."""

import warnings

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_taskinfo.callbacks import HardSamples
from tests.callbacks.runs import PROBES, Classifier, Noisy, fit, random_states, same

MEASURED_AT_START = True


def outcome(folder, *callbacks, **arguments):
    """Return the checkpoint after fit, without the callbacks' own entries, modes, gradients and random states."""
    trainer = fit(folder, *callbacks, **arguments)
    states, model = random_states(), trainer.lightning_module
    modes, gradients = [m.training for m in model.modules()], [p.grad for p in model.parameters()]
    trainer.save_checkpoint(folder / "end.ckpt")
    checkpoint = torch.load(folder / "end.ckpt", weights_only=False)
    checkpoint.pop("callbacks", None)
    assert not model.net[5].training, "the frozen batch norm"
    assert model.net[5].num_batches_tracked == 0
    assert model.net[1].num_batches_tracked > 0
    assert len(checkpoint["lr_schedulers"]) == 1
    return checkpoint, modes, gradients, states


def every_step(data):
    if data == "samples":
        return [HardSamples(every_n_steps=1, max_samples=n, name=f"{n}") for n in (3, 8)]
    return [probe(every_n_steps=1, data=data, max_samples=12) for probe in PROBES.values()]


def noisy_loader(workers=0):
    return DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=workers)


VARIANTS = {
    "plain": {},
    "accumulation and clipping": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    "bf16": {"precision": "bf16-mixed"},
}


@pytest.mark.parametrize("data", ["train_batch", "train", "samples"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_checkpoint_and_random_states(tmp_path, variant, data):
    alone = outcome(tmp_path, loader=noisy_loader(), **VARIANTS[variant])
    probes = every_step(data)
    watched = outcome(tmp_path, *probes, loader=noisy_loader(), **VARIANTS[variant])
    same(alone, watched)
    assert all(gradient is not None for gradient in alone[2])
    start = data != "samples"
    assert all(len(probe.history) == watched[0]["global_step"] + start for probe in probes)


@pytest.mark.parametrize("first", [True, False])
def test_a_probe_of_the_training_step_beside_the_others_in_any_order(tmp_path, first):
    def step():
        return HardSamples(every_n_steps=1, name="step")

    alone, by_itself, beside = outcome(tmp_path), step(), step()
    outcome(tmp_path, by_itself)
    others = [
        *every_step("train_batch"),
        *(probe(every_n_steps=1, name="fixed", data="train") for probe in PROBES.values()),
    ]
    same(alone, outcome(tmp_path, *([beside, *others] if first else [*others, beside])))
    assert beside.history == by_itself.history
    assert len(beside.history) == 8
    assert all(len(probe.history) == 9 for probe in others)


def test_with_workers_and_validation(tmp_path):
    class Validated(Classifier):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.training_step(batch, batch_idx))

    def run(*probes):
        loaders = {"loader": noisy_loader(workers=1), "val": noisy_loader(workers=1)}
        return outcome(tmp_path, *probes, model=Validated(), max_epochs=1, **loaders)

    torch.manual_seed(0)
    alone = run()
    torch.manual_seed(0)
    same(
        alone,
        run(
            *every_step("train"),
            *every_step("samples"),
            *(p(every_n_steps=1, data="val", name="v") for p in PROBES.values()),
        ),
    )


def test_a_compiled_module(tmp_path):
    def run(*probes):
        torch.manual_seed(0)
        torch._dynamo.reset()
        return outcome(
            tmp_path, *probes, model=torch.compile(Classifier(), backend="eager"), max_epochs=1
        )

    alone, probes = run(), every_step("train_batch")
    same(alone, run(*probes))
    assert all(len(probe.history) == 5 for probe in probes)


class Failing(RuntimeError):
    pass


@pytest.mark.parametrize("probe", PROBES)
def test_a_failing_measurement(tmp_path, probe):
    class Broken(PROBES[probe]):
        def observe(self, model, samples):
            observed = super().observe(model, samples)
            self.calls += 1
            if self.calls == 3:
                return observed
            model.train()
            model(torch.rand(3, 4)).sum().backward()
            raise Failing("no")

    broken = Broken(every_n_steps=1, data="train_batch")
    broken.calls = 0
    alone = outcome(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watched = outcome(tmp_path, broken)
    same(alone, watched)
    about = [str(w.message) for w in caught if "could not measure" in str(w.message)]
    assert len(about) == 1
    assert (
        f"{broken.state_key} could not measure at step 0 (Failing: no); training goes on"
        in about[0]
    )
    assert [row["step"] for row in broken.history] == [2]
