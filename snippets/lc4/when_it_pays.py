# python snippets/lc4/when_it_pays.py

from xtrain.plan import (
    ACCELERATORS,
    LINKS,
    ModelShape,
    layer_calls,
    layer_flops,
    layer_seconds,
    tokens_where_equal,
)

shape, tokens = ModelShape.preset("llama-3-8b"), 4096
rate, link = ACCELERATORS["h100"].matmul, LINKS["nvlink4"]
flops = layer_flops(shape, 1, tokens)

for ranks in (2, 4, 8):
    calls = layer_calls(shape, 1, tokens, ranks)
    computing, sending = layer_seconds(
        calls, flops, ranks, rate, 3.4e-6, link.bandwidth
    )
    speed = flops / rate / (computing + sending)
    print(
        f"{ranks} ranks: compute {1e6 * computing:5.0f} us, "
        f"send {1e6 * sending:4.0f} us, {speed:.1f} times as fast as one"
    )

equal = tokens_where_equal(shape)
print(f"ZeRO stage 3 sends less from {equal:.0f} tokens in the group")
