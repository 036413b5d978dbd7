"""HeadConfig: what a trained head is made of, read from the config.json of every published form.

A form is that of `speculators` or that of a paper's authors. A wrong tap, norm or layout changes no text and only costs
accepted tokens, so what a file leaves open is refused, not guessed. The Router recognises heads here: no torch.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from engine.errors import ModelError
from engine.models.source import ModelSource

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_BLOCKS = ("dflash", "dspark")
_KINDS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("eagle3", "peagle"), ("llama", "qwen3")),
    **dict.fromkeys(_BLOCKS, ("qwen3",)),
    "mtp": (),
}
"""The model types that the layers of each kind may have; none where they are the target's."""
_SERVED: Mapping[str, object] = {
    "verifier_accept_k": 1,
    "accept_tolerance": 0,
    "num_nextn_predict_layers": 1,
    "use_aux_hidden_state": True,
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "causal": False,
    "use_swa": False,
    "quantization_config": None,
}
"""Fields of which only one value is served; the first two would accept tokens that the target does not draw."""
_TAP_FIELDS: Mapping[str, int] = {
    "eagle_aux_hidden_state_layer_ids": 0,
    "aux_hidden_state_layer_ids": 0,
    "eagle_config.eagle_aux_hidden_state_layer_ids": 1,
    "dflash_config.target_layer_ids": 1,
    "target_layer_ids": 1,
    "dspark_target_layer_ids": 1,
}
"""The fields of tapped layers: an id is the number of layers up to the tap, or needs 1 to be it."""
_MASK_IDS = ("mask_token_id", "ptd_token_id", "pard_token")
_SLIDING = "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """What a head's files say about it.

    Attributes:
        kind: a name in `engine.heads.registry.HEADS`.
        layers: the configuration of the head's own layers, as of a model of transformers; of MTP layers, the target's.
        taps: the target's layers whose outputs the head reads, each by the number of layers up to it, in the order of
            the columns of `fc`.
        vocab_size: the target's; draft_vocab_size: the tokens that the head can draft.
        target_hidden_size: the width of the outputs that it reads.
        block_size: places of a block; 0 if there is no limit.
        sample_from_anchor: the first place of a block predicts a token, too.
        sliding_window_non_causal: in layers with a window, places of a block see later ones, too.
    """

    kind: str
    layers: "PreTrainedConfig"
    taps: tuple[int, ...]
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    fc_bias: bool = False
    block_size: int = 0
    mask_token_id: int | None = None
    sample_from_anchor: bool = False
    sliding_window_non_causal: bool = False
    markov_rank: int = 0
    markov_head_type: str = "vanilla"

    @property
    def num_layers(self) -> int:
        """Layers of its own in the KV cache."""
        return int(self.layers.num_hidden_layers) if _KINDS[self.kind] else 1

    @property
    def max_draft_tokens(self) -> int:
        """Draft tokens of one pass at most."""
        return self.block_size - (not self.sample_from_anchor) if self.block_size else sys.maxsize


def kind_of(settings: Mapping[str, Any]) -> str | None:
    """Return the kind of head that a config.json describes; None if it describes a whole model."""
    if kind := settings.get("speculators_model_type"):
        return str(kind)
    names, block = " ".join(settings.get("architectures") or ()), settings.get("dflash_config")
    if "DSpark" in names or (block or {}).get("projector_type") == _BLOCKS[1]:
        return _BLOCKS[1]
    if "DFlash" in names or block is not None:
        return _BLOCKS[0]
    # A `pard_token` alone marks a whole model that drafts several tokens.
    if "Eagle3" in names or settings.keys() & {"draft_vocab_size", "eagle_config", "ptd_token_id"}:
        return "peagle" if any(settings.get(name) is not None for name in _MASK_IDS) else "eagle3"
    return None


def is_head(settings: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes a trained head."""
    return kind_of(settings) is not None


def verifier_of(settings: Mapping[str, Any]) -> str | None:
    """Return the target that a head was trained for, as its config.json names it."""
    verifier = (settings.get("speculators_config") or {}).get("verifier") or {}
    return verifier.get("name_or_path") or None


def read_head_config(source: ModelSource, target: ModelSource) -> HeadConfig:
    """Return what a head is made of; `source` is the target itself for the MTP layers of its checkpoint.

    Raises:
        ModelError: it is of an unknown kind, does not fit the target, or leaves open how it is computed.
    """
    return _Reader(source, target).read()


class _Reader:
    """Reads a head's fields, wherever its form has them."""

    def __init__(self, source: ModelSource, target: ModelSource) -> None:
        self._source, self._target, self._settings = source, target, source.settings
        self._is_speculators = "speculators_model_type" in self._settings
        self._kind = "mtp" if source.path == target.path else kind_of(self._settings) or "a whole model"
        self._fields = dict(self._settings)
        for section in ("transformer_layer_config", "eagle_config", "dflash_config"):
            self._fields |= self._settings.get(section) or {}

    def read(self) -> HeadConfig:
        kind, text = self._kind, self._target.configuration.get_text_config()
        if kind not in _KINDS:
            self._refuse(f"it is {kind}; heads are {', '.join(_KINDS)}")
        sizes: dict[str, Any] = {"vocab_size": int(text.vocab_size), "target_hidden_size": int(text.hidden_size)}
        num_layers, draft_vocab_size = int(text.num_hidden_layers), sizes["vocab_size"]
        if self._source.path != self._target.path:
            self._check_served()
        if not _KINDS[kind]:
            return HeadConfig(kind=kind, layers=text, taps=(num_layers,), draft_vocab_size=draft_vocab_size, **sizes)
        layers: Any = self._layers(_KINDS[kind])
        width = self._fields.get("target_hidden_size") or layers.hidden_size
        for name, size in {"vocab_size": layers.vocab_size, "target_hidden_size": width}.items():
            if size != sizes[name]:
                self._refuse(f"its {name} is {size}, but the target {self._target.path} has {sizes[name]}")
        given = self._fields.get("draft_vocab_size", 32000 if self._is_speculators else None)
        if (given or 0) > draft_vocab_size:
            self._refuse(f"draft_vocab_size is {given}, more than the {draft_vocab_size} of its target")
        mask = self._first(*_MASK_IDS)
        if kind != "eagle3" and not (isinstance(mask, int) and mask < sizes["vocab_size"]):
            self._refuse(f"mask_token_id is {mask}; it must be a token of the target")
        return HeadConfig(
            kind=kind,
            layers=layers,
            taps=self._taps(num_layers, layers.num_hidden_layers),
            draft_vocab_size=given or draft_vocab_size,
            mask_token_id=mask,
            fc_bias=any(name.endswith("fc.bias") for name in self._source.weight_shapes),
            **sizes,
            **(self._block() if kind in _BLOCKS else self._norms()),
        )

    def _first(self, *names: str) -> Any:
        return next((self._fields[name] for name in names if self._fields.get(name) is not None), None)

    def _check_served(self) -> None:
        methods = (self._fields.get("speculators_config") or {}).get("proposal_methods") or []
        for fields in (self._fields, *methods):
            for name, served in _SERVED.items():
                if fields.get(name) not in (None, served):
                    self._refuse(f"{name} is {fields[name]}, and only {served} is served")

    def _layers(self, model_types: tuple[str, ...]) -> "PreTrainedConfig":
        from huggingface_hub.errors import StrictDataclassError
        from transformers import CONFIG_MAPPING

        settings = dict(self._settings)
        if self._is_speculators:  # only what differs from the defaults of its class
            settings = dict(settings.get("transformer_layer_config") or {})
        if (model_type := settings.get("model_type", model_types[-1])) not in model_types:
            self._refuse(f"model_type of its layers is {model_type}; it must be {' or '.join(model_types)}")
        if _SLIDING in (settings.get("layer_types") or []):
            settings["use_sliding_window"] = True  # without it, Qwen3's configuration drops the window
        try:
            layers: PreTrainedConfig = CONFIG_MAPPING[model_type].from_dict(settings)
        except (ValueError, KeyError, TypeError, StrictDataclassError) as error:
            self._refuse(f"its layers cannot be read: {error}")
        layer_types = set(getattr(layers, "layer_types", None) or [])
        if unknown := ", ".join(sorted(layer_types - {"full_attention", _SLIDING})):
            self._refuse(f"layer_types has {unknown}; only full_attention and {_SLIDING} are served")
        if _SLIDING in layer_types and not getattr(layers, "sliding_window", None):
            self._refuse(f"sliding_window is missing, but layer_types has {_SLIDING}")
        return layers

    def _taps(self, num_layers: int, num_own: int) -> tuple[int, ...]:
        """Return the tapped layers in the file's order, the order of the columns of `fc`."""
        stated = {}
        for field, shift in _TAP_FIELDS.items():
            section, _, name = field.rpartition(".")
            ids = ((self._settings.get(section) or {}) if section else self._settings).get(name)
            if ids is not None:
                stated[field] = tuple(layer + shift for layer in ids)
        if len(set(stated.values())) > 1:
            self._refuse(f"{' and '.join(stated)} name different layers; leave the one that it was trained with")
        if not stated and self._kind in _BLOCKS and self._is_speculators:
            self._refuse("aux_hidden_state_layer_ids is missing; add the layers that it was trained with")
        if not stated:
            taps: tuple[int, ...] = (2, num_layers // 2, num_layers - 3)
            if self._kind in _BLOCKS:
                step = (num_layers - 4) / max(num_own - 1, 1)
                first = num_layers // 2 if num_own == 1 else 1
                taps = tuple(round(first + i * step) + 1 for i in range(num_own))
            stated["the default for it"] = taps
        name, taps = next(iter(stated.items()))
        meaning = f"{name} means the outputs of layers {', '.join(map(str, taps))}"
        if not all(1 <= tap <= num_layers for tap in taps):
            self._refuse(f"{meaning}, but the target {self._target.path} has {num_layers} layers")
        width = self._target.configuration.get_text_config().hidden_size
        columns = [shape[-1] for name, shape in self._source.weight_shapes.items() if name.endswith("fc.weight")]
        if columns != [len(taps) * width]:
            self._refuse(f"{meaning}, {len(taps)} times {width} numbers, but fc.weight reads {columns}")
        return taps

    def _norms(self) -> dict[str, Any]:
        names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        norms: dict[str, Any] = {name: bool(self._fields.get(name)) for name in names}
        if norms["norm_before_fc"] and norms["fc_norm"]:
            self._refuse("norm_before_fc and fc_norm exclude each other, and both are true")
        # False in all other forms; readers of this one disagree about its default.
        if self._is_speculators and self._kind == "eagle3" and self._fields.get("norm_before_residual") is None:
            self._refuse("norm_before_residual is missing; add the value that it was trained with to its config.json")
        return norms

    def _block(self) -> dict[str, Any]:
        fields, is_plain = self._fields, self._kind == _BLOCKS[0]
        block_size = fields.get("block_size", 8 if self._is_speculators else None)
        if not isinstance(block_size, int) or block_size < 2:
            self._refuse(f"block_size is {block_size}; it must be at least 2")
        if (from_anchor := self._first("sample_from_anchor", "query_zero_predicts_next")) is None and not is_plain:
            self._refuse(
                "sample_from_anchor is missing; add it to its config.json: true if the first place of a block predicts "
                "the next token, false if it only stands for the last committed one"
            )
        markov = fields.get("markov_head_type") or "vanilla"
        if markov not in (types := ("vanilla", "gated", "rnn")):
            self._refuse(f"markov_head_type is {markov}; it must be {' or '.join(types)}")
        return {
            "block_size": block_size,
            "sample_from_anchor": bool(from_anchor),
            "sliding_window_non_causal": bool(fields.get("sliding_window_non_causal")) or fields.get("causal") is False,
            "markov_rank": 0 if is_plain else fields.get("markov_rank", 256),
            "markov_head_type": markov,
        }

    def _refuse(self, problem: str) -> NoReturn:
        raise ModelError(f"the head {self._source.path} cannot be served: {problem}")
