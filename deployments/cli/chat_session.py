"""ChatSession: questions to a server, and its answers as they come."""

import sys
import time
from typing import Any

from deployments.cli.stream import served_model, stream
from deployments.cli.terminal import CommandError, OriginColours, has_colours, legend, make_console

HELP = """/speculation on|off|N   draft tokens: as many as the server has, none, or at most N in a round
/seed N|off             the seed of the next answers
/temperature X          0 is greedy
/reset                  forget the conversation
/quit                   leave, as Ctrl-D does; Ctrl-C stops an answer
"""
_NO_TEMPLATE = "no chat template"


class ChatSession:
    """A conversation with one server, and the fields of its requests.

    Attributes:
        fields: sampling fields; those that are None are left to the server.
    """

    def __init__(self, url: str, api_key: str | None, **fields: Any) -> None:
        """Ask the server which model it has; raise CommandError if it cannot be reached."""
        self._url, self._api_key = url.rstrip("/"), api_key
        self._console = make_console()
        self._has_colours = has_colours(self._console)
        self._model = served_model(self._url, api_key)
        self._messages: list[dict[str, str]] = []
        self._has_template = True
        self._speculation: dict[str, Any] = {}
        self.fields = fields
        if self._has_colours:
            self._console.print(legend())

    def complete(self, prompt: str) -> None:
        """Continue a text."""
        self._ask("/v1/completions", prompt=prompt)

    def chat(self) -> None:
        """Answer what is typed until `/quit` or the end of the input."""
        is_typed = sys.stdin.isatty()
        if is_typed:
            import readline  # noqa: F401  # `input` edits lines with it

            self._console.print(f"{self._model} at {self._url}; /help lists the commands", style="dim")
        while True:
            try:
                line = input("> " if is_typed else "").strip()
                if line in ("/quit", "/exit"):
                    return
                if line.startswith("/"):
                    self.command(line)
                elif line:
                    self.say(line)
            except EOFError:
                return
            except KeyboardInterrupt:
                self._console.print("\nstopped", style="dim")
            except CommandError as error:
                make_console(stderr=True).print(f"error: {error}", style="red")
                if not is_typed:
                    raise

    def say(self, content: str) -> None:
        """Send a message and show the answer; the conversation keeps both only if the answer ends well."""
        messages = [*self._messages, {"role": "user", "content": content}]
        if self._has_template:
            try:
                text = self._ask("/v1/chat/completions", messages=messages)
            except CommandError as error:
                if _NO_TEMPLATE not in str(error):
                    raise
                self._has_template = False
                make_console(stderr=True).print(
                    f"{self._model} has no chat template: it continues the plain transcript instead"
                )
        if not self._has_template:
            lines = [f"{message['role'].capitalize()}: {message['content']}" for message in messages]
            text = self._ask("/v1/completions", prompt="\n".join([*lines, "Assistant:"]), stop=["\nUser:"])
        self._messages = [*messages, {"role": "assistant", "content": text}]

    def command(self, line: str) -> None:
        """Obey a line that starts with a slash; raise CommandError if it cannot be understood."""
        name, _, value = line.partition(" ")
        try:
            match name:
                case "/speculation":
                    known: dict[str, dict[str, Any]] = {"on": {}, "off": {"enabled": False}}
                    self._speculation = known[value] if value in known else {"num_speculative_tokens": int(value)}
                case "/seed":
                    self.fields["seed"] = None if value == "off" else int(value)
                case "/temperature":
                    self.fields["temperature"] = float(value)
                case "/reset":
                    self._messages = []
                case "/help":
                    self._console.print(HELP, end="")
                case _:
                    raise CommandError(f"there is no command {name}; /help lists them")
        except ValueError:
            raise CommandError(f"{name} does not take {value!r}; /help says what it takes") from None

    def _ask(self, path: str, **prompt: Any) -> str:
        """Show the answer to a prompt as it comes; return its text."""
        speculation = {**self._speculation, "metrics": "summary", **({"trace": True} if self._has_colours else {})}
        body = {
            "model": self._model,
            **prompt,
            **{name: value for name, value in self.fields.items() if value is not None},
            "stream": True,
            "stream_options": {"include_usage": True},
            "speculative": speculation,
        }
        started, text, last, colours = time.monotonic(), "", {}, OriginColours()
        for event in stream(self._url, path, body, self._api_key):
            last = event
            for choice in event["choices"]:
                piece = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                text += piece
                self._console.print(colours.add(piece, choice.get("rounds") or ()), end="")
        self._console.print()
        if self._console.is_terminal:
            self._console.print(_figures(last, time.monotonic() - started), style="dim")
        return text


def _figures(last: dict[str, Any], seconds: float) -> str:
    """Return the speed and the acceptance that the last event of an answer tells."""
    count = last["usage"]["completion_tokens"]
    shown = f"{count} tokens in {seconds:.1f} s, {count / seconds:.1f} tokens/s"
    figures = (last.get("metrics") or {}).get("speculative_decoding")
    if not figures or not figures["num_draft_tokens"]:
        return f"{shown}, no drafts"
    rate, length = figures["draft_acceptance_rate"], figures["mean_acceptance_length"]
    return f"{shown}; {rate:.0%} of the draft tokens accepted, {length:.1f} tokens a round"
