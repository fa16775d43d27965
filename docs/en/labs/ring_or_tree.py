# %% [markdown]
# # Lab: ring or tree?
#
# Both sum a tensor over all ranks. A ring sends few bytes in many messages, a tree many
# bytes in few messages. So the size decides, and this lab computes where, then counts
# the messages of real runs. Everything below ran when this page was built. Download the
# file with the button at the end and change it.

# %%
from xtrain.plan import collective_cost

for ranks in (4, 8, 64):
    for name in ("ring_all_reduce", "tree_all_reduce"):
        cost = collective_cost(name, ranks)
        print(
            f"{ranks:3} ranks, {name}: {cost.messages:3} messages one after another, "
            f"{float(cost.volume):5.2f} times the tensor's bytes"
        )

# %% [markdown]
# The time is a straight line in the size: messages times alpha, the time of an empty
# message, plus bytes times beta, the time of a byte. Two lines cross once.

# %%
from xtrain.plan import Link, collective_time, crossover

alpha = 5e-6
beta = Link.preset("infiniband-ndr").beta
for ranks in (4, 8, 16, 64, 256):
    size = crossover("ring_all_reduce", "tree_all_reduce", ranks, alpha, beta)
    print(f"{ranks:3} ranks: the tree is faster below {size / 1e6:7.2f} MB")

# %% [markdown]
# More ranks make the ring longer, one message each, but the tree only one step deeper
# when they double. So the size below which the tree wins grows with the ranks.
#
# ## The two lines

# %%
ranks = 64
print(f"{ranks} ranks     ring        tree     faster")
for power in range(3, 10):
    size = 10**power
    ring = collective_time("ring_all_reduce", size, ranks, alpha, beta)
    tree = collective_time("tree_all_reduce", size, ranks, alpha, beta)
    name = "ring" if ring < tree else "tree"
    print(f"1e{power} bytes {ring * 1e6:9.0f} us {tree * 1e6:9.0f} us  {name}")

# %% [markdown]
# ## Counted in real runs
#
# The formulas say how many messages follow one another and how many bytes a rank sends.
# Four processes, real messages, and the functions of this package: the ledger counts
# what each rank sends.

# %%
import torch

from xtrain.comm import ring_all_reduce, tree_all_reduce
from xtrain.comm.ledger import CommLedger
from xtrain.testing import World


def on_each_rank(name: str) -> tuple[int, int]:
    function = {"ring": ring_all_reduce, "tree": tree_all_reduce}[name]
    tensor = torch.ones(1000)
    with CommLedger() as ledger:
        function(tensor)
    assert bool((tensor == 4).all())
    return ledger.messages, ledger.bytes_sent


with World(4) as world:
    for name in ("ring", "tree"):
        counted = world.run(on_each_rank, name)
        print(name, "messages, bytes sent by rank:", *counted)
        if name == "ring":
            cost = collective_cost("ring_all_reduce", 4)
            assert counted == [(cost.messages, 4000 * cost.volume)] * 4

# %% [markdown]
# In the ring all ranks send alike. In the tree some send the tensor once and others
# twice: no rank sends many messages, but they follow one another, and each of them is the
# whole tensor.
#
# ## Try it
#
# - Set alpha to 50 microseconds, as between processes of a slow host. Where do the lines
#   cross now?
# - Compare with `halving_doubling_all_reduce`: few messages and few bytes. What does it
#   ask of the number of ranks?
# - Use `hierarchical_time` for eight GPUs a node with NVLink between them. From which
#   size on is it worth its three steps?
