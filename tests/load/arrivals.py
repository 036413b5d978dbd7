"""Arrival times of an open loop: requests come when they come, whether or not earlier ones are answered."""

import random


def arrival_times(
    rate: float, *, burstiness: float = 1.0, num_requests: int | None = None, duration_s: float | None = None, seed: int
) -> list[float]:
    """Return when requests arrive, in seconds since the start; as many as asked for, or all within the duration.

    The time between two arrivals is drawn from a gamma distribution whose mean is 1 / rate.

    Args:
        rate: requests per second.
        burstiness: shape of the distribution, with vLLM's meaning: 1 is a Poisson process, below 1 requests come in
            bursts, infinity is one request every 1 / rate seconds.
    """
    rng = random.Random(seed)
    times: list[float] = []
    time_s = 0.0
    while num_requests is None or len(times) < num_requests:
        is_regular = burstiness == float("inf")
        time_s += 1 / rate if is_regular else rng.gammavariate(burstiness, 1 / (rate * burstiness))
        if duration_s is not None and time_s >= duration_s:
            break
        times.append(time_s)
    return times
