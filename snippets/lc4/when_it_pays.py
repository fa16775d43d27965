# python snippets/lc4/when_it_pays.py

from xtrain import plan

shape, tokens = plan.ModelShape.preset("llama-3-8b"), 4096
rate, link = plan.ACCELERATORS["h100"].matmul, plan.LINKS["nvlink4"]
flops = plan.layer_flops(shape, 1, tokens)

for ranks in (2, 4, 8):
    calls = plan.layer_calls(shape, 1, tokens, ranks)
    computing, sending = plan.layer_seconds(
        calls, flops, ranks, rate, 3.4e-6, link.bandwidth
    )
    speed = flops / rate / (computing + sending)
    print(
        f"{ranks} ranks: compute {1e6 * computing:5.0f} us, "
        f"send {1e6 * sending:4.0f} us, {speed:.1f} times as fast as one"
    )

equal = plan.tokens_where_equal(shape)
print(f"ZeRO stage 3 sends less from {equal:.0f} tokens in the group")
