"""When each rank ends by SimGrid: standard input has the ranks, standard output times.

Run by the interpreter that SimGrid's package is for, as a script: it imports nothing of
ours. Input: {"links": {name: bandwidth}, "routes": {"0 1": [latency, [names]]},
"ranks": [[step, ...], ...]}; a step is a number of seconds to compute, or two lists of
[peer, bytes]: messages to send and to receive, all at once.
"""

import json
import sys

from simgrid import Actor, Comm, Engine, Host, LinkInRoute, Mailbox, NetZone, this_actor

SPEED = 1.0  # flops a second: nothing is counted
WIDE = 1e18  # bytes a second: a link that has a latency alone


def platform(given, size):
    zone = NetZone.create_full_zone("all")
    hosts = [zone.create_host(str(rank), SPEED) for rank in range(size)]
    links = {
        name: zone.create_link(name, bandwidth).seal()
        for name, bandwidth in given["links"].items()
    }
    for pair, (latency, names) in given["routes"].items():
        source, target = map(int, pair.split())
        way = zone.create_link(f"latency {pair}", WIDE)
        way.set_latency(latency).seal()
        route = [LinkInRoute(way), *(LinkInRoute(links[name]) for name in names)]
        ends = hosts[source].netpoint, hosts[target].netpoint
        zone.add_route(*ends, None, None, route, False)
    zone.seal()


def run(rank, steps, ends):
    for step in steps:
        if isinstance(step, float):
            this_actor.sleep_for(step)
            continue
        sent, received = step
        comms = [
            Mailbox.by_name(f"{rank} {peer}").put_async(0, nbytes)
            for peer, nbytes in sent
        ]
        boxes = [Mailbox.by_name(f"{peer} {rank}") for peer, _ in received]
        gets = [box.get_async() for box in boxes]
        Comm.wait_all([*comms, *(get[0] for get in gets)])
    ends[rank] = Engine.clock


def main():
    options = (
        "network/model:CM02", "network/TCP-gamma:0", "network/crosstraffic:0",
        "network/latency-factor:1", "network/bandwidth-factor:1", "network/weight-S:0",
        "surf/precision:1e-12", "maxmin/precision:1e-9",
    )  # fmt: skip
    arguments = [sys.argv[0], "--log=root.thresh:error"]
    engine = Engine([*arguments, *(f"--cfg={option}" for option in options)])
    given = json.load(sys.stdin)
    platform(given, len(given["ranks"]))
    ends = {}
    for rank, steps in enumerate(given["ranks"]):
        Actor.create(str(rank), Host.by_name(str(rank)), run, rank, steps, ends)
    engine.run()
    print(json.dumps([ends[rank] for rank in range(len(ends))]))


if __name__ == "__main__":
    main()
