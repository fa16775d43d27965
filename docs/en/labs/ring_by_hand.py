# %% [markdown]
# # Lab: a ring by hand
#
# This lab plays a ring all-reduce with four ranks in one process: a rank is a row of a
# table, and a message is an assignment. Use it to see every step of the ring; it takes
# seconds on a CPU.
#
# Everything below ran when this page was built. Download the file with the button at the
# end and change it.

# %%
import torch

ranks = 4
# Element c of rank r is 10**r: a sum shows at a glance which ranks are in it.
table = torch.stack([torch.full((ranks,), 10**r) for r in range(ranks)])
print(table)

# %% [markdown]
# ## Reduce-scatter
#
# In each step every rank sends one cell to its right neighbour, which adds it to its
# own cell. All ranks send at the same time, so each step reads the table as it was
# before.


# %%
def reduce_scatter_step(table: torch.Tensor, step: int) -> torch.Tensor:
    """The table after one step: cell (rank - 1 - step) of each rank moves right."""
    after = table.clone()
    for rank in range(ranks):
        right, cell = (rank + 1) % ranks, (rank - 1 - step) % ranks
        after[right, cell] += table[rank, cell]
    return after


for step in range(ranks - 1):
    table = reduce_scatter_step(table, step)
    print(f"after step {step + 1}\n{table}\n")

# %% [markdown]
# The diagonal now holds the whole sum: rank r has finished cell r. The other cells are
# partial sums, which are not needed any more.

# %%
assert torch.equal(table.diagonal(), torch.full((ranks,), 1111))
print(table.diagonal())

# %% [markdown]
# ## All-gather
#
# The finished cells go around the ring in the same way. What arrives replaces what was
# there.


# %%
def all_gather_step(table: torch.Tensor, step: int) -> torch.Tensor:
    """The table after one step: cell (rank - step) of each rank moves right."""
    after = table.clone()
    for rank in range(ranks):
        right, cell = (rank + 1) % ranks, (rank - step) % ranks
        after[right, cell] = table[rank, cell]
    return after


for step in range(ranks - 1):
    table = all_gather_step(table, step)
print(table)
assert bool((table == 1111).all())

# %% [markdown]
# ## The same on real ranks
#
# Now there are four processes, real messages, and the function of this package. The
# ledger counts what each rank sent.

# %%
from xtrain.comm.ledger import CommLedger
from xtrain.comm.ring import ring_all_reduce
from xtrain.testing import World


def on_each_rank() -> tuple[list[int], int, int]:
    tensor = torch.full((ranks,), 10 ** torch.distributed.get_rank())
    with CommLedger() as ledger:
        ring_all_reduce(tensor)
    return tensor.tolist(), ledger.messages, ledger.bytes_sent


with World(ranks) as world:
    for rank, (result, messages, sent) in enumerate(world.run(on_each_rank)):
        print(f"rank {rank}: {result}  {messages} messages, {sent} bytes sent")

# %% [markdown]
# ## Try it
#
# - Let the reduce-scatter start at `(rank - step)`. Which rank owns which cell now, and
#   what does the all-gather have to change?
# - Leave out the `clone()`. Which cells are counted twice?
# - Use five ranks and a tensor of four cells. What does an empty cell do to the ring?
