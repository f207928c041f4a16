"""What goes past Accelerate, Lightning and transformers is handed to them."""

import pytest
from tests.fixes.sources import spans

ACCELERATE = """
from accelerate import Accelerator

def fit(args, net, opt, loader):
    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=args.every)
    net, opt, loader = accelerator.prepare(net, opt, loader)
    for x, y in loader:
        with accelerator.accumulate(net):
            loss = F.mse_loss(net(x), y)
            BACKWARD
            CLIP
            opt.step()
            opt.zero_grad()
"""


def accelerate(backward, clip):
    return ACCELERATE.replace("BACKWARD", backward).replace("CLIP", clip)


def test_accelerate_clips_what_it_has_unscaled(tmp_path):
    clip = "torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # here"
    after = spans(tmp_path, "clip-before-unscale", accelerate("accelerator.backward(loss)", clip))["clip-in-framework"]
    assert "            accelerator.clip_grad_norm_(net.parameters(), 1.0)  # here\n" in after


@pytest.mark.parametrize(
    ("backward", "new"),
    [
        ("(loss / args.every).backward()  # here", "accelerator.backward(loss)  # here"),  # it divides by itself
        ("(loss / 4).backward()  # here", "accelerator.backward(loss / 4)  # here"),
        ("loss.backward(retain_graph=True)  # here", "accelerator.backward(loss, retain_graph=True)  # here"),
    ],
)
def test_accelerate_scales_the_loss_of_a_backward_pass(tmp_path, backward, new):
    after = spans(tmp_path, "scaler-misuse", accelerate(backward, "pass"))["backward-in-framework"]
    assert f"            {new}\n" in after


def test_a_pass_that_goes_through_accelerate_stays(tmp_path):
    text = accelerate("accelerator.backward(loss)  # here", "accelerator.clip_grad_norm_(net.parameters(), 1.0)")
    found = spans(tmp_path, "scaler-misuse", text)
    assert "backward-in-framework" not in found
    text = text.replace("  # here", "").replace("1.0)", "1.0)  # here")
    assert "clip-in-framework" not in spans(tmp_path, "clip-before-unscale", text)


LIGHTNING = """
import lightning as L

class Net(L.LightningModule):
    def training_step(self, batch, index):
        opt = self.optimizers()
        loss = self(batch).mean()
        loss.backward()
        opt.step()

    def on_after_backward(self):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
"""


def test_lightning_makes_the_backward_pass_by_hand(tmp_path):
    text = LIGHTNING.replace("loss.backward()", "loss.backward()  # here")
    after = spans(tmp_path, "scaler-misuse", text)["backward-in-framework"]
    assert "        self.manual_backward(loss)  # here\n" in after
    plain = text.replace("L.LightningModule", "torch.nn.Module")
    assert "backward-in-framework" not in spans(tmp_path, "scaler-misuse", plain)


def test_lightning_clips_in_the_hook_behind_its_unscaling(tmp_path):
    text = LIGHTNING.replace("1.0)", "1.0)  # here")
    after = spans(tmp_path, "clip-before-unscale", text)["clip-in-framework"]
    assert "    def on_before_optimizer_step(self, optimizer):\n        torch.nn.utils.clip_grad_norm_(" in after
    taken = text + "\n    def on_before_optimizer_step(self, optimizer):\n        pass\n"
    assert "clip-in-framework" not in spans(tmp_path, "clip-before-unscale", taken)


TRAINER = """
from transformers import Trainer, TrainingArguments

def main(args, data, net):
    if args.half:
        net = net.half()
    settings = TrainingArguments(
        output_dir="out",
        max_steps=10,
    )
    trainer = Trainer(model=net, args=settings, train_dataset=data)
    result = trainer.train()  # here
"""


def test_the_trainer_computes_in_16_bits_and_the_weights_stay(tmp_path):
    after = spans(tmp_path, "optimizer-state-underflow", TRAINER)["trainer-precision"]
    assert "        net = net.float()\n" in after
    assert "        max_steps=10,\n        fp16=args.half,\n    )\n" in after


def test_a_trainer_that_is_told_fp16_needs_weights_in_fp32_alone(tmp_path):
    text = TRAINER.replace("max_steps=10", "fp16=args.half")
    found = spans(tmp_path, "fp16-params-with-scaler", text)
    assert "trainer-precision" not in found
    assert "        net = net.float()\n" in found["fp32-weights"]
    other = TRAINER.replace("max_steps=10", "bf16=True")
    assert "fp32-weights" not in spans(tmp_path, "fp16-params-with-scaler", other)  # FP16 would be gone
