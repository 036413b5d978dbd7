"""HAProxy as Serve's HTTP proxy: it sends requests straight to an Ingress, where Serve's own proxy would handle each.

In reading order: `variables` (the environment variables with which Serve starts it) and `launcher` (the program that
Serve takes for HAProxy: it mends the configuration, then becomes HAProxy).
"""
