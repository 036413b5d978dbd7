"""Schemas of what Kubernetes accepts: its own kinds, Ray's from their CRDs, and Prometheus' in brief.

An API server drops unknown fields silently; here they are refused, so that a typo is found.
"""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from jsonschema import Draft202012Validator

from tests.k8s.manifests import ROOT, Manifest

KUBERNETES = "1.34"
CRDS = ROOT.parent / "shared" / "crds"
RAY_API = "ray.io/v1"
_INT_OR_STRING = {"anyOf": [{"type": "integer"}, {"type": "string"}]}

_LABELS: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "string"}}
_SELECTOR: dict[str, Any] = {
    "type": "object",
    "properties": {"matchLabels": _LABELS},
    "required": ["matchLabels"],
    "additionalProperties": False,
}


def _with_spec(*required: str, **properties: Any) -> dict[str, Any]:
    spec = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
    return {"type": "object", "properties": {"spec": spec}, "required": ["spec"]}


def _items(*required: str, **properties: Any) -> dict[str, Any]:
    item = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
    return {"type": "array", "items": item, "minItems": 1}


_TEXT = {"type": "string"}
_MONITORING = {
    "PodMonitor": _with_spec(
        "selector",
        "podMetricsEndpoints",
        selector=_SELECTOR,
        podTargetLabels={"type": "array", "items": _TEXT},
        podMetricsEndpoints=_items(
            "port",
            port=_TEXT,
            path=_TEXT,
            interval=_TEXT,
            metricRelabelings=_items(
                "sourceLabels",
                sourceLabels={"type": "array", "items": _TEXT},
                regex=_TEXT,
                targetLabel=_TEXT,
                replacement=_TEXT,
            ),
        ),
    ),
    "PrometheusRule": _with_spec(
        "groups",
        groups=_items(
            "name",
            "rules",
            name=_TEXT,
            rules=_items(
                "alert",
                "expr",
                "for",
                "labels",
                "annotations",
                **{"for": _TEXT, "alert": _TEXT, "expr": _TEXT, "labels": _LABELS, "annotations": _LABELS},
            ),
        ),
    ),
}
"""The fields that are used here of those that the Prometheus operator knows."""


def schema_problems(manifest: Manifest) -> Iterator[str]:
    """Yield what an API server would refuse or drop in one object."""
    name = f"{manifest['kind']} {manifest['metadata']['name']}"
    group = manifest["apiVersion"].partition("/")[0]
    if manifest["apiVersion"] == RAY_API:
        schema = ray_schema(manifest["kind"])
        manifest = with_defaults(manifest, schema)
    elif group == "monitoring.coreos.com":
        schema = _MONITORING[manifest["kind"]]
    else:
        try:
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"{name}: {'.'.join(map(str, error.path))}: {error.message[:300]}"
        except kubernetes_validate.SchemaNotFoundError:
            yield f"{name}: Kubernetes {KUBERNETES} has no {manifest['kind']} in {manifest['apiVersion']}"
        return
    for error in Draft202012Validator(schema).iter_errors(manifest):
        yield f"{name}: {'.'.join(map(str, error.path))}: {error.message[:300]}"


@functools.cache
def ray_schema(kind: str, folder: Path = CRDS) -> dict[str, Any]:
    """Return the JSON schema of one of Ray's kinds, which knows no fields but those of its CRD."""
    with (folder / f"ray.io_{kind.lower()}s.yaml").open() as file:
        crd = yaml.load(file, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (version,) = (version for version in crd["spec"]["versions"] if version["name"] == "v1")
    schema = _strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}
    return schema


def _strict(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a CRD's structural schema as JSON schema."""
    if schema.get("x-kubernetes-int-or-string"):
        return dict(_INT_OR_STRING)
    strict = {key: value for key, value in schema.items() if not key.startswith("x-") and key != "format"}
    if "properties" in schema:
        strict["properties"] = {name: _strict(child) for name, child in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            strict["additionalProperties"] = False
    elif isinstance(children := schema.get("additionalProperties"), dict):
        strict["additionalProperties"] = _strict(children)
    if "items" in schema:
        strict["items"] = _strict(schema["items"])
    return strict


def with_defaults(value: Any, schema: dict[str, Any]) -> Any:
    """Return a value with the defaults that the API server would add."""
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        defaults = {name: child["default"] for name, child in properties.items() if "default" in child}
        other = schema.get("additionalProperties")
        other = other if isinstance(other, dict) else {}
        filled = {**defaults, **value}
        return {name: with_defaults(child, properties.get(name, other)) for name, child in filled.items()}
    if isinstance(value, list):
        return [with_defaults(child, schema.get("items", {})) for child in value]
    return value
