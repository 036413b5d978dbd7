"""OpenAI's APIs: fields, requests, bodies, parameters, writers, tools, structured output."""
