"""Files: reads a model's JSON files and weight headers without torch; damage is a ModelError that names the file."""

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from engine.errors import ModelError, PacelineError

P = ParamSpec("P")
R = TypeVar("R")

_SECTIONS = r"(text|quantization|transformer_layer|speculators|eagle|dflash)_config|verifier|rope_(parameters|scaling)"
_TYPES = (("model_type", str, "a text"), (_SECTIONS, dict, "an object"))
"""Types of fields that are read before transformers checks them, by patterns of field names."""
_SIZE = re.compile(
    r"(hidden|intermediate|vocab)_size|head_dim|max_position_embeddings|num_(hidden_layers|(attention|key_value)_heads)"
    r"|num_(layers|heads)|n_(embd|head|layer|positions)|d_(model|kv|ff)"
)
_SCALING, _MAX_SCALING = re.compile("factor|original_max_position_embeddings"), 2**31
_COUNT, _MAX_COUNT = re.compile(r".*(layer|head|expert)s?"), 2**14
"""Counts of objects that transformers makes before it reads a weight, and the most that are allowed."""


@contextmanager
def damage_named(subject: object, advice: str = "download it again") -> Iterator[None]:
    """Raise ModelError instead of any error of a library over a damaged file or an impossible configuration."""
    try:
        yield
    except PacelineError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        problem = text if text and isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {text}"
        raise ModelError(f"cannot read {subject}: {problem}; {advice}") from error


def names_model(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function of a ModelSource with `damage_named`."""

    @functools.wraps(function)
    def named(*args: P.args, **kwargs: P.kwargs) -> R:
        source: Any = args[0]
        with damage_named(f"the model {source.path}", "correct its config.json, or download it again"):
            return function(*args, **kwargs)

    return named


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, after checking the types of its sections and the range of its sizes."""
    with damage_named(path):
        content = json.loads(path.read_text(), object_hook=_special_float)
        if not isinstance(content, dict):
            raise ValueError("it holds no object")
        _check(path, content)
    return content


def _check(path: Path, section: Mapping[str, Any]) -> None:
    for name, value in section.items():
        wrong = [
            words for pattern, kind, words in _TYPES if re.fullmatch(pattern, name) and not isinstance(value, kind)
        ]
        if isinstance(value, dict):
            _check(path, value)
        elif type(value) is int and _SIZE.fullmatch(name) and value < 1:
            wrong.append("at least 1")
        elif _SCALING.fullmatch(name) and not (isinstance(value, int | float) and 0 < value <= _MAX_SCALING):
            wrong.append("a number above 0")
        elif type(value) is int and _COUNT.fullmatch(name) and value > _MAX_COUNT:
            wrong.append(f"at most {_MAX_COUNT}")
        if wrong and value is not None:
            raise ModelError(f"cannot read {path}: {name} is {value!r:.80}; it must be {wrong[0]}")


def indexed_names(index: Path) -> list[str]:
    """Return the weight files that an index names, all of them in the index's directory."""
    names = read_object(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ModelError(f"cannot read {index}: it lacks the weight_map of tensors to files; download it again")
    for name in names.values():
        if not isinstance(name, str) or not re.fullmatch(r"[^/\\]+\.safetensors", name):
            raise ModelError(f"{index} names {name!r:.80}; weights must be safetensors files beside it")
    return sorted(set(names.values()))


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a safetensors or GGUF file."""
    with damage_named(path):
        if path.suffix == ".gguf":
            from gguf import GGUFReader

            return {tensor.name: tuple(map(int, tensor.shape)) for tensor in GGUFReader(path).tensors}
        from safetensors import safe_open

        with safe_open(path, framework="np") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def _special_float(value: dict[str, Any]) -> Any:
    """Return the float for {"__float__": "Infinity"}, as transformers writes it, and any other object unchanged."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value
