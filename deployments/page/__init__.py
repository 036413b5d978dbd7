"""What does a browser see?

- `page`: the page at `/`, static files that need no key, under a strict Content-Security-Policy.
- `demo`: `/demo/kill`, which kills a process under running streams.
"""
