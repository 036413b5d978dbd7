"""Anthropic's official client of the application in this process."""

import anthropic
import httpx
import httpx2


def official(client: httpx.AsyncClient) -> anthropic.AsyncAnthropic:
    """The official client of the same application; it brings an HTTP library of its own."""
    app = client._transport.app  # type: ignore[attr-defined]
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    return anthropic.AsyncAnthropic(
        base_url="http://paceline",
        api_key="none",
        max_retries=0,
        http_client=httpx2.AsyncClient(transport=transport, base_url="http://paceline"),
    )
