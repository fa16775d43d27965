import torch.distributed as dist


def all_to_all_single(
    output, input, output_split_sizes=None, input_split_sizes=None, group=None
):
    me, n = dist.get_rank(group), dist.get_world_size(group)
    if input_split_sizes is None:
        input_split_sizes = [input.shape[0] // n] * n
    if output_split_sizes is None:
        output_split_sizes = [output.shape[0] // n] * n
    outs, ins = output.split(output_split_sizes), input.split(input_split_sizes)
    outs[me].copy_(ins[me])
    for shift in range(1, n):
        dst, src = (me + shift) % n, (me - shift) % n
        request = dist.isend(ins[dst], group_dst=dst, group=group)
        dist.recv(outs[src], group_src=src, group=group)
        request.wait()
