"""Records from files: lines of records, or of other requests with their answers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from deployments.errors import validation_message
from deployments.records.record import Record


def files_of(source: Path) -> list[Path]:
    """Return a file, or a folder's files of JSON lines; raise FileNotFoundError without any."""
    files = sorted(source.glob("*.jsonl*")) if source.is_dir() else [source]
    if not files or not all(file.is_file() for file in files):
        raise FileNotFoundError(f"{source}: no such file, or no .jsonl file in it")
    return files


def read_records(file: Path) -> Iterator[tuple[str, Record | str]]:
    """Yield the place of each line, and its record, or why it holds none."""
    with file.open(encoding="utf-8", errors="replace", newline="\n") as lines:  # JSON may hold U+2028
        for number, line in enumerate(lines, 1):
            yield f"{file.name}:{number}", _record(line)


def _record(line: str) -> Record | str:
    entry: Any = None
    try:
        entry = from_json(line)
        if isinstance(entry, dict) and "answer" in entry:
            entry = _of_answer(**entry)
        return Record.model_validate(entry)
    except ValidationError as error:
        errors: Any = [{**fault, "loc": ("line", *fault["loc"])} for fault in error.errors()]
        return validation_message(errors, entry)[0]
    except (ValueError, LookupError, TypeError) as error:
        return f"the line is no record: {error!r}"


def _of_answer(path: str, body: dict[str, Any], answer: dict[str, Any]) -> Any:
    """Return the record in or of an answer, as the API sent it; raise an error if that has no texts."""
    if "record" in answer:
        return answer["record"]
    choices = [_choice(choice, has_echo=bool(body.get("echo"))) for choice in answer["choices"]]
    known = {name: answer.get(name) for name in ("system_fingerprint", "created")}
    return {"path": path, "body": body, "seed": body.get("seed"), "choices": choices, **known}


def _choice(choice: dict[str, Any], *, has_echo: bool) -> dict[str, Any]:
    message, scores, text = choice.get("message", {}), choice.get("logprobs") or {}, choice.get("text")
    logprobs = scores.get("token_logprobs") or [token["logprob"] for token in scores.get("content") or ()]
    if "token_ids" not in choice and not message.keys() & {"tool_calls", "reasoning_content"}:
        text = message.get("content", text)
    reason = choice.get("finish_reason")
    return {
        "token_ids": choice.get("token_ids"),
        "text": None if has_echo else text,
        "finish_reason": "stop" if reason == "tool_calls" else reason,
        "stop_reason": choice.get("stop_reason"),
        "logprobs": None if has_echo else logprobs or None,
    }
