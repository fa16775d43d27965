# python snippets/lc8/dry_run.py
from xtrain.model import XtrainConfig
from xtrain.plan import Layout
from xtrain.train.dry_run import dry_run
from xtrain.train.recipe import Recipe
from xtrain.train.recipe_parts import Data

LLAMA_8B = XtrainConfig(
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128_256,
)


def llama_8b() -> Recipe:
    layout = Layout(
        pipeline=2,
        data=8,
        tensor=4,
        sequence_parallel=True,
        zero=1,
        micro_batches=2,
        recompute="selective",
    )
    data = Data(sequence=4096)
    return Recipe(dtype="bfloat16", model=LLAMA_8B, layout=layout, data=data)


if __name__ == "__main__":
    print(dry_run(llama_8b(), ranks=64), end="")
