"""A load on its way to an Ingress."""

from deployments.router.delivery import decode, encode
from deployments.router.load import Load


def test_a_load_arrives_as_it_was_sent_and_is_small() -> None:
    load = Load("replica", 288, 140, 13.5, 4)
    assert decode(encode(load)) == load
    assert len(encode(load)) < 40
