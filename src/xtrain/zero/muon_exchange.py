"""One all-to-all of boxes: every rank sends its routes' boxes, end to end.

    input     | boxes for rank 0 | boxes for rank 1 | ...      as the routes are listed
    output    | boxes of rank 0  | boxes of rank 1  | ...      in the same order there

Each rank sends the elements of its routes to others, in one message to each of them.
"""

from collections.abc import Callable, Iterator

from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.agreement import is_alone, place_in
from xtrain.comm.collective_choice import Collectives
from xtrain.zero.muon_routes import Route


def exchange(
    routes: list[Route],
    read: Callable[[Route], Tensor],
    like: Tensor,
    collectives: Collectives,
    group: ProcessGroup | None,
) -> Iterator[tuple[Route, Tensor]]:
    """Send what `read` gives for this rank's routes; what arrived here, as boxes.

    All ranks have their routes in one order, so no message says what is in it. `like`
    has the dtype and the device of the messages.
    """
    rank, size = place_in(group)
    sent = sorted((r for r in routes if r.source == rank), key=lambda r: r.target)
    arriving = sorted((r for r in routes if r.target == rank), key=lambda r: r.source)
    send, receive = [0] * size, [0] * size
    for route in sent:
        send[route.target] += route.box.numel
    for route in arriving:
        receive[route.source] += route.box.numel
    input, output = like.new_empty(sum(send)), like.new_empty(sum(receive))
    for route, piece in zip(sent, cut(input, sent), strict=True):
        piece.copy_(read(route))
    if is_alone(group):
        output.copy_(input)
    else:
        given = receive, send
        collectives.all_to_all_single(output, input, *given, group=group).wait()
    yield from zip(arriving, cut(output, arriving), strict=True)


def cut(flat: Tensor, routes: list[Route]) -> list[Tensor]:
    """The boxes of these routes, laid end to end, as views."""
    parts = flat.split([route.box.numel for route in routes]) if routes else []
    return [part.view(r.box.size) for part, r in zip(parts, routes, strict=True)]
