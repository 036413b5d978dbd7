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


def _schema(example: Any) -> dict[str, Any]:
    """Return the schema of what has the form of an example; an empty object has any names, with texts."""
    if isinstance(example, list):
        return {"type": "array", "items": _schema(example[0]), "minItems": 1}
    if isinstance(example, dict):
        properties = {name: _schema(value) for name, value in example.items()}
        return {"type": "object", "properties": properties, "additionalProperties": not example and {"type": "string"}}
    return {"type": "string"}


_RELABELING = {"sourceLabels": [""], "regex": "", "targetLabel": "", "replacement": ""}
_ENDPOINT = {"port": "", "path": "", "interval": "", "metricRelabelings": [_RELABELING]}
_RULE = {"alert": "", "expr": "", "for": "", "labels": {}, "annotations": {}}
_MONITORING = {
    "PodMonitor": {"selector": {"matchLabels": {}}, "podTargetLabels": [""], "podMetricsEndpoints": [_ENDPOINT]},
    "PrometheusRule": {"groups": [{"name": "", "rules": [_RULE]}]},
}
"""The specs of the Prometheus operator's kinds, by the fields that are used here."""


def schema_problems(manifest: Manifest) -> Iterator[str]:
    """Yield what an API server would refuse or drop in one object."""
    name = f"{manifest['kind']} {manifest['metadata']['name']}"
    group = manifest["apiVersion"].partition("/")[0]
    if manifest["apiVersion"] == RAY_API:
        schema = ray_schema(manifest["kind"])
        manifest = with_defaults(manifest, schema)
    elif group == "monitoring.coreos.com":
        schema = {"type": "object", "properties": {"spec": _schema(_MONITORING[manifest["kind"]])}}
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
        return {"anyOf": [{"type": "integer"}, {"type": "string"}]}
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
