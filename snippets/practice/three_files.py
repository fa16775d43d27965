# python snippets/practice/three_files.py

"""Three files of a ring all-reduce, and what the checker tells their writers."""

from xtrain.practice import check, drill

ring = drill("ring_all_reduce")
STARTS = "for work in dist.batch_isend_irecv(calls):\n        work.wait()"

for title, old, new in (
    (
        "adds to the chunk that it has just sent",
        "chunks[(rank - 2 - step) % size]",
        "chunks[(rank - 1 - step) % size]",
    ),
    (
        "sends first on every rank",
        STARTS,
        "dist.send(outgoing, group=group, group_dst=right)\n"
        "    dist.recv(incoming, group=group, group_src=left)",
    ),
    (
        "calls what it should write",
        "chunks = tensor",
        "return dist.all_reduce(tensor, group=group)\n    chunks = tensor",
    ),
):
    verdict = check(ring, ring.solution.replace(old, new), real=False)
    print(f"--- {title}: {'right' if verdict.right else 'wrong'}")
    print(verdict.words, end="\n\n")
