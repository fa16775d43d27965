# torchrun --nproc-per-node 4 snippets/lc8/all_together.py --mesh data=2,tensor=2,zero=3
import argparse
import os

import torch
import torch.distributed as dist

from xtrain.model import XtrainConfig
from xtrain.plan import Layout
from xtrain.train import accumulate, clip_grad_norm, load, save, wrapped_model

parser = argparse.ArgumentParser()
parser.add_argument("--mesh", default="", help="axes and sizes: data=2,tensor=2,zero=3")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--folder", help="of checkpoints; goes on from the newest")

ROWS, LENGTH, VOCABULARY = 8, 24, 64
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}


def layout_of(mesh: str) -> Layout:
    """Sizes as words: "pipeline=2,micro_batches=4,schedule=zb_v,chunks=2"."""
    pairs = [pair.split("=") for pair in mesh.split(",") if pair]
    return Layout(**{k: int(v) if v.isdigit() else v for k, v in pairs})


def batch(step: int, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's rows of the batch of a step, the same for any layout."""
    here = torch.get_default_device()
    first = torch.arange(ROWS, device=here)[:, None] * 7 + step * 11
    stride = 1 + (torch.arange(ROWS, device=here)[:, None] + step) % 3
    rows = (first + stride * torch.arange(LENGTH + 1, device=here)) % VOCABULARY
    return rows[:, :-1].chunk(ranks)[rank], rows[:, 1:].chunk(ranks)[rank]


def train(mesh: str, steps: int, folder: str | None = None) -> list[float]:
    """The loss of each step."""
    layout = layout_of(mesh)
    shape = SHAPE | (EXPERTS if layout.expert > 1 else {})
    config = XtrainConfig(**shape)
    model = wrapped_model(config, layout, dtype=torch.float64)
    optimizer = model.optimizer(torch.optim.AdamW, lr=0.01)
    first, losses = 0, []
    if folder and os.path.exists(f"{folder}/latest"):
        first, _ = load(folder, model, optimizer)
    for step in range(first, steps):
        tokens, labels = batch(step, model.data_group.rank(), layout.data)
        count = layout.micro_batches
        loss = accumulate(model, tokens, labels, micro_batches=count)
        norm = clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss:.9f}  norm {norm:.9f}")
    if folder:
        save(folder, steps, model, optimizer)
    return losses


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    options = parser.parse_args()
    train(options.mesh, options.steps, options.folder)
    dist.destroy_process_group()
