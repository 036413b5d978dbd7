"""ChatSession: questions to a server, and its answers as they come."""

import sys
import time
from typing import Any

import click
from rich.style import Style

from deployments.cli.terminal import LEGEND, OriginColours, has_colours, make_console
from deployments.diagnosis.http_client import PAUSES_S, VISIBLE, Client, ServerError

HELP = """/speculation on|off|N   draft tokens: as many as the server has, none, or at most N in a round
/seed N|off             the seed of the next answers
/temperature X          0 is greedy
/reset                  forget the conversation
/quit                   leave, as Ctrl-D does; Ctrl-C stops an answer"""


class ChatSession:
    """A conversation with one server; sampling `fields` that are None are left to the server."""

    def __init__(self, url: str, api_key: str | None, **fields: Any) -> None:
        """Ask the server which model it has; raise ServerError if it cannot be reached."""
        self._client, self.fields = Client(url, api_key, PAUSES_S), fields
        self._console, self._errors = make_console(), make_console(stderr=True)
        self._has_colours = has_colours(self._console)
        self._model: str = self._client.get("/v1/models")["data"][0]["id"]
        self._name = self._model.translate(VISIBLE)
        self._messages: list[dict[str, str]] = []
        self._has_template = True
        if self._has_colours:
            self._console.print(LEGEND)

    def chat(self) -> None:
        """Answer lines until `/quit` or the end of the input; errors end the chat only if the input is not typed."""
        is_typed = sys.stdin.isatty()
        if is_typed:
            import readline  # noqa: F401  # `input` edits lines with it

            self._console.print(f"{self._name} at {self._client.url}; /help lists the commands", style="dim")
        while True:
            try:
                line = input("> " if is_typed else "").strip()
                if line == "/quit":
                    return
                if line:
                    (self.command if line.startswith("/") else self.say)(line)
            except EOFError:
                return
            except KeyboardInterrupt:
                self._console.print("\nstopped", style="dim")
            except click.ClickException as error:
                if not is_typed:
                    raise
                self._errors.print(f"error: {error}", style="red")

    def say(self, content: str) -> None:
        """Send a message and show the answer; both join the conversation only if the answer ends well."""
        messages = [*self._messages, {"role": "user", "content": content}]
        try:
            text = self.ask("/v1/chat/completions", messages=messages) if self._has_template else None
        except ServerError as error:
            if "no chat template" not in str(error):
                raise
            text, self._has_template = None, False
            self._errors.print(f"{self._name} has no chat template: it continues the plain transcript instead")
        if text is None:
            lines = [f"{message['role'].capitalize()}: {message['content']}" for message in messages]
            text = self.ask("/v1/completions", prompt="\n".join([*lines, "Assistant:"]), stop=["\nUser:"])
        self._messages = [*messages, {"role": "assistant", "content": text}]

    def command(self, line: str) -> None:
        """Obey a line that starts with a slash; raise ClickException if it is wrong."""
        name, _, value = line.partition(" ")
        try:
            match name:
                case "/speculation" if value in ("on", "off"):
                    self.fields["speculative"] = {"enabled": value == "on"}
                case "/speculation":
                    self.fields["speculative"] = {"num_speculative_tokens": int(value)}
                case "/seed":
                    self.fields["seed"] = None if value == "off" else int(value)
                case "/temperature":
                    self.fields["temperature"] = float(value)
                case "/reset":
                    self._messages = []
                case "/help":
                    self._console.print(HELP)
                case _:
                    raise click.ClickException(f"there is no command {name}; /help lists them")
        except ValueError:
            raise click.ClickException(f"{name} does not take {value!r}; /help says what it takes") from None

    def ask(self, path: str, **prompt: Any) -> str:
        """Show the answer to a prompt as it comes; return its text."""
        body = {name: value for name, value in self.fields.items() if value is not None}
        trace = {"trace": True} if self._has_colours else {}
        body |= {"model": self._model, "stream": True, "stream_options": {"include_usage": True}, **prompt}
        body["speculative"] = {**body.get("speculative", {}), "metrics": "summary", **trace}
        started, text, event, colours = time.monotonic(), "", {}, OriginColours()
        for event in self._client.stream(path, body):
            for choice in event["choices"]:
                piece = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                text += piece
                for part, style in colours.add(piece, choice.get("rounds") or ()):
                    # The console itself would replace tabs. A model must not send commands to the terminal.
                    shown = part.translate(VISIBLE) if self._console.is_terminal else part
                    self._console.file.write(Style.parse(style).render(shown) if self._has_colours else shown)
                self._console.file.flush()
        self._console.print()
        if self._console.is_terminal:
            self._console.print(_figures(event, time.monotonic() - started), style="dim")
        return text


def _figures(last: dict[str, Any], seconds: float) -> str:
    count, figures = last["usage"]["completion_tokens"], last["metrics"]["speculative_decoding"]
    rate, length = figures["draft_acceptance_rate"], figures["mean_acceptance_length"]
    accepted = f"{rate:.0%} of draft tokens accepted, {length:.1f} tokens a round" if rate else "no drafts"
    return f"{count} tokens in {seconds:.1f} s, {count / seconds:.1f} tokens/s; {accepted}"
