"""ModelSource: a model's files, found once, and each read at most once in a process.

Files are in a directory or in the local cache of the Hugging Face hub; nothing is downloaded here. The Router and the
Ingress import this file without torch, so properties import torch and transformers.
"""

import copy
import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import ModelConfig, ModelInfo, split_revision
from engine.errors import ModelError
from engine.models.families import ModelKind, ServedByVllm, gguf_settings, keep_layers, read_configuration, text_part
from engine.models.files import damage_named, indexed_names, names_model, read_object, tensor_shapes

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

HUB_FILES: Mapping[str, Any] = {
    "allow_patterns": ["*.safetensors", "*.json", "*.jinja"],
    "ignore_patterns": ["*/*.safetensors", "*/*.json", "consolidated*"],
}
"""The files that are read of a model on the hub; files of other formats need not be there."""
NUM_SAMPLES, SAMPLE_BYTES = 64, 2**16
"""A digest reads this many samples of so many bytes of each weight file, or the whole of a smaller file."""
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""Weight files in the order in which transformers looks for them; unpickling the last two would run code."""


class ModelSource:
    """A model's files; `open_model` makes it. Properties raise ModelError if files are missing, damaged or not served.

    is_text_part: only the text model in a multimodal model is served; skeleton: see `loader.skeleton_of`.
    """

    def __init__(self, config: ModelConfig, kinds: Mapping[str, Callable[[], ModelKind]]) -> None:
        """Note where the model is; `kinds` by `model_type` are of models that are not decoder-only."""
        self.config = config
        self.path = config.path
        self.is_text_part = False
        self.skeleton: nn.Module | None = None
        self._kinds = kinds

    @cached_property
    def directory(self) -> Path:
        is_file = os.path.isfile(self.path)
        if is_file and not self.path.endswith(".gguf"):
            raise ModelError(f"{self.path} is a file; name the directory of the model's files, or a GGUF file")
        if is_file or os.path.isdir(self.path):
            return Path(self.path).parent if is_file else Path(self.path)
        # Imported here, because most models are directories.
        from huggingface_hub import snapshot_download

        try:
            local = {"local_files_only": True, **HUB_FILES}
            return Path(snapshot_download(self.path, revision=self.config.revision, **local))
        except (OSError, ValueError) as error:
            message = f"model directory {self.path} does not exist, nor does the local hub cache hold such a model"
            if isinstance(error, OSError):  # it can be a name on the hub
                name = f"{self.path}@{self.config.revision}" if self.config.revision else self.path
                message += f"; `paceline pull {name}` downloads it"
            else:
                message += "; correct its path"
            raise ModelError(message) from error

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The contents of config.json, or else of a GGUF file's fields; a GGUF file counts as quantised."""
        if (file := self.gguf_file) is None:
            return read_object(self.directory / "config.json")
        if (self.directory / "config.json").exists():
            settings = read_object(self.directory / "config.json")
        else:
            settings = gguf_settings(file)
            logger.info("%s: the configuration is read from it, because there is no config.json beside it", file)
        return settings | {"quantization_config": {"quant_method": "gguf", "gguf_file": file.name}}

    @cached_property
    def gguf_file(self) -> Path | None:
        """The GGUF file that the path names, or the only weight file of the directory, if it is GGUF."""
        if os.path.isfile(self.path):
            return Path(self.path)
        if any((self.directory / name).exists() for name in (_WHOLE, _INDEX, *_PICKLED)):
            return None
        if len(files := sorted(self.directory.glob("*.gguf"))) > 1:
            names = ", ".join(file.name for file in files[:3]) + ", ..." * (len(files) > 3)
            raise ModelError(f"{self.path} holds {len(files)} GGUF files, {names}; name one, as {files[0]}")
        return files[0] if files else None

    @cached_property
    def kind(self) -> ModelKind:
        if self.config.execution == "vllm":
            return ServedByVllm()
        names = [section.get("model_type", "") for section in (self.settings, self.settings.get("text_config") or {})]
        return next((self._kinds[name] for name in names if name in self._kinds), ModelKind)()

    @cached_property
    @names_model
    def configuration(self) -> "PreTrainedConfig":
        """The configuration; reading it checks that the model can be served."""
        model_type = self.settings.get("model_type", "")
        if model_type == "mistral" and "layer_types" in self.settings:  # as in `AutoConfig`
            model_type = "ministral"
        whole = read_configuration(self.path, self.settings | {"model_type": model_type})
        configuration: PreTrainedConfig = text_part(whole)
        self.is_text_part = configuration is not whole
        if self.is_text_part and configuration.tie_word_embeddings != whole.tie_word_embeddings:
            # The two configurations have different defaults, so the files decide.
            configuration.tie_word_embeddings = not any("lm_head" in name for name in self.weight_shapes)
        self.kind.check(self.config, configuration, self.generation_settings)
        return configuration

    @cached_property
    def loaded_configuration(self) -> "PreTrainedConfig":
        """The configuration of what is loaded: without layers for `head_only`."""
        if not self.config.head_only:
            return self.configuration
        configuration = copy.deepcopy(self.configuration)
        keep_layers(configuration, 0)
        return configuration

    @cached_property
    def saved_format(self) -> str | None:
        """The quantised format that the weights are saved in; None if they are floats."""
        settings = getattr(self.configuration, "quantization_config", None)
        return None if settings is None else str(settings.get("quant_method", "bitsandbytes"))

    @cached_property
    def generation_settings(self) -> dict[str, Any]:
        """The contents of generation_config.json; empty if there is none."""
        path = self.directory / "generation_config.json"
        return read_object(path) if path.exists() else {}

    @property
    def start_id(self) -> int | None:
        """The token that a text starts with; None where the text continues its prompt."""
        return self.kind.start_id(self.settings, self.generation_settings)

    @property
    def max_model_len(self) -> int:
        """The most tokens of a request, prompt and text together, without a start token."""
        return self.kind.context_length(self.configuration) - (self.start_id is not None)

    def info(self, **loaded: Any) -> ModelInfo:
        """Return the facts about this model, given the facts about how it is loaded."""
        longest = self.kind.context_length(self.loaded_configuration)
        return ModelInfo(self.path, self.vocab_size, longest, self.eos_token_ids, start_id=self.start_id, **loaded)

    def check_length(self, max_model_len: int | None) -> None:
        if (max_model_len or 0) > self.max_model_len:
            problem = f"max_model_len is {max_model_len:,}, but {self.path} takes {self.max_model_len:,} tokens"
            raise ModelError(f"{problem}, by max_position_embeddings and rope_parameters in its config.json; lower it")

    @cached_property
    def eos_token_ids(self) -> list[int]:
        """Ids that end a text: the generation settings' or else the configuration's, and the tokenizer's."""
        named = [settings.get("eos_token_id") for settings in (self.generation_settings, self.settings)]
        text = self.configuration.get_text_config().eos_token_id
        eos: Any = next((value for value in (*named, text) if value is not None), [])
        ids = [*eos] if isinstance(eos, list) else [eos]
        if any(type(token_id) is not int for token_id in ids):
            raise ModelError(f"the eos_token_id of {self.path} is {eos!r}; it must be an id or a list of ids")
        has_tokenizer = (self.directory / "tokenizer.json").exists() or self.gguf_file is not None
        if has_tokenizer and (last := self.tokenizer.eos_token_id) not in (None, *ids):
            message = "%s: its tokenizer ends a text with %r, id %d, its configuration with %s; each of them ends one"
            logger.warning(message, self.path, self.tokenizer.eos_token, last, ids)
            ids.append(last)
        return [token_id for token_id in ids if 0 <= token_id < self.vocab_size]

    @property
    def vocab_size(self) -> int:
        return int(self.configuration.get_text_config().vocab_size)

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerFast":
        """The tokenizer of tokenizer.json or the GGUF file; not by `AutoTokenizer`, which imports torch."""
        # Imported here, because it takes a second, and `serve run` and starting workers import this file as well.
        from transformers import PreTrainedTokenizerFast
        from transformers.utils.chat_template_utils import _compile_jinja_template

        file = None if (self.directory / "tokenizer.json").exists() else self.gguf_file
        arguments: dict[str, Any] = {} if file is None else {"gguf_file": file.name}
        with damage_named(f"the tokenizer of {self.path} (tokenizer.json, tokenizer_config.json, chat_template.jinja)"):
            tokenizer = PreTrainedTokenizerFast.from_pretrained(self.directory, **arguments)
            tokenizer.encode("a")
            template = tokenizer.chat_template or {}
            for text in template.values() if isinstance(template, dict) else [template]:
                _compile_jinja_template(text)
        assert isinstance(tokenizer, PreTrainedTokenizerFast)
        return tokenizer

    @cached_property
    def weight_files(self) -> list[Path]:
        """The weight files that transformers would load: safetensors, in one file or shards, or the GGUF file."""
        if self.gguf_file is not None:
            return [self.gguf_file]
        directory, named = self.directory, self.settings.get("transformers_weights")
        present = [name for name in (_WHOLE, _INDEX, *_PICKLED) if (directory / name).exists()]
        first = named or (present[0] if present else _WHOLE)
        if first in _PICKLED:
            raise ModelError(f"{self.path} has its weights in {first}, which can run code; convert it to safetensors")
        if first == _WHOLE and _INDEX in present:
            logger.warning("%s holds %s and %s; the former is loaded, as in transformers", self.path, first, _INDEX)
        names = indexed_names(directory / first) if first.endswith(".json") else [first]
        if missing := [name for name in names if not (directory / name).exists()]:
            raise ModelError(f"cannot load {self.path}: it lacks {', '.join(missing[:3])}")
        return [directory / name for name in names]

    @cached_property
    def head(self) -> "ModelSource | None":
        """The files of the trained head that is loaded with the model."""
        if self.config.head is None:
            return None
        path, revision = split_revision(self.config.head)
        return ModelSource(replace(self.config, path=path, revision=revision, quantization="none", head=None), {})

    @property
    def parts(self) -> "list[ModelSource]":
        """This model's files, and those of its head."""
        return [self] if self.head is None else [self, self.head]

    @cached_property
    def drafts(self) -> "list[ModelSource]":
        """This draft's files, or those of this draft and of the drafts beside it."""
        if not self.config.others:
            return [self]
        names = [(self.path, self.config.revision), *map(split_revision, self.config.others)]
        configs = [replace(self.config, path=path, revision=revision, others=()) for path, revision in names]
        return [ModelSource(config, self._kinds) for config in configs]

    @cached_property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for path in self.weight_files for name, shape in tensor_shapes(path).items()}

    @cached_property
    def digest(self) -> str:
        """A digest of the model's settings and of samples of its weights; reading all weights would take minutes."""
        digest = hashlib.sha256(json.dumps([self.settings, self.generation_settings]).encode())
        for path in self.weight_files:
            size = path.stat().st_size
            digest.update(f"{path.name} {size} ".encode())
            with path.open("rb") as file:
                for sample in range(NUM_SAMPLES):
                    file.seek(max(file.tell(), size * sample // NUM_SAMPLES))
                    digest.update(file.read(SAMPLE_BYTES))
        return digest.hexdigest()

    def refuse(self, feature: str) -> None:
        if (reason := self.kind.refusals.get(feature)) is not None:
            raise ModelError(f"{self.path} is {self.kind.name}, {reason}")

    def refuse_to_draft(self, feature: str) -> None:
        if (reason := self.kind.draft_refusals.get(feature)) is not None:
            raise ModelError(f"the draft {self.path} {reason}")

    @property
    def has_weights(self) -> bool:
        """Whether files of weights are on this machine, complete or not."""
        return any(path.suffix in (".safetensors", ".gguf") for path in self.directory.iterdir())
