"""The Ray Serve application: HTTP in, text out. `serve run deployments:app` runs it."""

from deployments.builder import app as app
