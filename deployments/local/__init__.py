"""What runs only with `make serve`: `environment`, and Serve's HAProxy (`haproxy_variables`, `haproxy_launcher`)."""
