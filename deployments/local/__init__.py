"""What runs only where `make serve` does?

In reading order: `environment` (variables of Ray and Serve), `haproxy_variables` and `haproxy_launcher` (Serve's
HAProxy).
"""
