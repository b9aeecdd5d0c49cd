"""Who sends: the near, then the idle; what fewest can send comes first."""

from __future__ import annotations

from collections import Counter

from shoal.plan.transfer.point_to_point import Parcel, waves


def first_wave(parcels, hosts):
    """Return parcel → sender of the first wave; a parcel is bytes, holders and one needer."""
    made = []
    for number, (num_bytes, holders, needer) in enumerate(parcels):
        by_host: dict[int, list[int]] = {}
        for device in holders:
            by_host.setdefault(hosts[device], []).append(device)
        made.append(Parcel(number, num_bytes, by_host, {hosts[needer]: {needer: None}}))
    (wave,) = waves(made, hosts, [0] * len(hosts))
    return {edge.parcel: edge.sender for edge in wave}


def test_the_largest_are_dealt_first_and_to_the_least_loaded():
    hosts = [0, 0, 1, 2, 3]
    chosen = first_wave([(2, [0, 1], 2), (2, [0, 1], 3), (4, [0, 1], 4)], hosts)
    assert chosen[0] == chosen[1] != chosen[2]


def test_parcel_with_the_fewest_holders_is_sent_first():
    chosen = first_wave([(4, [0, 1], 2), (4, [0], 3)], [0, 0, 1, 2])
    assert chosen == {0: 1, 1: 0}


def test_hosts_share_what_leaves_them():
    hosts = [0, 0, 1, 2, 3, 4, 5]
    chosen = first_wave([(4, [0, 1, 2], needer) for needer in (3, 4, 5, 6)], hosts)
    assert Counter(hosts[sender] for sender in chosen.values()) == {0: 2, 1: 2}


def test_a_holder_on_the_same_host_sends_though_others_are_idle():
    assert first_wave([(4, [0, 2], 1), (4, [0, 2], 3)], [0, 0, 1, 1]) == {0: 0, 1: 2}
