# python snippets/lc6/overlap.py
from xtrain.plan import ACCELERATORS, LINKS, ModelShape, hiding_tokens

shape = ModelShape.preset("llama-3-70b")
shared = shape.num_attention_heads // shape.num_key_value_heads
flops = ACCELERATORS["h100"].flops

for link in ("nvlink4", "infiniband-ndr"):
    for backward in (False, True):
        tokens = hiding_tokens(
            flops,
            LINKS[link].bandwidth,
            queries_per_key=shared,
            causal=True,
            backward=backward,
        )
        name = "backward" if backward else "forward"
        print(f"H100 over {link}, {name}: {tokens:.0f} tokens a rank or more")
