# python snippets/model/tiny.py
import torch

from xtrain.model import XtrainConfig, XtrainModel

config = XtrainConfig(
    vocab_size=16,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
model = XtrainModel(config)
built = sum(parameter.numel() for parameter in model.parameters())
print(f"{built} parameters, as planned: {built == config.parameters}")

# 0 1 2 4 8 3 6 12 11 9 5 10 7 1 2 4 ...: each token follows from the one before
text = [0] + [pow(2, power, 13) for power in range(32)]
tokens, labels = torch.tensor([text[:-1]]), torch.tensor([text[1:]])

optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
for step in range(31):
    loss = model.loss(tokens, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step:2}: loss {loss.item():.1f}")
print("what follows 8?", model(torch.tensor([[1, 2, 4, 8]]))[0, -1].argmax().item())

nothing = torch.full_like(labels, -100)
print(f"without any label: loss {model.loss(tokens, nothing).item()}")

other = XtrainModel(config, device="meta")  # shapes, and no memory
other.to_empty(device="cpu").reset_parameters()
first = XtrainModel(config).layers[1].mlp.up_proj.weight
again = other.layers[1].mlp.up_proj.weight
print("the same weights from the meta device:", torch.equal(first, again))
