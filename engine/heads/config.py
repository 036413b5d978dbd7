"""HeadConfig: what a trained head is made of, read from the config.json of `speculators` or of a paper's authors.

A wrong tap, norm or layout changes no text and only costs accepted tokens, so what a file leaves open is refused, not
guessed. The Router recognises heads here: no torch.
"""

import copy
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.errors import ModelError
from engine.models.families import logit_scale, read_configuration
from engine.models.source import ModelSource

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_BLOCKS = ("dflash", "dspark")
_KINDS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("eagle3", "peagle"), ("llama", "qwen3")),
    **dict.fromkeys(_BLOCKS, ("qwen3",)),
    "mtp": (),
}
"""The model types that a kind's layers may have; empty if they are the target's."""
_SERVED: Mapping[str, object] = {
    "verifier_accept_k": 1,
    "accept_tolerance": 0,
    "num_nextn_predict_layers": 1,
    "use_aux_hidden_state": True,
    "attention_sink_bias": False,
    "causal": False,
    "use_swa": False,
    "quantization_config": None,
}
"""Fields with only one served value; other values of the first two accept tokens that the target does not draw."""
_TAP_FIELDS: Mapping[str, int] = {
    "eagle_aux_hidden_state_layer_ids": 0,
    "aux_hidden_state_layer_ids": 0,
    "eagle_config.eagle_aux_hidden_state_layer_ids": 1,
    "dflash_config.target_layer_ids": 1,
    "target_layer_ids": 1,
    "dspark_target_layer_ids": 1,
}
"""Fields of tapped layers, and what to add to their ids to get the number of layers before the tap."""
_MASK_IDS = ("mask_token_id", "ptd_token_id", "pard_token")
_SLIDING = "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """What a head's files say about it."""

    kind: str  # a name in `engine.heads.registry.HEADS`
    layers: "PreTrainedConfig"  # of the head's own layers; for MTP, the target's with one layer
    taps: tuple[int, ...]  # target layers before each output that `fc` reads, in the order of its columns
    vocab_size: int  # the target's
    draft_vocab_size: int  # how many tokens the head can draft
    target_hidden_size: int  # width of the tapped outputs
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    fc_bias: bool = False
    block_size: int = 0  # places of a block; 0 without limit
    mask_token_id: int | None = None
    sample_from_anchor: bool = False  # a block's first place predicts a token, too
    sliding_window_non_causal: bool = False  # in layers with a window, places of a block see later places
    markov_rank: int = 0
    markov_head_type: str = "vanilla"
    logit_scale: float = 1.0  # the target's, as is `logit_cap`
    logit_cap: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values, without paths."""
        layers = {name: value for name, value in self.layers.to_dict().items() if name != "_name_or_path"}
        return vars(self) | {"layers": layers}

    @property
    def max_draft_tokens(self) -> int:
        """The most draft tokens of one pass."""
        return self.block_size - (not self.sample_from_anchor) if self.block_size else sys.maxsize


def kind_of(settings: Mapping[str, Any]) -> str | None:
    """Return the kind of head that a config.json describes; None if it describes a whole model."""
    if kind := settings.get("speculators_model_type"):
        return str(kind)
    names, block = str(settings.get("architectures")), settings.get("dflash_config")
    if "DSpark" in names or (block or {}).get("projector_type") == _BLOCKS[1]:
        return _BLOCKS[1]
    if "DFlash" in names or block is not None:
        return _BLOCKS[0]
    # A `pard_token` alone marks a whole model that drafts several tokens.
    if "Eagle3" in names or settings.keys() & {"draft_vocab_size", "eagle_config", "ptd_token_id"}:
        return "peagle" if any(settings.get(name) is not None for name in _MASK_IDS) else "eagle3"
    return None


def drafts_blocks(head: ModelSource | None) -> bool:
    """Return whether a head drafts several tokens in one pass."""
    return head is not None and kind_of(head.settings) in ("peagle", *_BLOCKS)


def verifier_of(settings: Mapping[str, Any]) -> str | None:
    """Return the target that a head was trained for, as its config.json names it."""
    verifier = (settings.get("speculators_config") or {}).get("verifier") or {}
    return verifier.get("name_or_path") or None


def read_head_config(source: ModelSource, target: ModelSource) -> HeadConfig:
    """Return what a head is made of; `source` is the target itself for the MTP layers of its checkpoint.

    Raises ModelError if the kind is unknown, the head does not fit the target, or its files leave its computation open.
    """
    return _Reader(source, target).read()


class _Reader:
    def __init__(self, source: ModelSource, target: ModelSource) -> None:
        self._source, self._target, self._settings = source, target, source.settings
        self._is_speculators = "speculators_model_type" in self._settings
        self._kind = "mtp" if source.path == target.path else kind_of(self._settings) or "a whole model"
        self._fields = dict(self._settings)
        for section in ("transformer_layer_config", "eagle_config", "dflash_config"):
            self._fields |= self._settings.get(section) or {}

    def read(self) -> HeadConfig:
        kind, fields, text = self._kind, self._fields, self._target.configuration.get_text_config()
        vocab_size, width, num_layers = int(text.vocab_size), int(text.hidden_size), int(text.num_hidden_layers)
        self._check(kind in _KINDS, f"it is {kind}; heads are {', '.join(_KINDS)}")
        methods = (fields.get("speculators_config") or {}).get("proposal_methods") or []
        for values in (fields, *methods) if self._source.path != self._target.path else ():
            for name, served in _SERVED.items():
                value = values.get(name)
                self._check(value in (None, served), f"{name} is {value}, and only {served} is served")
        common: dict[str, Any] = {"kind": kind, "vocab_size": vocab_size, "target_hidden_size": width}
        common |= {"logit_scale": logit_scale(text), "logit_cap": getattr(text, "final_logit_softcapping", None)}
        if not _KINDS[kind]:
            layers = copy.deepcopy(text)
            layers.num_hidden_layers, layers.first_k_dense_replace = 1, 0
            for name in ("layer_types", "mlp_layer_types"):
                if kinds := getattr(layers, f"mtp_{name}", None) or (getattr(layers, name, None) or [])[-1:]:
                    setattr(layers, name, kinds[:1])
            return HeadConfig(layers=layers, taps=(num_layers,), draft_vocab_size=vocab_size, **common)
        layers = self._layers(_KINDS[kind])
        draft_vocab_size = fields.get("draft_vocab_size", 32000 if self._is_speculators else None) or vocab_size
        mask, of_target = self._first(*_MASK_IDS), f"of the target {self._target.path}"
        head_vocab_size, head_width = layers.vocab_size, fields.get("target_hidden_size") or layers.hidden_size
        self._check(
            head_vocab_size == vocab_size, f"its vocab_size is {head_vocab_size}, and that {of_target} {vocab_size}"
        )
        widths = f"its target_hidden_size is {head_width}, and the hidden_size {of_target} {width}"
        self._check(head_width == width, widths)
        sizes = f"draft_vocab_size is {draft_vocab_size}, and vocab_size {vocab_size}"
        self._check(draft_vocab_size <= vocab_size, sizes)
        is_token = kind == "eagle3" or (isinstance(mask, int) and mask < vocab_size)
        self._check(is_token, f"mask_token_id is {mask}; it must be a token {of_target}")
        return HeadConfig(
            layers=layers,
            taps=self._taps(num_layers, width),
            draft_vocab_size=draft_vocab_size,
            mask_token_id=mask,
            fc_bias=any(name.endswith("fc.bias") for name in self._source.weight_shapes),
            **common,
            **(self._block() if kind in _BLOCKS else self._norms()),
        )

    def _layers(self, model_types: tuple[str, ...]) -> Any:
        # `speculators` states only what differs from a class's defaults, authors' forms state everything.
        form = self._settings.get("transformer_layer_config") or {} if self._is_speculators else self._settings
        settings = dict(form)
        model_type = settings.setdefault("model_type", model_types[-1])
        problem = f"model_type of its layers is {model_type}, not {' or '.join(model_types)}"
        self._check(model_type in model_types, problem)
        if is_sliding := _SLIDING in (settings.get("layer_types") or []):
            settings["use_sliding_window"] = True  # without it, Qwen3's configuration drops the window
        layers: Any = read_configuration(self._source.path, settings)
        unknown = {*(getattr(layers, "layer_types", None) or [])} - {"full_attention", _SLIDING}
        self._check(not unknown, f"layer_types has {', '.join(unknown)}, which no head is served with")
        has_window = not is_sliding or bool(settings.get("sliding_window"))
        self._check(has_window, f"sliding_window is missing, but layer_types has {_SLIDING}")
        return layers

    def _taps(self, num_layers: int, width: int) -> tuple[int, ...]:
        stated: dict[str, tuple[int, ...]] = {}
        for field, shift in _TAP_FIELDS.items():
            section, _, name = field.rpartition(".")
            if (ids := ((self._settings.get(section) or {}) if section else self._settings).get(name)) is not None:
                stated[field] = tuple(layer + shift for layer in ids)
        problem = f"{' and '.join(stated)} differ; leave the one that it was trained with"
        self._check(len({*stated.values()}) < 2, problem)
        is_known = bool(stated) or self._kind not in _BLOCKS
        self._check(is_known, "the field of tapped layers is missing; add the layers that it was trained with")
        default = (2, num_layers // 2, num_layers - 3)
        name, taps = next(iter(stated.items()), ("the default for it", default))
        meaning = f"{name} means the outputs of layers {', '.join(map(str, taps))}"
        self._check(all(1 <= tap <= num_layers for tap in taps), f"{meaning} of {num_layers} of its target")
        columns = [shape[-1] for name, shape in self._source.weight_shapes.items() if name.endswith("fc.weight")]
        problem = f"{meaning}, {len(taps)} times {width} numbers, but fc.weight reads {columns}"
        self._check(columns == [len(taps) * width], problem)
        return taps

    def _norms(self) -> dict[str, Any]:
        names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        norms: dict[str, Any] = {name: bool(self._fields.get(name)) for name in names}
        is_clear = not (norms["norm_before_fc"] and norms["fc_norm"])
        self._check(is_clear, "norm_before_fc and fc_norm exclude each other, and both are true")
        # Authors' forms mean False; readers of `speculators` disagree about the default.
        is_open = self._is_speculators and self._kind == "eagle3" and self._fields.get(names[0]) is None
        self._check(not is_open, f"{names[0]} is missing; add the value that it was trained with to its config.json")
        return norms

    def _block(self) -> dict[str, Any]:
        fields, is_plain = self._fields, self._kind == _BLOCKS[0]
        size = fields.get("block_size", 8 if self._is_speculators else None)
        self._check(isinstance(size, int) and size > 1, f"block_size is {size}; it must be at least 2")
        from_anchor = self._first("sample_from_anchor", "query_zero_predicts_next")
        problem = "add to its config.json whether the first place of a block predicts a token"
        self._check(is_plain or from_anchor is not None, f"sample_from_anchor is missing; {problem}")
        markov, types = fields.get("markov_head_type") or "vanilla", ("vanilla", "gated", "rnn")
        self._check(markov in types, f"markov_head_type is {markov}; it must be {' or '.join(types)}")
        return {
            "block_size": size,
            "sample_from_anchor": bool(from_anchor),
            "sliding_window_non_causal": bool(fields.get("sliding_window_non_causal")) or fields.get("causal") is False,
            "markov_rank": 0 if is_plain else fields.get("markov_rank", 256),
            "markov_head_type": markov,
        }

    def _first(self, *names: str) -> Any:
        return next((self._fields[name] for name in names if self._fields.get(name) is not None), None)

    def _check(self, is_served: bool, problem: str) -> None:
        if not is_served:
            raise ModelError(f"the head {self._source.path} cannot be served: {problem}")
