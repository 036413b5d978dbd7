import pickle

from deployments.router.state import RouterState


def test_a_state_travels_to_an_ingress() -> None:
    state = RouterState("r1", "the target is being restarted")
    assert pickle.loads(pickle.dumps(state)) == state
